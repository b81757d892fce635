"""How gated delta nets are divided among ranks: by heads of keys, and by heads of values.

A rank has some heads of keys, the heads of values that belong to them, and the channels of the
convolution that make both. It holds the states of its own heads. Norms of a head are the same on
all ranks. The projection behind the heads is divided by its inputs, and its results are added up.
"""

from dataclasses import replace
from typing import Any, NamedTuple

from torch import nn

from worker_proc.parallel.divided_matrices import fits, has_shape
from worker_proc.parallel.division import Division
from worker_proc.parallel.share import Section, Share, refuse
from worker_proc.recurrent.state_spec import RecurrentSpec, StateSpec

_OUT = "out_proj"
_BY_HEAD = ("dt_bias", "A_log")
_CONVOLUTION = "conv1d"
_PROJECTIONS = (
    ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    ("in_proj_qkvz", "in_proj_ba"),
)
"""Before the heads, as Qwen3.5 and Qwen3-Next have them; the latter have all of a head of keys
together."""
_COUNTS = ("num_v_heads", "num_k_heads", "key_dim", "value_dim", "conv_dim")
"""What a module keeps of its sizes."""
_OF_ALL = ("norm",)
"""Children that are the same for every head."""


class _Heads(NamedTuple):
    """The heads of a gated delta net."""

    num_keys: int
    key_size: int
    num_values: int
    value_size: int


def divide_net(name: str, module: nn.Module, share: Share) -> Division:
    """Return how a gated delta net is divided; UnsupportedModel: it cannot be."""
    heads = _heads_of(name, module, share)
    if not share.divides(heads.num_keys) or heads.num_values % heads.num_keys:
        problem = f"{heads.num_keys} heads of keys and {heads.num_values} of values"
        raise refuse(share, f"{name} has {problem}")
    keys = Section(heads.num_keys, heads.key_size)
    values = Section(heads.num_values, heads.value_size)
    gates = Section(heads.num_values, 1)
    of_keys = heads.num_values // heads.num_keys
    together = 2 * (heads.key_size + of_keys * heads.value_size)
    choices: tuple[dict[str, list[Section]], ...] = (
        {
            "in_proj_qkv": [keys, keys, values],
            "in_proj_z": [values],
            "in_proj_b": [gates],
            "in_proj_a": [gates],
        },
        {
            "in_proj_qkvz": [Section(heads.num_keys, together)],
            "in_proj_ba": [Section(heads.num_keys, 2 * of_keys)],
        },
    )
    found = [one for one in choices if fits(module, one)]
    outs = {_OUT: values}
    if not found or not has_shape(module, _OUT, inputs=[values]):
        raise refuse(share, f"{name} has projections of other sizes than its heads")
    return Division(
        name,
        found[0],
        outs,
        by_head=dict.fromkeys(_BY_HEAD, heads.num_values),
        channels={_CONVOLUTION: [keys, keys, values]},
        counts=_COUNTS,
    )


def _heads_of(name: str, module: nn.Module, share: Share) -> _Heads:
    """Return the heads of a module; UnsupportedModel: it is not made as a gated delta net is."""
    names = {name for name, _ in module.named_children()}
    own = {name for name, _ in module.named_parameters(recurse=False)}
    kinds = [{*projections, _OUT, _CONVOLUTION, *_OF_ALL} for projections in _PROJECTIONS]
    if (
        names not in kinds
        or own != set(_BY_HEAD)
        or not all(hasattr(module, one) for one in _COUNTS)
    ):
        raise refuse(share, f"{name} has a recurrent state of a kind that is not divided")
    sizes: Any = module
    return _Heads(sizes.num_k_heads, sizes.head_k_dim, sizes.num_v_heads, sizes.head_v_dim)


def divide_states(spec: RecurrentSpec, num_ranks: int) -> RecurrentSpec:
    """Return the states of a rank: some channels of a window, and some heads of another state."""
    return replace(spec, states=tuple(_divide(state, num_ranks) for state in spec.states))


def _divide(state: StateSpec, num_ranks: int) -> StateSpec:
    first, *middle, last = state.shape
    if state.is_window:
        return replace(state, shape=(first, *middle, last // num_ranks))
    return replace(state, shape=(first // num_ranks, *middle, last))

"""How gated delta nets are divided among ranks: by heads of keys, and by heads of values.

A rank has some heads of keys, the heads of values that belong to them, and the channels of the
convolution that make both. It holds the states of its own heads. Norms of a head are the same on
all ranks. The projection behind the heads is divided by its inputs, and its results are added up.
"""

from dataclasses import replace
from typing import Any, NamedTuple

from torch import nn

from worker_proc.errors import UnsupportedModel
from worker_proc.recurrent.state_spec import RecurrentSpec, StateSpec

OUT = "out_proj"
BY_HEAD = ("dt_bias", "A_log")
CONVOLUTION = "conv1d"
PROJECTIONS = (
    ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    ("in_proj_qkvz", "in_proj_ba"),
)
"""Before the heads, as Qwen3.5 and Qwen3-Next have them; the latter have all of a head of keys
together."""
_COUNTS = ("num_v_heads", "num_k_heads", "key_dim", "value_dim", "conv_dim")
"""What a module keeps of its sizes."""
_OF_ALL = ("norm",)
"""Children that are the same for every head."""


class DeltaHeads(NamedTuple):
    """The heads of a gated delta net."""

    num_keys: int
    key_size: int
    num_values: int
    value_size: int


def heads_of(module: nn.Module) -> DeltaHeads:
    """Return the heads of a module; UnsupportedModel: it is not made as a gated delta net is."""
    names = {name for name, _ in module.named_children()}
    own = {name for name, _ in module.named_parameters(recurse=False)}
    kinds = [{*projections, OUT, CONVOLUTION, *_OF_ALL} for projections in PROJECTIONS]
    if (
        names not in kinds
        or own != set(BY_HEAD)
        or not all(hasattr(module, one) for one in _COUNTS)
    ):
        raise UnsupportedModel("has a recurrent state of a kind that is not divided")
    sizes: Any = module
    return DeltaHeads(sizes.num_k_heads, sizes.head_k_dim, sizes.num_v_heads, sizes.head_v_dim)


def set_counts(module: nn.Module, num_ranks: int) -> None:
    """Divide the sizes that a module keeps."""
    for name in _COUNTS:
        setattr(module, name, getattr(module, name) // num_ranks)


def divide_states(spec: RecurrentSpec, num_ranks: int) -> RecurrentSpec:
    """Return the states of a rank: some channels of a window, and some heads of another state."""
    return replace(spec, states=tuple(_divide(state, num_ranks) for state in spec.states))


def _divide(state: StateSpec, num_ranks: int) -> StateSpec:
    first, *middle, last = state.shape
    if state.is_window:
        return replace(state, shape=(first, *middle, last // num_ranks))
    return replace(state, shape=(first // num_ranks, *middle, last))

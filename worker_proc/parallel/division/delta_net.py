"""Divides gated delta nets among ranks, by heads of keys and by heads of values.

A rank has some heads of keys, the heads of values that belong to them, the channels of the
convolution for both, and the states of these heads. The norm of a head is the same on all ranks.
The projection after the heads is divided by its inputs, and the ranks add up its results.
"""

from typing import Any, NamedTuple

from torch import nn

from worker_proc.parallel.division.matrices import fits, has_shape
from worker_proc.parallel.division.module_division import Division
from worker_proc.parallel.share import Section, Share, refuse

_OUTS = ("out_proj", "o_proj")
_BY_HEAD = ("dt_bias", "A_log")
_CONVOLUTION = "conv1d"
_KINDS = (
    {"in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "norm", "out_proj"},
    {"in_proj_qkvz", "in_proj_ba", "norm", "out_proj"},
    {"q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj", "o_norm", "o_proj"},
)
"""The projections before the heads, the norm of each head and the last projection, as named in
Qwen3.5, Qwen3-Next and OLMo-Hybrid. In Qwen3-Next all outputs for a head of keys are adjacent."""
_COUNTS = ("num_k_heads", "num_v_heads", "key_dim", "value_dim", "conv_dim")
"""The attributes of a module that are sizes."""


class _Heads(NamedTuple):
    """The heads of a gated delta net."""

    num_keys: int
    key_size: int
    num_values: int
    value_size: int


def divide_net(name: str, module: nn.Module, share: Share) -> Division | None:
    """Return the division of a gated delta net; None: the module is something else.

    Raises UnsupportedModel if the net cannot be divided.
    """
    heads = _heads_of(module)
    if heads is None:
        return None
    if not share.divides(heads.num_keys) or heads.num_values % heads.num_keys:
        problem = f"{heads.num_keys} heads of keys and {heads.num_values} of values"
        raise refuse(share, f"{name} has {problem}")
    keys = Section(heads.num_keys, heads.key_size)
    values = Section(heads.num_values, heads.value_size)
    gates = Section(heads.num_values, 1)
    mixed = [keys, keys, values]
    of_keys = heads.num_values // heads.num_keys
    together = 2 * (heads.key_size + of_keys * heads.value_size)
    choices: tuple[dict[str, list[Section]], ...] = (
        {
            "in_proj_qkv": mixed,
            "in_proj_z": [values],
            "in_proj_b": [gates],
            "in_proj_a": [gates],
        },
        {
            "in_proj_qkvz": [Section(heads.num_keys, together)],
            "in_proj_ba": [Section(heads.num_keys, 2 * of_keys)],
        },
        {
            **{"q_proj": [keys], "k_proj": [keys], "v_proj": [values], "g_proj": [values]},
            **{"b_proj": [gates], "a_proj": [gates]},
        },
    )
    counts = {
        "num_k_heads": [Section(heads.num_keys, 1)],
        "num_v_heads": [gates],
        "key_dim": [keys],
        "value_dim": [values],
        "conv_dim": mixed,
    }
    found = [one for one in choices if fits(module, one)]
    outs = [out for out in _OUTS if has_shape(module, out, inputs=[values])]
    if not found or not outs:
        raise refuse(share, f"{name} has projections of other sizes than its heads")
    return Division(
        name,
        found[0],
        {outs[0]: values},
        summed=outs[0],
        by_head=dict.fromkeys(_BY_HEAD, heads.num_values),
        channels={_CONVOLUTION: mixed},
        counts=counts,
    )


def _heads_of(module: nn.Module) -> _Heads | None:
    """Return the heads of a module; None: it has not the parts of a gated delta net."""
    names = {name for name, _ in module.named_children()}
    own = {name for name, _ in module.named_parameters(recurse=False)}
    if (
        names - {_CONVOLUTION} not in _KINDS
        or own != set(_BY_HEAD)
        or not all(hasattr(module, one) for one in _COUNTS)
    ):
        return None
    sizes: Any = module
    return _Heads(sizes.num_k_heads, sizes.head_k_dim, sizes.num_v_heads, sizes.head_v_dim)

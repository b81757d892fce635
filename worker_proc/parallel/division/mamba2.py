"""Divides the mixers of Mamba-2 among ranks, by heads and by groups of heads.

A rank has some heads, with their gates, steps and states, and the keys and queries of their groups.
If there are fewer groups than ranks, several ranks have the same group. The norm of a group covers
the heads of all of these ranks, which therefore add up their squares.
"""

from typing import Any

from torch import nn

from worker_proc.parallel.division.matrices import fits, has_shape
from worker_proc.parallel.division.module_division import Division
from worker_proc.parallel.division.rank_norm import is_norm
from worker_proc.parallel.share import Section, Share, refuse

_IN, _OUT, _CONVOLUTION, _NORM = "in_proj", "out_proj", "conv1d", "norm"
_BY_HEAD = {"dt_bias", "A_log", "D"}
_FACTORS = "mup_vector"
"""The buffer with a factor for each output of the first projection, in Falcon-H1."""
_SIZES = ("num_heads", "head_dim", "n_groups", "ssm_state_size", "intermediate_size", "conv_dim")
"""The attributes of a module that are sizes."""


def divide_mamba2(name: str, module: nn.Module, share: Share) -> Division | None:
    """Return the division of a mixer of Mamba-2; None: the module is something else.

    Raises UnsupportedModel if the mixer cannot be divided.
    """
    if not _is_mixer(module):
        return None
    sizes: Any = module
    num_heads, num_groups = sizes.num_heads, sizes.n_groups
    if not share.divides(num_heads):
        raise refuse(share, f"{name} has {num_heads} heads")
    if not share.divides(num_groups) and share.num_ranks % num_groups:
        raise refuse(share, f"{name} has {num_groups} groups of heads")
    values, heads = Section(num_heads, sizes.head_dim), Section(num_heads, 1)
    keys = Section(num_groups, sizes.ssm_state_size)
    mixed = [values, keys, keys]
    columns = {_IN: [values, *mixed, heads]}
    if not fits(module, columns) or not has_shape(module, _OUT, inputs=[values]):
        raise refuse(share, f"{name} has projections of other sizes than its heads")
    counts = {
        "num_heads": [heads],
        "n_groups": [Section(num_groups, 1)],
        "intermediate_size": [values],
        "conv_dim": mixed,
    }
    group = Section(num_groups, num_heads // num_groups * sizes.head_dim)
    has_norm = bool(_parameters(module, _NORM))
    if has_norm and not is_norm(module.get_submodule(_NORM), group.num_units * group.unit):
        raise refuse(share, f"{name}.{_NORM} is not a norm of all heads")
    return Division(
        name,
        columns,
        {_OUT: values},
        summed=_OUT,
        by_head=dict.fromkeys(sorted(_BY_HEAD), num_heads),
        gated_norms={_NORM: group} if has_norm else {},
        channels={_CONVOLUTION: mixed},
        factors={_FACTORS: columns[_IN]} if hasattr(module, _FACTORS) else {},
        counts=counts,
    )


def _is_mixer(module: nn.Module) -> bool:
    """Return whether a module has the parts of a mixer of Mamba-2, and no others."""
    own = {key for key, _ in module.named_parameters(recurse=False)}
    parts = {key for key, _ in module.named_children() if _parameters(module, key)}
    buffers = {key for key, _ in module.named_buffers()}
    return (
        own == _BY_HEAD
        and parts - {_NORM} == {_IN, _OUT, _CONVOLUTION}
        and buffers <= {_FACTORS}
        and all(hasattr(module, key) for key in _SIZES)
    )


def _parameters(module: nn.Module, child: str) -> list[nn.Parameter]:
    found = getattr(module, child, None)
    return list(found.parameters()) if isinstance(found, nn.Module) else []

"""Divides lightning attention among ranks, by heads.

A rank has the queries, keys, values, gates, decays and states of some heads. The norm covers all
heads, so the ranks add up their squares.
"""

from typing import Any

from torch import nn

from worker_proc.parallel.division.matrices import fits, has_shape
from worker_proc.parallel.division.module_division import Division
from worker_proc.parallel.division.rank_norm import is_norm
from worker_proc.parallel.share import Section, Share, refuse
from worker_proc.recurrent.lightning import is_lightning

_MIXED, _GATES, _OUT, _NORM = "qkv_proj", "output_gate", "out_proj", "norm"
_DECAYS = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")
_SLOPES = "get_slope_rate"
"""The method that computes the decays again, since those in the buffers are rounded."""
_COUNT = "num_attention_heads"


def divide_lightning(name: str, module: nn.Module, share: Share) -> Division | None:
    """Return the division of lightning attention; None: the module is something else.

    Raises UnsupportedModel if the module cannot be divided.
    """
    if not is_lightning(module):
        return None
    attention: Any = module
    num_heads, dim = len(attention.slope_rate), attention.head_dim
    if not share.divides(num_heads):
        raise refuse(share, f"{name} has {num_heads} heads")
    rows = Section(num_heads, dim)
    columns = {_MIXED: [Section(num_heads, 3 * dim)], _GATES: [rows]}
    if not fits(module, columns) or not has_shape(module, _OUT, inputs=[rows]):
        raise refuse(share, f"{name} has projections of other sizes than its heads")
    if not is_norm(module.get_submodule(_NORM), num_heads * dim):
        raise refuse(share, f"{name}.{_NORM} is not a norm of all heads")
    return Division(
        name,
        columns,
        {_OUT: rows},
        summed=_OUT,
        by_head=dict.fromkeys(_DECAYS, num_heads),
        made_by_head={_SLOPES: num_heads},
        norms={_NORM: rows},
        counts={_COUNT: [Section(num_heads, 1)]},
    )

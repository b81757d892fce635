"""Divides delta nets with a decay for each key among ranks, by heads.

A rank has the queries, keys, values, decays, gates and states of some heads. Decays and gates may
be low-rank products: all ranks then have the whole first matrix, and a rank has the outputs of the
second matrix for its heads.
"""

from collections.abc import Sequence
from typing import Any

from torch import nn

from worker_proc.parallel.division.matrices import fits, has_shape
from worker_proc.parallel.division.module_division import Division
from worker_proc.parallel.share import Section, Share, refuse

_OUT, _CONVOLUTION, _NORM, _DECAYS = "o_proj", "conv1d", "o_norm", "forget_gate"
_MIXED = ("q_proj", "k_proj", "v_proj")
_RATES = "b_proj"
_GATES = (("g_proj", ""), ("g_b_proj", "g_a_proj"))
"""The matrices of the gates: the last one, which is divided, and the first one, if there is one."""
_DECAY_MATRICES = (("f_proj", ""), ("f_b_proj", "f_a_proj"))
"""The matrices of the decays, in the same form."""
_BY_HEAD = {"A_log", "dt_bias"}
_SIZES = ("num_heads", "head_dim", "qkv_dim", "conv_dim")


def divide_kimi_net(name: str, module: nn.Module, share: Share) -> Division | None:
    """Return the division of such a delta net; None: the module is something else.

    Raises UnsupportedModel if the net cannot be divided.
    """
    gates, decays = _matrices_of(module)
    if not gates or not decays:
        return None
    sizes: Any = module
    if not share.divides(sizes.num_heads):
        raise refuse(share, f"{name} has {sizes.num_heads} heads")
    rows, heads = Section(sizes.num_heads, sizes.head_dim), Section(sizes.num_heads, 1)
    columns = {one: [rows] for one in (*_MIXED, gates, f"{_DECAYS}.{decays}")} | {_RATES: [heads]}
    if not fits(module, columns) or not has_shape(module, _OUT, inputs=[rows]):
        raise refuse(share, f"{name} has projections of other sizes than its heads")
    return Division(
        name,
        columns,
        {_OUT: rows},
        summed=_OUT,
        by_head={
            f"{_DECAYS}.A_log": sizes.num_heads,
            f"{_DECAYS}.dt_bias": sizes.num_heads * sizes.head_dim,
        },
        channels={_CONVOLUTION: [rows, rows, rows]},
        counts={
            **{"num_heads": [heads], "qkv_dim": [rows], "conv_dim": [rows, rows, rows]},
            **{f"{_DECAYS}.num_heads": [heads], f"{_DECAYS}.qkv_dim": [rows]},
        },
    )


def _matrices_of(module: nn.Module) -> tuple[str, str]:
    """Return the last matrices of gates and of decays; "": the module is not such a delta net."""
    names = {key for key, _ in module.named_children()}
    own = [key for key, _ in module.named_parameters(recurse=False)]
    if own or _DECAYS not in names or not all(hasattr(module, key) for key in _SIZES):
        return "", ""
    others = {*_MIXED, _RATES, _OUT, _CONVOLUTION, _NORM, _DECAYS}
    within = {key for key, _ in module.get_submodule(_DECAYS).named_parameters()}
    return (
        _last_of(_GATES, names - others),
        _last_of(_DECAY_MATRICES, {key.removesuffix(".weight") for key in within - _BY_HEAD}),
    )


def _last_of(kinds: Sequence[tuple[str, str]], found: set[str]) -> str:
    """Return the last matrix of the kind whose matrices are exactly those found; "": none."""
    return next((last for last, first in kinds if {last, first} - {""} == found), "")

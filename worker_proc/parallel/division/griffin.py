"""Divides the recurrent blocks of Griffin (RecurrentGemma) among ranks, by heads.

A rank has the channels of some heads, with their gates, decays, windows and states. The gates of a
head depend only on the head's own channels.
"""

from typing import Any

from torch import nn

from worker_proc.parallel.division.matrices import fits, has_shape
from worker_proc.parallel.division.module_division import Division
from worker_proc.parallel.share import Section, Share, refuse
from worker_proc.recurrent.griffin import is_griffin

_COLUMNS, _OUT, _CONVOLUTION = ("linear_x", "linear_y"), "linear_out", "conv_1d"
_BY_CHANNEL = "rg_lru.recurrent_param"
_BY_HEAD = (
    *("rg_lru.input_gate_weight", "rg_lru.input_gate_bias"),
    *("rg_lru.recurrent_gate_weight", "rg_lru.recurrent_gate_bias"),
)


def divide_griffin(name: str, module: nn.Module, share: Share) -> Division | None:
    """Return the division of a recurrent block; None: the module is something else.

    Raises UnsupportedModel if the block cannot be divided.
    """
    if not is_griffin(module):
        return None
    block: Any = module
    num_heads, num_channels = block.rg_lru.num_attention_heads, block.conv_1d.out_channels
    if not share.divides(num_heads) or num_channels % num_heads:
        raise refuse(share, f"{name} has {num_heads} heads of {num_channels} channels")
    channels, heads = Section(num_heads, num_channels // num_heads), Section(num_heads, 1)
    columns = {key: [channels] for key in _COLUMNS}
    if not fits(module, columns) or not has_shape(module, _OUT, inputs=[channels]):
        raise refuse(share, f"{name} has projections of other sizes than its convolution")
    return Division(
        name,
        columns,
        {_OUT: channels},
        summed=_OUT,
        by_head={_BY_CHANNEL: num_channels} | dict.fromkeys(_BY_HEAD, num_heads),
        channels={_CONVOLUTION: [channels]},
        counts={"lru_width": [channels], "rg_lru.num_attention_heads": [heads]},
    )

"""Divides the modules of RWKV's blocks among ranks, by channels.

In the module that averages values, a rank has some channels, with their keys, gates, decays and
sums. In the feed-forward, a rank has some inner columns; all ranks have the gates, which belong to
the outputs. Both modules mix a row with the previous one, of which all ranks keep every channel.
"""

from torch import nn

from worker_proc.parallel.division.matrices import fits, has_shape
from worker_proc.parallel.division.module_division import Division
from worker_proc.parallel.share import Section, Share, refuse
from worker_proc.recurrent.rwkv import is_rwkv
from worker_proc.recurrent.scan import COLUMNS

_BY_CHANNEL = ("time_decay", "time_first")
_AVERAGED, _OUT = ("key", "value", "receptance"), "output"
_MIXED = ("time_mix_key", "time_mix_value", "time_mix_receptance")
"""The weights with which a row and the previous one are mixed; the same on all ranks."""
_INNER, _INNER_OUT, _GATES = "key", "value", "receptance"
"""The matrices of the feed-forward."""


def divide_rwkv(name: str, module: nn.Module, share: Share) -> Division | None:
    """Return the division of a module of RWKV; None: the module is something else.

    Raises UnsupportedModel if the module cannot be divided.
    """
    if not is_rwkv(module):
        return None
    own = {key for key, _ in module.named_parameters(recurse=False)} - set(_MIXED)
    parts = {key.partition(".")[0] for key, _ in module.named_parameters() if "." in key}
    if own == set(_BY_CHANNEL) and parts == {*_AVERAGED, _OUT}:
        return _divide_averages(name, module, share)
    if not own and parts == {_INNER, _INNER_OUT, _GATES}:
        return _divide_feed_forward(name, module, share)
    return None


def _divide_averages(name: str, module: nn.Module, share: Share) -> Division:
    num_channels = module.get_parameter(_BY_CHANNEL[0]).numel()
    if num_channels % (share.num_ranks * COLUMNS):
        raise refuse(share, f"{name} has {num_channels} channels, divided {COLUMNS} at a time")
    channels = Section(num_channels, 1)
    columns = {key: [channels] for key in _AVERAGED}
    if not fits(module, columns) or not has_shape(module, _OUT, inputs=[channels]):
        raise refuse(share, f"{name} has projections of other sizes than its averages")
    return Division(
        name,
        columns,
        {_OUT: channels},
        summed=_OUT,
        by_head=dict.fromkeys(_BY_CHANNEL, num_channels),
        state_dim=1,
    )


def _divide_feed_forward(name: str, module: nn.Module, share: Share) -> Division:
    num_inner = module.get_parameter(f"{_INNER}.weight").shape[0]
    if not share.divides(num_inner):
        raise refuse(share, f"{name} has {num_inner} inner columns")
    inner = Section(num_inner, 1)
    columns = {_INNER: [inner]}
    if not fits(module, columns) or not has_shape(module, _INNER_OUT, inputs=[inner]):
        raise refuse(share, f"{name} has projections of other sizes than its inner columns")
    return Division(name, columns, {_INNER_OUT: inner}, summed=_INNER_OUT)

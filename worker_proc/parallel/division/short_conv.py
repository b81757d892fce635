"""Divides short convolutions with gates among ranks, by channels.

A rank has some channels, with both of their gates and the window of previous rows.
"""

from torch import nn

from worker_proc.parallel.division.matrices import fits, has_shape
from worker_proc.parallel.division.module_division import Division
from worker_proc.parallel.share import Section, Share, refuse

_IN, _OUT, _CONVOLUTION = "in_proj", "out_proj", "conv"


def divide_short_conv(name: str, module: nn.Module, share: Share) -> Division | None:
    """Return the division of a short convolution; None: the module is something else.

    Raises UnsupportedModel if the module cannot be divided.
    """
    convolution = getattr(module, _CONVOLUTION, None)
    own = {key for key, _ in module.named_parameters(recurse=False)}
    if (
        not isinstance(convolution, nn.Conv1d)
        or {key for key, _ in module.named_children()} != {_IN, _OUT, _CONVOLUTION}
        or own
        or list(module.buffers())
    ):
        return None
    num_channels = convolution.out_channels
    if not share.divides(num_channels):
        raise refuse(share, f"{name} has {num_channels} channels")
    channels = Section(num_channels, 1)
    columns = {_IN: [channels, channels, channels]}
    if not fits(module, columns) or not has_shape(module, _OUT, inputs=[channels]):
        raise refuse(share, f"{name} has projections of other sizes than its convolution")
    return Division(
        name, columns, {_OUT: channels}, summed=_OUT, channels={_CONVOLUTION: [channels]}
    )

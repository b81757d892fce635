"""Divides the mixers of Mamba-1 among ranks, by channels or by heads.

A rank has some channels, with their gates, steps, decays and states. Steps, keys and queries depend
on all channels, so the ranks add up their parts of these within the mixer. In mixers with several
heads (Zamba), the steps, keys and queries of a head depend only on the head's own channels, and a
rank has some heads.
"""

from torch import nn

from worker_proc.parallel.division.matrices import fits, has_shape
from worker_proc.parallel.division.module_division import Division
from worker_proc.parallel.share import Section, Share, refuse
from worker_proc.recurrent.scan import COLUMNS

_IN, _OUT, _CONVOLUTION = "in_proj", "out_proj", "conv1d"
_OF_ALL, _STEPS = "x_proj", "dt_proj"
"""The projection of all channels to steps, keys and queries, and that of steps to channels."""
_BY_CHANNEL = {"A_log", "D"}
_NORMS = {"dt_layernorm", "b_layernorm", "c_layernorm"}
"""Norms of steps, keys and queries, which are the same on all ranks."""
_BY_HEAD = {"x_proj_weight", "dt_proj_weight", "dt_proj_bias", "A_log", "D"}
"""The parameters of a mixer with heads, each with a row for each head."""


def divide_mamba(name: str, module: nn.Module, share: Share) -> Division | None:
    """Return the division of a mixer of Mamba-1 without heads; None: the module is something else.

    Raises UnsupportedModel if the mixer cannot be divided.
    """
    own = {key for key, _ in module.named_parameters(recurse=False)}
    parts = {key.partition(".")[0] for key in module.state_dict() if "." in key}
    if own != _BY_CHANNEL or parts - _NORMS != {_IN, _OUT, _CONVOLUTION, _OF_ALL, _STEPS}:
        return None
    convolution = module.get_submodule(_CONVOLUTION)
    if not isinstance(convolution, nn.Conv1d):
        return None
    num_channels = convolution.out_channels
    if num_channels % (share.num_ranks * COLUMNS):
        raise refuse(share, f"{name} has {num_channels} channels, divided {COLUMNS} at a time")
    channels = Section(num_channels, 1)
    columns = {_IN: [channels, channels], _STEPS: [channels]}
    outs = {_OF_ALL: channels, _OUT: channels}
    if not fits(module, columns) or not all(
        has_shape(module, key, inputs=[channels]) for key in outs
    ):
        raise refuse(share, f"{name} has projections of other sizes than its convolution")
    return Division(
        name,
        columns,
        outs,
        summed=_OUT,
        summed_within=(_OF_ALL,),
        by_head=dict.fromkeys(sorted(_BY_CHANNEL), num_channels),
        channels={_CONVOLUTION: [channels]},
        counts={"intermediate_size": [channels]},
    )


def divide_heads_of_mamba(name: str, module: nn.Module, share: Share) -> Division | None:
    """Return the division of a mixer of Mamba-1 with heads; None: the module is something else.

    Raises UnsupportedModel if the mixer cannot be divided.
    """
    own = {key for key, _ in module.named_parameters(recurse=False)}
    parts = {key.partition(".")[0] for key in module.state_dict() if "." in key}
    convolution = getattr(module, _CONVOLUTION, None)
    if own != _BY_HEAD or parts != {_IN, _OUT, _CONVOLUTION}:
        return None
    if not isinstance(convolution, nn.Conv1d):
        return None
    num_heads, num_channels = len(module.get_parameter("D")), convolution.out_channels
    if not share.divides(num_heads):
        raise refuse(share, f"{name} has {num_heads} heads of Mamba")
    channels = Section(num_heads, num_channels // num_heads)
    columns = {_IN: [Section(num_heads, 2 * channels.unit)]}  # a head's channels and their gates
    if not fits(module, columns) or not has_shape(module, _OUT, inputs=[channels]):
        raise refuse(share, f"{name} has projections of other sizes than its convolution")
    return Division(
        name,
        columns,
        {_OUT: channels},
        summed=_OUT,
        by_head=dict.fromkeys(sorted(_BY_HEAD), num_heads),
        channels={_CONVOLUTION: [channels]},
        counts={"intermediate_size": [channels], "n_mamba_heads": [Section(num_heads, 1)]},
        has_state_of_head=True,
    )

"""How the mixers of Mamba-1 are divided among ranks: by their channels.

A rank has some channels, their gates, steps and decays, and the states of these. Steps, keys and
queries are made of all channels: the ranks add up their parts of these within the mixer.
"""

from torch import nn

from worker_proc.parallel.divided_matrices import fits, has_shape
from worker_proc.parallel.division import Division
from worker_proc.parallel.share import Section, Share, refuse
from worker_proc.recurrent.scan import COLUMNS

_IN, _OUT, _CONVOLUTION = "in_proj", "out_proj", "conv1d"
_OF_ALL, _STEPS = "x_proj", "dt_proj"
"""What makes steps, keys and queries of all channels, and what makes each channel's steps."""
_BY_CHANNEL = {"A_log", "D"}
_NORMS = {"dt_layernorm", "b_layernorm", "c_layernorm"}
"""Of steps, keys and queries, which are the same at all ranks."""


def divide_mamba(name: str, module: nn.Module, share: Share) -> Division | None:
    """Return how a mixer of Mamba-1 is divided, None of another module.

    UnsupportedModel: it cannot be divided.
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

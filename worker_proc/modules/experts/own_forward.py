"""Experts whose own forward multiplies by packed matrices, one expert after the other.

In LongCat-Flash some experts return their rows unchanged. Muse Spark normalizes the rows of each
expert. transformers' own code chooses, connects and adds there, in the ascending order of experts.
Its matrices are packed, so that a row's bits do not depend on the other rows.
"""

import inspect
from functools import partial

import torch
from torch import nn

from worker_proc.modules.experts.grouped import agrees, own_results, trials
from worker_proc.modules.experts.products import ExpertSizes
from worker_proc.modules.packed_matrix import PackedMatrices
from worker_proc.modules.trial_attributes import keeps_attributes
from worker_proc.native.kernels import NATIVE_DTYPES, NativeLibrary
from worker_proc.quantization.coded_tensor import CodedTensor

_STACKS = {"gate_up_proj", "down_proj"}


@torch.inference_mode()
def pack_own_experts(module: nn.Module, library: NativeLibrary, *, is_proven: bool) -> bool:
    """Pack a module's stacks of matrices in place, and return whether it multiplies by them.

    A module that computes something else stays as it is. With `is_proven`, nothing is tried.
    """
    stacks = dict(module.named_parameters(recurse=False))
    if set(stacks) != _STACKS or not all(map(_is_stack, stacks.values())):
        return False
    up = stacks["gate_up_proj"]
    num_experts, width, hidden_size = up.shape
    tried = trials(ExpertSizes(num_experts, hidden_size, width // 2), up.dtype)
    expected = None if is_proven else own_results(module, tried)
    if not is_proven and expected is None:
        return False
    packed = {name: PackedMatrices(library, stack) for name, stack in stacks.items()}
    forward = partial(inspect.unwrap(type(module).forward), module)
    return keeps_attributes(
        module,
        {**packed, "forward": forward},
        lambda: expected is None or agrees(module(*tried), expected, tried),
    )


def _is_stack(weight: torch.Tensor) -> bool:
    is_plain = weight.dtype in NATIVE_DTYPES and not isinstance(weight, CodedTensor)
    return weight.dim() == 3 and not weight.is_meta and is_plain

"""Tries mixtures of experts before weights are read, with few experts of random weights.

The trial uses the module's class and the sizes of its matrices. A mixture that fails here would not
be proven after the load, either; one that passes is tried again with its own weights.
"""

import copy

import torch
from torch import nn

from protocol.config import Quantization
from worker_proc.loading.deferred_module import make_generator
from worker_proc.modules.experts.grouped import (
    fused_grouped_experts,
    own_results,
    read_experts,
    trials,
)
from worker_proc.modules.experts.scaled import has_scaled_experts
from worker_proc.modules.pointwise import activation_of
from worker_proc.modules.rounding_refusals import unsupported_experts
from worker_proc.native.kernels import NativeLibrary
from worker_proc.native.packed_weights import Format

NUM_EXPERTS = 2
_NUM_VALUES = 1 << 20
"""Number of random values; larger weights repeat them."""


def check_few_experts(
    model: nn.Module, library: NativeLibrary, format: Format, quantization: Quantization
) -> None:
    """Raise UnsupportedModel for experts that the kernels do not compute; `model` has no values.

    One module of each class is tried.
    """
    if format is Format.INT8_FOR_CODES:
        for name, module in model.named_modules():
            if has_scaled_experts(module):  # no reference computes with codes of their rows
                raise unsupported_experts(quantization, name, module)
    tried: set[type[nn.Module]] = set()
    for name, module in model.named_modules():
        if type(module) in tried or read_experts(module, has_values=False) is None:
            continue
        tried.add(type(module))
        few = _with_few_experts(module)
        experts = read_experts(few)
        if experts is None:
            continue
        tried_rows = trials(experts.sizes, experts.down.weights.dtype)
        if own_results(few, tried_rows) is None:
            continue  # few experts cannot be computed: the check with its weights decides
        activation = activation_of(getattr(few, "act_fn", None), library)
        if fused_grouped_experts(few, library, activation, format, is_proven=False) is None:
            raise unsupported_experts(quantization, name, module)


def _with_few_experts(module: nn.Module) -> nn.Module:
    """Return a copy of a module of the meta device with few experts, whose weights are random."""
    few = copy.deepcopy(module)
    num_experts = len(next(module.parameters()))
    for name, value in vars(few).items():
        if type(value) is int and value == num_experts:
            setattr(few, name, min(NUM_EXPERTS, num_experts))
    values = torch.randn(_NUM_VALUES, generator=make_generator(1))
    for name, parameter in module.named_parameters():
        shape = (min(NUM_EXPERTS, num_experts), *parameter.shape[1:])
        count = shape[0] * parameter.shape[1:].numel()
        own = values.to(parameter.dtype).repeat(-(-count // len(values)))[:count].view(shape)
        own = own / max(parameter.shape[-1], 1) ** 0.5
        setattr(few, name, nn.Parameter(own, requires_grad=False))
    return few

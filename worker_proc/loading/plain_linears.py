"""Makes plain linear layers of modules that compute nothing else.

Such as Falcon's, whose class adds the bias in a step of its own. Plain ones are packed, quantized
and adapted like those of any model.
"""

import copy
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from worker_proc.loading.deferred_module import make_generator

TRIAL_SCALES = (0.01, 1.0, 1e3)
NUM_ROWS = 5
SIZE = 8
"""Inputs and outputs of a trial, at most: a part of the module's weight."""
MAX_ERROR = 1e-5


def make_linears_plain(model: nn.Module) -> None:
    """Make plain linear layers of subclasses whose forward gives the same."""
    tried: dict[tuple[type, bool], bool] = {}
    for module in model.modules():
        if not isinstance(module, nn.Linear) or type(module) is nn.Linear:
            continue
        if module.weight.is_meta or "forward" in module.__dict__ or set(module.children()):
            continue
        kind = type(module), module.bias is None
        if kind not in tried:
            tried[kind] = _is_plain(module)
        if tried[kind]:
            module.__class__ = nn.Linear


@torch.inference_mode()
def _is_plain(module: nn.Linear) -> bool:
    """Return whether a part of a module gives what a plain linear layer gives, in float32."""
    if (
        set(dict(module.named_parameters())) - {"weight", "bias"}
        or next(module.buffers(), None) is not None
    ):
        return False
    weight = module.weight[:SIZE, :SIZE].float()
    bias = None if module.bias is None else module.bias[:SIZE].float()
    part = copy.copy(module)
    part._parameters = {
        name: None if value is None else nn.Parameter(value, requires_grad=False)
        for name, value in (("weight", weight), ("bias", bias))
    }
    part.in_features, part.out_features = weight.shape[1], weight.shape[0]
    generator = make_generator(1)
    for scale in TRIAL_SCALES:
        rows = torch.randn(NUM_ROWS, part.in_features, generator=generator) * scale
        rows = rows.to(weight.device)
        expected = functional.linear(rows, weight, bias)
        try:
            found: Any = part(rows)
        except (TypeError, ValueError, AttributeError, RuntimeError, IndexError):
            return False  # it takes more than rows, or weights of one shape
        if not isinstance(found, torch.Tensor) or found.shape != expected.shape:
            return False  # such as a router
        if float((found - expected).abs().max()) > MAX_ERROR * float(expected.abs().max()):
            return False
    return True

"""Converts subclasses of linear layers that compute nothing else to plain linear layers.

An example is Falcon's class, which adds the bias in a separate step. Plain layers are packed,
quantized and adapted like those of any model.
"""

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from worker_proc.loading.deferred_module import make_generator

TRIAL_SCALES = (0.01, 1.0, 1e3)
NUM_ROWS = 5
_PLAIN = frozenset(vars(nn.Linear(1, 1, device="meta")))
"""Attributes of every linear layer; additional attributes may change its results."""
MAX_ERROR = 1e-5
_Kind = tuple[type[nn.Module], bool, tuple[object, ...]]


def make_linears_plain(model: nn.Module) -> None:
    """Convert subclasses of linear layers whose results are the same to plain ones.

    Among layers that differ only in their sizes and values, one is tried.
    """
    tried: dict[_Kind, bool] = {}
    for module in model.modules():
        if not isinstance(module, nn.Linear) or type(module) is nn.Linear:
            continue
        if module.weight.is_meta or "forward" in module.__dict__ or set(module.children()):
            continue
        kind = _kind(module)
        if kind not in tried:
            tried[kind] = _is_plain(module)
        if tried[kind]:
            module.__class__ = nn.Linear


class ReadLinear(nn.Linear):
    """A linear layer whose weight other modules' code reads: it is neither packed nor rounded."""


def keep_read(model: nn.Module, names: Iterable[str]) -> None:
    """Make linear layers keep their weights as they are."""
    for name in names:
        model.get_submodule(name).__class__ = ReadLinear


def _kind(module: nn.Linear) -> _Kind:
    """Return the class and everything else that a layer's results may depend on."""
    others = {name: value for name, value in vars(module).items() if name not in _PLAIN}
    own = (
        (name, value if isinstance(value, str | int | float | None) else id(value))
        for name, value in sorted(others.items())
    )
    return type(module), module.bias is None, tuple(own)


@torch.inference_mode()
def _is_plain(module: nn.Linear) -> bool:
    """Return whether a module computes the same as a plain linear layer, in float32."""
    if (
        set(dict(module.named_parameters())) - {"weight", "bias"}
        or next(module.buffers(), None) is not None
    ):
        return False
    weight = module.weight.float()
    bias = None if module.bias is None else module.bias.float()
    wide = copy.copy(module)
    wide._parameters = {
        name: None if value is None else nn.Parameter(value, requires_grad=False)
        for name, value in (("weight", weight), ("bias", bias))
    }
    generator = make_generator(1)
    for scale in TRIAL_SCALES:
        rows = torch.randn(NUM_ROWS, weight.shape[1], generator=generator) * scale
        rows = rows.to(weight.device)
        expected = functional.linear(rows, weight, bias)
        try:
            found: Any = wide(rows)
        except (TypeError, ValueError, AttributeError, RuntimeError, IndexError):
            return False  # it takes more than rows, or needs another weight
        if not isinstance(found, torch.Tensor) or found.shape != expected.shape:
            return False  # a router, for example
        difference = float((found - expected).abs().max())
        if not difference <= MAX_ERROR * float(expected.abs().max()):
            return False
    return True

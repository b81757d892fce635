"""Makes plain linear layers of modules that compute nothing else.

Such as Falcon's, whose class adds the bias in a step of its own. Plain ones are packed, quantized
and adapted like those of any model.
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
"""What every linear layer has; what another one has besides it may change its results."""
MAX_ERROR = 1e-5
_Kind = tuple[type[nn.Module], bool, tuple[object, ...]]


def make_linears_plain(model: nn.Module) -> None:
    """Make plain linear layers of subclasses whose forward gives the same.

    One layer is tried of those that differ in their sizes and values only.
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
    """A linear layer whose weight the code of other modules reads: it is not packed nor rounded."""


def keep_read(model: nn.Module, names: Iterable[str]) -> None:
    """Let linear layers keep their weights as they are."""
    for name in names:
        model.get_submodule(name).__class__ = ReadLinear


def _kind(module: nn.Linear) -> _Kind:
    """Return the class and whatever else the results of a layer may depend on."""
    others = {name: value for name, value in vars(module).items() if name not in _PLAIN}
    own = (
        (name, value if isinstance(value, str | int | float | None) else id(value))
        for name, value in sorted(others.items())
    )
    return type(module), module.bias is None, tuple(own)


@torch.inference_mode()
def _is_plain(module: nn.Linear) -> bool:
    """Return whether a module gives what a plain linear layer gives, in float32."""
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
            return False  # it takes more than rows, or weights of one shape
        if not isinstance(found, torch.Tensor) or found.shape != expected.shape:
            return False  # such as a router
        difference = float((found - expected).abs().max())
        if not difference <= MAX_ERROR * float(expected.abs().max()):
            return False
    return True

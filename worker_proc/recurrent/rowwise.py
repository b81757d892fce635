"""Elementwise functions of torch that give a value the same bits wherever it stands.

torch computes such functions in vectors, and the end of a tensor, or of a thread's share of it, in
another way. Here every value is a part of a whole vector, in pieces that one thread computes.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

PIECE = 16_384
"""Values that are computed at once: fewer than torch would share among threads."""
_VECTOR = 64  # a multiple of what torch computes in one pass, for any type and processor

_FUNCTIONS: frozenset[Callable[..., Any]] = frozenset(
    (
        *(torch.sigmoid, torch.Tensor.sigmoid, torch.exp, torch.Tensor.exp),
        *(torch.log, torch.Tensor.log, torch.log1p, torch.Tensor.log1p),
        *(torch.tanh, torch.Tensor.tanh, functional.softplus, functional.silu),
        *(functional.logsigmoid, functional.sigmoid, functional.tanh),
    )
)

_NAMES = frozenset(function.__name__ for function in _FUNCTIONS)

Function = Callable[..., torch.Tensor]


def rowwise(function: Function, values: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Return `function(values, ...)`, each value of which depends on its own argument alone."""
    flat = values.reshape(-1)
    count = flat.numel()
    if count % _VECTOR or not flat.is_contiguous():
        padded = flat.new_zeros(-(-count // _VECTOR) * _VECTOR)
        padded[:count] = flat
        flat = padded
    parts = [function(part, *args, **kwargs) for part in flat.split(PIECE)]
    whole = parts[0] if len(parts) == 1 else torch.cat(parts)
    return whole[:count].view(values.shape)


class RowwiseFunctions(TorchFunctionMode):
    """While it is entered, torch's elementwise functions are computed by `rowwise`."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []
        """Of the arguments that the functions were called with."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func not in _FUNCTIONS:
            return func(*args, **(kwargs or {}))
        self.sizes.append(args[0].numel())
        return rowwise(func, *args, **(kwargs or {}))


def compute_rowwise(module: nn.Module) -> None:
    """Let elementwise functions in a module's own forward be computed by `rowwise`, if it has any.

    Such as the gates of attention in Qwen3-Next.
    """
    forward = inspect.unwrap(type(module).forward)
    code = getattr(forward, "__code__", None)
    if code is None or not _NAMES.intersection(code.co_names):
        return
    own: Callable[..., Any] = module.forward

    def entered(*args: Any, **kwargs: Any) -> Any:
        with RowwiseFunctions():
            return own(*args, **kwargs)

    module.__dict__["forward"] = entered
    module.__dict__["computes_rowwise"] = True


def computes_rowwise(module: nn.Module) -> bool:
    """Return whether elementwise functions in a module and its parts are computed by `rowwise`."""
    layer: Any = module.__dict__.get("recurrent_layer")
    return "computes_rowwise" in module.__dict__ or (layer is not None and layer.is_rowwise)

"""Elementwise torch functions that give a value the same bits at every position.

torch computes such functions in vectors, and the end of a tensor, or of a thread's share of it,
differently. Here every value is part of a whole vector, in pieces that one thread computes.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import activations

PIECE = 16_384
"""Number of values computed at once: fewer than torch would divide among threads."""
_VECTOR = 64
"""A multiple of torch's vector sizes, for every dtype and processor."""

_FUNCTIONS: frozenset[Callable[..., Any]] = frozenset(
    (
        *(torch.sigmoid, torch.Tensor.sigmoid, torch.exp, torch.Tensor.exp),
        *(torch.log, torch.Tensor.log, torch.log1p, torch.Tensor.log1p),
        *(torch.tanh, torch.Tensor.tanh, functional.softplus, functional.silu),
        *(functional.logsigmoid, functional.sigmoid, functional.tanh, functional.mish),
    )
)
_ACTIVATIONS = frozenset((activations.__name__, nn.modules.activation.__name__))
"""The files whose modules without parameters are functions of single values."""

_NAMES = frozenset(function.__name__ for function in _FUNCTIONS)

Function = Callable[..., torch.Tensor]


def rowwise(function: Function, values: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Return `function(values, ...)`; each result depends on its own argument alone."""
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
    """Computes torch's elementwise functions by `rowwise` within the context."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []
        """The sizes of the arguments of the functions."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func not in _FUNCTIONS:
            return func(*args, **(kwargs or {}))
        self.sizes.append(args[0].numel())
        return rowwise(func, *args, **(kwargs or {}))


def compute_rowwise(module: nn.Module) -> None:
    """Make a module's own forward compute elementwise functions by `rowwise`, if it has any.

    The attention gates of Qwen3-Next are an example.
    """
    forward = inspect.unwrap(type(module).forward)
    code = getattr(forward, "__code__", None)
    if code is not None and _NAMES.intersection(code.co_names):
        _enter(module)


@torch.inference_mode()
def compute_activations_rowwise(model: nn.Module) -> None:
    """Make activations that call such functions, as quick GELU does, compute them by `rowwise`."""
    for module in model.modules():
        if type(module).__module__ not in _ACTIVATIONS or [*module.parameters()]:
            continue
        with RowwiseFunctions() as functions:
            try:
                module(torch.ones(1))
            except (RuntimeError, IndexError, ValueError):
                continue  # nn.GLU, for example, is a function of several values
        if functions.sizes:
            _enter(module)


def _enter(module: nn.Module) -> None:
    own: Callable[..., Any] = module.forward

    def entered(*args: Any, **kwargs: Any) -> Any:
        with RowwiseFunctions():
            return own(*args, **kwargs)

    module.__dict__["forward"] = entered
    module.__dict__["computes_rowwise"] = True


def computes_rowwise(module: nn.Module) -> bool:
    """Return whether a module and its parts compute elementwise functions by `rowwise`."""
    layer: Any = module.__dict__.get("recurrent_layer")
    return "computes_rowwise" in module.__dict__ or (layer is not None and layer.is_rowwise)

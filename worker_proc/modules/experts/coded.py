"""Experts with codes: weights are rounded to codes, and modules compute with them as references."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from worker_proc.modules.coded_linear import coded_rows, coded_weight, rounded_copy
from worker_proc.native.kernels import NativeLibrary
from worker_proc.native.packed_weights import Format


def is_transposed(experts: nn.Module) -> bool:
    """Return whether weights are `[num_experts, num_inputs, num_outputs]`.

    transformers' interface has an attribute for that. Modules without it are recognized by the
    first product's outputs, gates and factors, which are twice as many as the inputs of the second
    product.
    """
    if hasattr(experts, "is_transposed"):
        return bool(experts.is_transposed)
    parameters = dict(experts.named_parameters())
    up, down = parameters.get("gate_up_proj"), parameters.get("down_proj")
    if up is None or down is None or up.dim() != 3 or down.dim() != 3:
        return False
    return up.shape[1] == down.shape[2] and up.shape[2] == 2 * down.shape[1]


def round_experts(experts: nn.Module, library: NativeLibrary, format: Format) -> None:
    """Round all weights of experts to values that codes represent, freeing each before the next."""
    has_transposed = is_transposed(experts)
    for name in [name for name, weight in experts.named_parameters() if weight.dim() == 3]:
        weight = getattr(experts, name)
        rounded = rounded_copy(weight.mT if has_transposed else weight, library, format)
        rounded = nn.Parameter(rounded.mT, requires_grad=False) if has_transposed else rounded
        setattr(experts, name, rounded)


@contextmanager
def computing_expert_codes(experts: nn.Module, *, of_rows: bool = True) -> Iterator[None]:
    """Make experts compute with codes of weights, and `of_rows`, in float32, within the context."""
    # transformers' own definition multiplies by `linear`; its faster replacements do not.
    forward = inspect.unwrap(type(experts).forward)

    def coded_forward(*args: Any, **kwargs: Any) -> Any:
        with _CodedProducts(of_rows=of_rows):
            return forward(experts, *args, **kwargs)

    experts.__dict__["forward"] = coded_forward
    try:
        yield
    finally:
        del experts.__dict__["forward"]


_MATRIX_PRODUCTS = (torch.Tensor.matmul, torch.Tensor.__matmul__, torch.matmul)


class _CodedProducts(TorchFunctionMode):
    """Multiplies rows, or their codes, by codes of weights, in float32, within the context."""

    def __init__(self, *, of_rows: bool) -> None:
        super().__init__()
        self._take = coded_rows if of_rows else torch.Tensor.float

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_transposed = func in _MATRIX_PRODUCTS
        if not (func is functional.linear or is_transposed) or len(args) != 2:
            return func(*args, **(kwargs or {}))
        rows, weight = args
        weight = weight.mT if is_transposed else weight
        return functional.linear(self._take(rows), coded_weight(weight)).to(rows.dtype)

"""Linear layers with codes: weights are rounded, and modules compute with codes as references."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn import functional

from worker_proc.native.kernels import NativeLibrary
from worker_proc.native.packed_weights import Format
from worker_proc.quantization.coded_tensor import CodedTensor


def round_linears(modules: Iterable[nn.Module], library: NativeLibrary, format: Format) -> None:
    """Round the weights of linear layers among the modules to values that codes represent."""
    for module in modules:
        if type(module) is nn.Linear and not module.weight.is_meta:
            module.weight = rounded_copy(module.weight, library, format)


def rounded_copy(weight: torch.Tensor, library: NativeLibrary, format: Format) -> nn.Parameter:
    """Return a copy of a weight, rounded to values that codes represent.

    It is a copy because a mapped checkpoint page, once written, would stay as long as any tensor of
    its file.
    """
    rounded = weight.detach().clone(memory_format=torch.contiguous_format)
    library.packer.round(rounded, format)
    return nn.Parameter(rounded, requires_grad=False)


@contextmanager
def computing_codes(modules: Iterable[nn.Module], *, of_rows: bool = True) -> Iterator[None]:
    """Make linear layers compute with codes of their weights within the context.

    With `of_rows`, they compute with codes of their rows, too. They compute in float32, so that
    nothing but these codes is rounded.
    """
    linears = [module for module in modules if type(module) is nn.Linear]
    for module in linears:
        module.__dict__["forward"] = _coded_forward(
            module, coded_rows if of_rows else torch.Tensor.float
        )
    try:
        yield
    finally:
        for module in linears:
            del module.__dict__["forward"]


def _coded_forward(
    module: nn.Linear, take: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a forward that multiplies what `take` makes of rows, in float32."""
    stored: torch.Tensor = module.weight
    if isinstance(stored, CodedTensor):
        weight = stored.dequantize(torch.float32)
    else:
        weight = coded_weight(stored)
    bias = None if module.bias is None else module.bias.float()
    return lambda rows: functional.linear(take(rows), weight, bias).to(rows.dtype)


def coded_rows(rows: torch.Tensor) -> torch.Tensor:
    """Return the float32 values that the codes of rows represent, as in coded_rows.h."""
    greatest = rows.float().abs().amax(-1, keepdim=True)
    inverse = greatest.new_tensor(127.0) / greatest
    codes = (rows.double() * inverse).round().where(greatest > 0.0, 0.0)
    return (codes * (greatest / 127.0)).float()


def coded_weight(weight: torch.Tensor) -> torch.Tensor:
    """Return the float32 values of the 8-bit codes of a rounded weight, as in int8_panels.h."""
    greatest = weight.float().abs().amax(1, keepdim=True)
    last = 1 << 10  # lowest bit that a scale keeps
    scale = ((greatest / 127.0).view(torch.int32) & -last | last).view(torch.float32)
    return (weight.float() / scale).round() * scale

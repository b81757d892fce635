"""Convolutions in torch in which a row's bits do not depend on the other rows.

In a depthwise convolution, each output is a single chain of sums over its taps. A grouped
convolution multiplies the rows within reach by a packed matrix for each group.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from worker_proc.native.instructions import projection
from worker_proc.native.kernels import NativeLibrary
from worker_proc.recurrent.rowwise import RowwiseFunctions

Product = Callable[[torch.Tensor], torch.Tensor]
"""Multiplies rows by a matrix."""


class Convolutions:
    """Convolutions; the groups of a parameter are packed once."""

    def __init__(self, library: NativeLibrary | None) -> None:
        self._library = library
        self._products: dict[int, list[Product]] = {}
        """The products with a parameter's groups, by the parameter's address."""

    def convolve(  # noqa: PLR0917 (the signature is torch's)
        self,
        columns: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> torch.Tensor:
        """Return `[texts, outputs, places]` for `[texts, channels, columns]`."""
        one_stride, before, apart = _single(stride), _single(padding), _single(dilation)
        if one_stride != 1:
            raise TypeError(f"a convolution with a stride of {one_stride}")
        if before:
            columns = functional.pad(columns, (before, before))
        num_taps = weight.shape[2]
        num_places = columns.shape[2] - apart * (num_taps - 1)
        taps = [columns[..., tap * apart : tap * apart + num_places] for tap in range(num_taps)]
        if weight.shape[1] == 1 and len(weight) == groups:
            sums = torch.zeros(len(columns), groups, num_places)
            if bias is not None:
                sums += bias.float()[:, None]
            for tap, factors in zip(taps, weight.float().unbind(2), strict=True):
                sums += tap.float() * factors
            return sums.to(columns.dtype)
        rows = torch.stack(taps, dim=2).unflatten(1, (groups, -1))
        rows = rows.permute(1, 0, 4, 2, 3).flatten(3)  # [groups, texts, places, inputs]
        pairs = zip(rows.contiguous(), self._products_of(weight, groups), strict=True)
        out = torch.cat([product(own) for own, product in pairs], dim=-1).transpose(1, 2)
        return out if bias is None else out + bias[:, None]

    def _products_of(self, weight: torch.Tensor, groups: int) -> list[Product]:
        """Return the products with each group's matrix, `[outputs, channels of the group * taps]`.

        The products of a parameter are kept, since its address does not change.
        """
        kept = self._products.get(weight.data_ptr()) if isinstance(weight, nn.Parameter) else None
        if kept is not None:
            return kept
        matrices = weight.detach().flatten(1).chunk(groups)
        products = [self._product(matrix.contiguous()) for matrix in matrices]
        if isinstance(weight, nn.Parameter):
            self._products[weight.data_ptr()] = products
        return products

    def _product(self, matrix: torch.Tensor) -> Product:
        library = self._library
        if library is None:
            return lambda rows: functional.linear(rows, matrix)
        packed = library.packer.pack(matrix, None)
        instruction = projection(packed)

        def multiply(rows: torch.Tensor) -> torch.Tensor:
            out = library.project(instruction, rows, packed.num_outputs)[:, : len(matrix)]
            return out.reshape(*rows.shape[:-1], len(matrix))

        return multiply


class RowConvolutions(RowwiseFunctions):
    """Computes torch's elementwise functions and convolutions row by row within the context."""

    def __init__(self, convolutions: Convolutions) -> None:
        super().__init__()
        self._convolutions = convolutions

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.conv1d:
            return self._convolutions.convolve(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)


def _single(value: Any) -> int:
    """Return the integer that torch accepts either alone or in a tuple of one."""
    [number] = value if isinstance(value, tuple | list) else [value]
    return int(number)

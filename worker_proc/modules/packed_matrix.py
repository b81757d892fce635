"""Packed weights for modules that call `functional.linear` or `torch.bmm` themselves."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional

from worker_proc.native.instructions import projection
from worker_proc.native.kernels import NativeLibrary


class PackedMatrix:
    """Replaces a weight `[out_features, in_features]` in a module.

    It can be cast, and be the weight of `functional.linear` in float32 or bfloat16; a row's bits
    then do not depend on the other rows. Every other operation raises TypeError.
    """

    def __init__(
        self,
        library: NativeLibrary,
        weight: torch.Tensor,
        dtype: torch.dtype | None = None,
        *,
        can_be_cast: bool = True,
    ) -> None:
        """Pack a weight. One that can be cast keeps its unpacked values in memory."""
        self.dtype = dtype or weight.dtype
        self.shape = weight.shape
        self.device = weight.device
        self._library = library
        self._weight = weight.detach() if can_be_cast else None
        self._casts: dict[torch.dtype, PackedMatrix] = {}
        self._was_used = False
        self._packed = library.packer.pack(weight.detach().to(self.dtype), None)
        self._instruction = projection(self._packed)

    def to(self, target: torch.dtype) -> "PackedMatrix":
        """Return the weight in another dtype; each dtype is packed once."""
        if target == self.dtype:
            return self
        if self._weight is None:
            raise TypeError(f"a packed weight of {self.dtype} is not cast to {target}")
        if target not in self._casts:
            self._casts[target] = PackedMatrix(self._library, self._weight, target)
        return self._casts[target]

    type = to

    @property
    def is_used(self) -> bool:
        """True if rows have been multiplied by the weight, in at least one dtype."""
        return self._was_used or any(cast.is_used for cast in self._casts.values())

    def float(self) -> "PackedMatrix":
        return self.to(torch.float32)

    def linear(self, rows: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return `rows @ weight.T + bias`, for `[..., in_features]`, contiguous."""
        if rows.dtype != self.dtype:
            raise TypeError(f"rows of {rows.dtype} and a weight of {self.dtype}")
        self._was_used = True
        out = self._library.project(self._instruction, rows, self._packed.num_outputs)
        out = out[:, : self.shape[0]]
        out = out.contiguous() if bias is None else out + bias
        return out.view(*rows.shape[:-1], self.shape[0])

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is functional.linear and not kwargs and isinstance(args[1], PackedMatrix):
            return args[1].linear(args[0], *args[2:])
        raise TypeError(f"a packed weight has no {getattr(func, '__name__', func)}")


class PackedMatrices:
    """Replaces weights `[num_matrices, out_features, in_features]` in a module.

    Transposed, they can be the second argument of `torch.bmm`, with separate rows for each matrix.
    Each matrix can be taken by its number, but not cast. Every other operation raises TypeError.
    """

    def __init__(self, library: NativeLibrary, weight: torch.Tensor) -> None:
        """Pack the weights; their unpacked values are not kept."""
        self._matrices = [PackedMatrix(library, matrix, can_be_cast=False) for matrix in weight]
        self._is_transposed = False

    @property
    def is_used(self) -> bool:
        """True if rows have been multiplied by every matrix."""
        return all(matrix.is_used for matrix in self._matrices)

    def __getitem__(self, number: int | torch.Tensor) -> PackedMatrix:
        if self._is_transposed:
            raise TypeError("transposed packed weights are not taken one by one")
        return self._matrices[int(number)]

    def transpose(self, one: int, other: int) -> "PackedMatrices":
        """Return the same weights with outputs and inputs exchanged."""
        if {one % 3, other % 3} != {1, 2}:
            raise TypeError("packed weights are transposed within each of them")
        found = copy.copy(self)
        found._is_transposed = not self._is_transposed
        return found

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        is_product = func is torch.bmm and not kwargs and isinstance(args[1], PackedMatrices)
        if not is_product or not args[1]._is_transposed:
            raise TypeError(f"packed weights have no {getattr(func, '__name__', func)}")
        rows, matrices = args
        pairs = zip(rows.contiguous(), matrices._matrices, strict=True)
        return torch.stack([matrix.linear(each) for each, matrix in pairs])

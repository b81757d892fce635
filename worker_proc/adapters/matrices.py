"""An adapter's matrices in memory, in the layout of the native kernel (low_rank.h)."""

import ctypes
import mmap
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from protocol.adapters import AdapterError
from worker_proc.adapters.sites import Sites
from worker_proc.native.kernels import NativeLibrary
from worker_proc.native.structures import LowRankArgs, StoredType

INNER_BLOCK = 4
"""Number of lines in a block of `down`, as in low_rank.h."""
_CHUNK = 32
"""Number of consecutive values of a line."""
_ITEM_BYTES = {StoredType.F32: 4, StoredType.F16: 2, StoredType.BF16: 2}


class Matrix(NamedTuple):
    """A matrix at an address, which must stay valid while it is packed."""

    name: str
    address: int
    type: StoredType
    num_rows: int
    num_columns: int
    stride: int
    """Number of values from row to row."""

    def rows(self, first: int, count: int) -> "Matrix":
        """Return `count` rows from `first` on."""
        offset = first * self.stride * _ITEM_BYTES[self.type]
        return self._replace(address=self.address + offset, num_rows=count)

    def columns(self, first: int, count: int) -> "Matrix":
        """Return `count` columns from `first` on."""
        offset = first * _ITEM_BYTES[self.type]
        return self._replace(address=self.address + offset, num_columns=count)


class Product(NamedTuple):
    """The product that is added to a linear layer: scale * up * (down * row)."""

    down: Matrix
    """`[rank, num_inputs]`."""
    up: Sequence[Matrix]
    """For each site of the layer, `[num_outputs, rank]`."""
    scale: float


class LoadedAdapter:
    """The products of an adapter, packed for all sites."""

    def __init__(
        self,
        library: NativeLibrary,
        dtype: torch.dtype,
        sites: Sites,
        products: Mapping[str, Product],
    ) -> None:
        """`products` are named by their linear layers; their shapes must fit the sites.

        Raises AdapterError if a value is not finite in `dtype`.
        """
        self._library = library
        sizes = [_aligned(size * dtype.itemsize) for size in _sizes(sites, products)]
        # The kernel zeroes pages when they are first written, in the copying thread.
        pages = mmap.mmap(-1, max(sum(sizes), 1))
        self._memory = torch.frombuffer(pages, dtype=torch.uint8)[: sum(sizes)]
        self._parts = iter(self._memory.split(sizes))
        self._dtype = dtype
        self._sites = sites
        self.max_rank = max((product.down.num_rows for product in products.values()), default=0)
        self._args = (LowRankArgs * len(sites))()
        for name, product in products.items():
            self._pack(sites.find(name), product)

    @property
    def address(self) -> int:
        """The address of the products of all sites."""
        return ctypes.addressof(self._args)

    @property
    def num_bytes(self) -> int:
        return self._memory.numel()

    def matrices(self, number: int) -> tuple[torch.Tensor, torch.Tensor, float] | None:
        """Return copies of `down` and `up` at a site, and the scale; None: it adds nothing.

        They are `[rank, num_inputs]` and `[rank, num_outputs]`.
        """
        args, site = self._args[number], self._sites.all[number]
        if args.rank == 0:
            return None
        rank = int(args.rank)
        down = self._lines_at(args.down, INNER_BLOCK, rank, site.num_inputs)
        return down, self._lines_at(args.up, rank, rank, site.num_outputs), float(args.scale)

    def _lines_at(
        self, address: int, block_lines: int, num_lines: int, num_values: int
    ) -> torch.Tensor:
        """Return lines that are stored in blocks, without their padding."""
        num_chunks, num_blocks = -(-num_values // _CHUNK), -(-num_lines // block_lines)
        count = num_blocks * num_chunks * block_lines * _CHUNK
        start = address - self._memory.data_ptr()
        part = self._memory[start : start + count * self._dtype.itemsize].view(self._dtype)
        blocks = part.view(num_blocks, num_chunks, block_lines, _CHUNK)
        lines = blocks.transpose(1, 2).reshape(-1, num_chunks * _CHUNK)
        return lines[:num_lines, :num_values]

    def _pack(self, numbers: list[int], product: Product) -> None:
        rank = product.down.num_rows
        down = self._copy(product.down, transposes=False)
        for number, matrix in zip(numbers, product.up, strict=True):
            up = self._copy(matrix, transposes=True)
            self._args[number] = LowRankArgs(down, up, rank, product.scale)

    def _copy(self, matrix: Matrix, *, transposes: bool) -> int:
        """Copy a matrix to the next part of the memory; return the address of its lines."""
        part: torch.Tensor = next(self._parts).view(self._dtype)
        shape = matrix.num_rows, matrix.num_columns
        if not self._library.copy_low_rank(
            matrix.address,
            matrix.type,
            shape,
            part,
            stride=matrix.stride,
            transposes=transposes,
        ):
            dtype = str(self._dtype).removeprefix("torch.")
            raise AdapterError(f"{matrix.name} has values that are not finite in {dtype}")
        return part.data_ptr()


def _sizes(sites: Sites, products: Mapping[str, Product]) -> list[int]:
    """Return the number of values in each matrix, in packing order."""
    sizes = []
    for name, product in products.items():
        rank, num_inputs = product.down.num_rows, product.down.num_columns
        sizes.append(_round_up(rank, INNER_BLOCK) * _round_up(num_inputs, _CHUNK))
        widths = (sites.all[number].num_outputs for number in sites.find(name))
        sizes += [rank * _round_up(width, _CHUNK) for width in widths]
    return sizes


def _round_up(size: int, part: int) -> int:
    return -(-size // part) * part


def _aligned(num_bytes: int) -> int:
    return _round_up(num_bytes, 64)


def matrix_of(tensor: torch.Tensor, name: str = "") -> Matrix:
    """Return the matrix in a contiguous float32 tensor."""
    assert tensor.dtype == torch.float32
    assert tensor.is_contiguous()
    rows, columns = tensor.shape
    return Matrix(name, tensor.data_ptr(), StoredType.F32, rows, columns, columns)

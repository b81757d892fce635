"""The data of GGUF files, mapped: a tensor is read when it is needed, and its pages released."""

import mmap
from collections.abc import Mapping
from math import prod
from pathlib import Path

import torch

from worker_proc.errors import CheckpointError
from worker_proc.gguf.blocks import read_blocks
from worker_proc.gguf.further_types import dequantize, further_block
from worker_proc.gguf.header import FileHeader, TensorEntry
from worker_proc.gguf.model_header import Header, read_header
from worker_proc.gguf.types import READ, TensorType, type_name
from worker_proc.quantization.weight import QuantizedWeight

PLAIN: Mapping[int, torch.dtype] = {
    TensorType.F32: torch.float32,
    TensorType.F16: torch.float16,
    TensorType.BF16: torch.bfloat16,
}
"""The types whose values are numbers, and not blocks of codes."""
_NO_RESERVE: int = getattr(mmap, "MAP_NORESERVE", 0x4000)
"""Linux's number: swap space need not be there for pages that are never written."""


class MappedFiles:
    """The files of a model, whose tensors are read by their names."""

    def __init__(self, *paths: Path) -> None:
        """Read the headers; raises CheckpointError."""
        self.header: Header = read_header(*paths)
        self._data = [_map(file) for file in self.header.files]

    def read_plain(self, name: str, matrix: int | None = None) -> torch.Tensor:
        """Return a copy of a tensor of numbers, or of one of its matrices."""
        entry = self._entry(name)
        if entry.type not in PLAIN:
            raise CheckpointError(
                f"{self._path(entry)}: {name} is stored as {type_name(entry.type)}, not plain"
            )
        dtype = PLAIN[entry.type]
        shape = entry.shape if matrix is None else entry.shape[1:]
        count = prod(shape)
        num_bytes = count * dtype.itemsize
        first = entry.offset + (matrix or 0) * num_bytes
        found = torch.frombuffer(self._data[entry.file], dtype=dtype, count=count, offset=first)
        copy = found.view(shape).clone()
        self._release(entry.file, first, num_bytes)
        return copy

    def read_codes(
        self, name: str, matrix: int = 0, order: torch.Tensor | None = None
    ) -> QuantizedWeight:
        """Return a matrix in codes, of those that the tensor has, with its rows in an order."""
        entry = self._entry(name)
        type = TensorType(entry.type)
        num_rows, num_inputs = entry.shape[-2:]
        num_blocks = num_inputs // type.block.num_values
        num_bytes = num_rows * num_blocks * type.block.num_bytes
        first = entry.offset + matrix * num_bytes
        stored = torch.frombuffer(
            self._data[entry.file], dtype=torch.uint8, count=num_bytes, offset=first
        )
        blocks = stored.view(num_rows, num_blocks, type.block.num_bytes)
        weight = read_blocks(type, blocks if order is None else blocks[order])
        self._release(entry.file, first, num_bytes)
        factors = (weight.scales, weight.minimums)
        if not all(part is None or bool(part.isfinite().all()) for part in factors):
            raise CheckpointError(f"{self._path(entry)}: {name} has scales that are not finite")
        return weight

    def dequantize(self, name: str, matrix: int = 0) -> torch.Tensor:
        """Return the values of a matrix of a type without kernels, in float32."""
        entry = self._entry(name)
        block = further_block(entry.type)
        num_rows, num_inputs = entry.shape[-2:]
        row_bytes = num_inputs // block.num_values * block.num_bytes
        num_bytes = num_rows * row_bytes
        first = entry.offset + matrix * num_bytes
        stored = torch.frombuffer(
            self._data[entry.file], dtype=torch.uint8, count=num_bytes, offset=first
        )
        values = torch.from_numpy(dequantize(stored.view(num_rows, row_bytes).numpy(), entry.type))
        self._release(entry.file, first, num_bytes)
        return values.view(num_rows, num_inputs)

    def read_values(self, name: str, matrix: int | None = None) -> torch.Tensor:
        """Return the values of a matrix of any type, or of one of a tensor's matrices."""
        type = self._entry(name).type
        if type in PLAIN:
            return self.read_plain(name, matrix)
        if type in READ:
            return self.read_codes(name, matrix or 0).dequantize(torch.float32)
        return self.dequantize(name, matrix or 0)

    def _entry(self, name: str) -> TensorEntry:
        entry = self.header.tensors.get(name)
        if entry is None:
            raise CheckpointError(f"{self.header.path} misses {name}")
        return entry

    def _path(self, entry: TensorEntry) -> Path:
        return self.header.files[entry.file].path

    def _release(self, file: int, first: int, num_bytes: int) -> None:
        """Give pages back; what is read again comes from the file."""
        start = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (first + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > start:
            self._data[file].madvise(mmap.MADV_DONTNEED, start, end - start)


def _map(file: FileHeader) -> mmap.mmap:
    try:
        with file.path.open("rb") as opened:
            # Torch requires writable memory. This is private, and is never written.
            return mmap.mmap(
                opened.fileno(),
                file.file_bytes,
                flags=mmap.MAP_PRIVATE | _NO_RESERVE,
                prot=mmap.PROT_READ | mmap.PROT_WRITE,
            )
    except (OSError, ValueError) as error:  # the latter of a file that has become shorter
        raise CheckpointError(f"{file.path} cannot be mapped: {error}") from error

"""Tensors of the paged KV cache, their memory, and the number of blocks that fit."""

import ctypes
import math
import mmap
import os
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from protocol.model_facts import UNLIMITED_BLOCKS
from worker_proc.errors import InsufficientMemory
from worker_proc.kv.kv_format import KVFormat
from worker_proc.kv.kv_groups import KVLayout, LayerSpec
from worker_proc.native.huge_pages import map_memory

Shapes = tuple[tuple[int, ...], tuple[int, ...] | None]
"""Shapes of keys and values; the first dimension is the number of blocks.

If values have no shape, they are the first part of the keys.
"""


class KVTensors(NamedTuple):
    """Keys and values of one layer of each group, in the backend's shapes.

    Block 0 is the null block: it takes writes that are never read.
    """

    keys: torch.Tensor
    values: torch.Tensor
    """The same tensor as `keys`, if values are their first part."""


class CacheSize(NamedTuple):
    """Size of the pool, and the longest sequence that fits in it."""

    num_blocks: int
    max_model_len: int
    num_state_blocks: int = 0
    num_draft_states: int = 0
    """Further state blocks, for the states before drafts."""
    num_draft_model_states: int = 0
    """State blocks of the draft model, including its own null block."""


MIN_BLOCKS = 2
"""The null block and one more, which even a model without attention has."""


_MAPPED = 2  # cudaHostRegisterMapped: kernels may access it, too
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux 5.14
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class HostMemory:
    """A zeroed tensor in host memory, whose pages are allocated when they are written.

    It is zeroed because masked values must be finite (0 · inf is NaN). `torch.zeros` would touch
    every page, which takes seconds for a few GiB.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, *, pinned: bool = False) -> None:
        """Map the memory; `pinned` allocates it now, so that a CUDA device can access it."""
        self._num_bytes = max(math.prod(shape) * dtype.itemsize, mmap.PAGESIZE)
        self._pages = map_memory(self._num_bytes)
        self.tensor = torch.frombuffer(self._pages, dtype=dtype, count=math.prod(shape)).view(shape)
        self._pinned = pinned
        self._unregister: weakref.finalize[..., Any] | None = None
        self.restore()

    def row(self, index: int) -> memoryview:
        """Return the bytes of a row."""
        num_bytes = self.tensor[0].nbytes
        return memoryview(self._pages)[index * num_bytes : (index + 1) * num_bytes]

    def allocate(self, first: int, end: int) -> None:
        """Allocate the pages of rows `first` to `end` now; raise OSError if the kernel cannot.

        Other threads can run meanwhile, which `mmap.madvise` prevents.
        """
        row_bytes = self.tensor[0].nbytes
        begin = first * row_bytes // mmap.PAGESIZE * mmap.PAGESIZE
        address = self.tensor.data_ptr() + begin
        if _libc.madvise(address, end * row_bytes - begin, _POPULATE_WRITE) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    def release(self) -> None:
        """Return the memory to the system; its content is lost."""
        if self._unregister is not None:
            self._unregister()
        self._pages.madvise(mmap.MADV_DONTNEED)

    def restore(self) -> None:
        """Make the tensor usable again, zeroed."""
        if self._pinned:
            address = self.tensor.data_ptr()
            runtime = torch.cuda.cudart()
            torch.cuda.check_error(runtime.cudaHostRegister(address, self._num_bytes, _MAPPED))
            # A later mapping may have this address, and could not be registered.
            self._unregister = weakref.finalize(self, _unregister, address)
            self._unregister.atexit = False


def _unregister(address: int) -> None:
    torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(address))


class DeviceMemory:
    """A zeroed tensor in the memory of a CUDA device."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.tensor = torch.zeros(shape, dtype=dtype, device=device)
        self._num_bytes = self.tensor.untyped_storage().nbytes()

    def release(self) -> None:
        self.tensor.untyped_storage().resize_(0)

    def restore(self) -> None:
        self.tensor.untyped_storage().resize_(self._num_bytes)
        self.tensor.zero_()


def bytes_per_block(
    specs: Sequence[LayerSpec],
    block_size: int,
    dtype: torch.dtype,
    format: KVFormat = KVFormat.PLAIN,
) -> int:
    """Return the bytes of one block in the tensors of `specs`, for a model of dtype `dtype`."""
    return sum(_layer_bytes(spec, block_size, dtype, format) for spec in specs)


def _layer_bytes(spec: LayerSpec, block_size: int, dtype: torch.dtype, format: KVFormat) -> int:
    """Return the bytes of one block of a layer."""
    row_bytes = sum(format.row_bytes(dim, dtype) for dim in spec.stored_dims)
    return block_size * spec.num_kv_heads * row_bytes


def block_bytes_of(specs: Sequence[LayerSpec], layout: KVLayout, dtype: torch.dtype) -> int:
    """Return the bytes of one block of a layout in all tensors; `specs` are those of all layers."""
    if layout.places:
        return layout.block_numbers * dtype.itemsize
    stored = [specs[index] for index in layout.tensor_layers]
    return bytes_per_block(stored, layout.block_size, dtype, layout.format)


def format_sizes(one: int, other: int) -> tuple[str, str]:
    """Format two numbers of bytes in the largest unit that shows their difference."""
    for unit, name in ((1024**3, "GiB"), (1024**2, "MiB"), (1024, "KiB")):
        texts = f"{one / unit:.2f} {name}", f"{other / unit:.2f} {name}"
        if max(one, other) >= unit and (texts[0] != texts[1] or one == other):
            return texts
    return f"{one} bytes", f"{other} bytes"


def size_cache(
    available_bytes: int,
    block_bytes: int,
    layout: KVLayout,
    *,
    model_len: int,
    max_model_len: int | None,
    num_blocks_override: int | None = None,
) -> CacheSize:
    """Choose the number of blocks and the served context length.

    Without `max_model_len`, the context is the longest that fits, up to the model's own.
    `num_blocks_override` is the exact number of blocks, including the null block. Blocks of a stage
    without attention take no bytes. Raises InsufficientMemory if the context does not fit.
    """
    wanted_len = max_model_len or model_len
    if not layout.groups:
        return CacheSize(MIN_BLOCKS, wanted_len)
    num_blocks = num_blocks_override or UNLIMITED_BLOCKS
    if block_bytes and not num_blocks_override:
        num_blocks = available_bytes // block_bytes
    # The last sampled token never needs a slot: n slots serve a context of n + 1 tokens.
    fitting_len = layout.num_tokens_in(max(num_blocks - 1, 0), wanted_len - 1) + 1
    if max_model_len is not None and fitting_len < max_model_len:
        needed_blocks = layout.num_blocks_for(max_model_len - 1) + 1
        needed, there = format_sizes(needed_blocks * block_bytes, num_blocks * block_bytes)
        raise InsufficientMemory(
            f"max_model_len {max_model_len} needs {needed} of KV cache, and {there} are available;"
            f" the greatest max_model_len that fits is {fitting_len}"
        )
    min_blocks = 1 + len(layout.groups)
    if num_blocks < min_blocks:
        needed, there = format_sizes(min_blocks * block_bytes, available_bytes)
        raise InsufficientMemory(
            f"the KV cache needs {needed} at least, and {there} are available; free memory, or"
            " raise kv_cache_memory_bytes"
        )
    return CacheSize(num_blocks, fitting_len)

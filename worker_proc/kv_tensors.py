"""The paged KV cache: its tensors and their memory, and how many blocks fit."""

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from worker_proc.attention.layer_spec import LayerSpec
from worker_proc.errors import InsufficientMemory
from worker_proc.kv_groups import KVLayout

GIB = 1024**3


@dataclass(frozen=True, slots=True)
class KVTensors:
    """Keys and values of one layer of each group, in the shapes that the backend asks for.

    Block 0 is the null block: writes that nobody may ever read go there.
    """

    keys: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, slots=True)
class CacheSize:
    """How large the pool is, and the longest sequence that it can serve."""

    num_blocks: int
    max_model_len: int


class HostMemory:
    """A zeroed tensor in host memory, which takes none until it is written.

    Zeroed, since garbage that is not finite would survive being masked (0 · inf).
    `torch.zeros` would touch every page of it: seconds for a few GiB.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, *, pinned: bool = False) -> None:
        """Map the memory; `pinned` takes it at once and lets CUDA copy without waiting."""
        self._num_bytes = max(math.prod(shape) * dtype.itemsize, mmap.PAGESIZE)
        self._pages = mmap.mmap(-1, self._num_bytes, flags=mmap.MAP_PRIVATE)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._pages.madvise(mmap.MADV_HUGEPAGE)
        flat = torch.frombuffer(self._pages, dtype=dtype, count=math.prod(shape))
        self.tensor = flat.view(shape)
        self._pinned = pinned
        self.restore()

    def release(self) -> None:
        """Give the memory back; what it held is lost."""
        if self._pinned:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(self.tensor.data_ptr()))
        self._pages.madvise(mmap.MADV_DONTNEED)

    def restore(self) -> None:
        """Make the tensor usable again, zeroed."""
        if self._pinned:
            torch.cuda.check_error(
                torch.cuda.cudart().cudaHostRegister(self.tensor.data_ptr(), self._num_bytes, 0)
            )


class DeviceMemory:
    """A zeroed tensor in the memory of a CUDA device."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.tensor = torch.zeros(shape, dtype=dtype, device=device)
        self._num_bytes = self.tensor.untyped_storage().nbytes()

    def release(self) -> None:
        """Give the memory back to torch; what it held is lost."""
        self.tensor.untyped_storage().resize_(0)

    def restore(self) -> None:
        """Make the tensor usable again, zeroed."""
        self.tensor.untyped_storage().resize_(self._num_bytes)
        self.tensor.zero_()


Memory = HostMemory | DeviceMemory


def bytes_per_block(specs: Sequence[LayerSpec], block_size: int, dtype: torch.dtype) -> int:
    """Return the bytes that one block takes in the tensors of some layers."""
    values_per_token = sum(s.num_kv_heads * (s.head_dim + s.value_head_dim) for s in specs)
    return values_per_token * block_size * dtype.itemsize


def size_cache(
    available_bytes: int,
    block_bytes: int,
    layout: KVLayout,
    *,
    model_len: int,
    max_model_len: int | None,
    num_blocks_override: int | None = None,
) -> CacheSize:
    """Decide the number of blocks and the served context length.

    Args:
        available_bytes: memory for the pool; ignored with an override.
        block_bytes: of one block over all tensors.
        layout: how one request fills blocks.
        model_len: the longest context the model itself allows.
        max_model_len: as asked for; None takes what fits.
        num_blocks_override: exact number of blocks, the null block included.

    Raises:
        InsufficientMemory: `max_model_len` does not fit; names what is needed, what there is, and
            the greatest length that fits.
    """
    num_blocks = num_blocks_override or available_bytes // block_bytes
    wanted_len = max_model_len or model_len
    # The last sampled token never needs a slot: n slots serve a context of n + 1 tokens.
    fitting_len = layout.num_tokens_in(max(num_blocks - 1, 0), wanted_len - 1) + 1
    if max_model_len is not None and fitting_len < max_model_len:
        needed_blocks = layout.num_blocks_for(max_model_len - 1) + 1
        raise InsufficientMemory(
            f"max_model_len {max_model_len} needs {needed_blocks * block_bytes / GIB:.2f} GiB of"
            f" KV cache, and {num_blocks * block_bytes / GIB:.2f} GiB are available; the greatest"
            f" max_model_len that fits is {fitting_len}"
        )
    least = 1 + len(layout.groups)
    if num_blocks < least:
        raise InsufficientMemory(
            f"the KV cache needs {least * block_bytes / GIB:.3f} GiB at least, and"
            f" {available_bytes / GIB:.3f} GiB are available"
        )
    return CacheSize(num_blocks, fitting_len)

"""The paged KV cache: one pair of tensors per layer, and how many blocks fit into memory."""

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from worker_proc.attention.layer_spec import LayerSpec
from worker_proc.errors import InsufficientMemory

GIB = 1024**3


@dataclass(frozen=True, slots=True)
class KVTensors:
    """Keys and values of one layer, in the shapes that the attention backend asks for.

    Block 0 is the null block: writes that nobody may ever read go there.
    """

    keys: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, slots=True)
class CacheSize:
    """How large the pool is, and the longest sequence that it can serve."""

    num_blocks: int
    max_model_len: int


def bytes_per_block(specs: Sequence[LayerSpec], block_size: int, dtype: torch.dtype) -> int:
    """Return the bytes that one block takes over all layers."""
    values_per_token = sum(s.num_kv_heads * (s.head_dim + s.value_head_dim) for s in specs)
    return values_per_token * block_size * dtype.itemsize


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a zeroed tensor; on the CPU it takes no memory until it is written.

    Zeroed, since garbage that is not finite would survive being masked (0 · inf).
    `torch.zeros` would touch every page of it: seconds for a few GiB.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


def size_cache(
    available_bytes: int,
    block_bytes: int,
    block_size: int,
    *,
    model_len: int,
    max_model_len: int | None,
    num_blocks_override: int | None = None,
) -> CacheSize:
    """Decide the number of blocks and the served context length.

    Args:
        available_bytes: memory for the pool; ignored with an override.
        block_bytes: of one block over all layers.
        block_size: tokens per block.
        model_len: the longest context the model itself allows.
        max_model_len: as asked for; None takes what fits.
        num_blocks_override: exact number of blocks, the null block included.

    Raises:
        InsufficientMemory: `max_model_len` does not fit; names what is needed, what there is, and
            the greatest length that fits.
    """
    num_blocks = num_blocks_override or available_bytes // block_bytes
    # The last sampled token never needs a slot: n slots serve a context of n + 1 tokens.
    fitting_len = max(num_blocks - 1, 0) * block_size + 1
    wanted_len = max_model_len or model_len
    if max_model_len is not None and fitting_len < max_model_len:
        needed_blocks = -(-(max_model_len - 1) // block_size) + 1
        raise InsufficientMemory(
            f"max_model_len {max_model_len} needs {needed_blocks * block_bytes / GIB:.2f} GiB of"
            f" KV cache, and {num_blocks * block_bytes / GIB:.2f} GiB are available; the greatest"
            f" max_model_len that fits is {fitting_len}"
        )
    if num_blocks < 2:
        raise InsufficientMemory(
            f"the KV cache needs {2 * block_bytes / GIB:.3f} GiB at least, and"
            f" {available_bytes / GIB:.3f} GiB are available"
        )
    return CacheSize(num_blocks, min(wanted_len, fitting_len))

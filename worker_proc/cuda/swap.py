"""Copies blocks between the device and the host in one launch, whatever their number.

The kernel reads and writes the host's memory directly; it is pinned and mapped, and so has the same
address for both.
"""

from collections.abc import Sequence

import torch
import triton.language as tl

from worker_proc.cuda.swap_kernels import copy_blocks_kernel
from worker_proc.inputs import to_device
from worker_proc.kv.kv_pool import Pairs

_CPU = torch.device("cpu")
"""The device on which the kernel is interpreted."""
WORD_BYTES = 8
TILE_WORDS = 1024


def copy_blocks(pairs: Pairs, source_ids: Sequence[int], target_ids: Sequence[int]) -> None:
    """Copy blocks of contiguous tensors, without waiting for the copy."""
    device = next((tensor.device for tensor in pairs[0] if tensor.is_cuda), _CPU)
    sizes = [source[0].numel() * source.element_size() for source, _ in pairs]
    is_whole = all(size % WORD_BYTES == 0 for size in sizes)
    word_bytes, word = (WORD_BYTES, tl.int64) if is_whole else (1, tl.int8)
    entries: list[int] = []
    for (source, target), size in zip(pairs, sizes, strict=True):
        entries += (source.data_ptr(), target.data_ptr(), size // word_bytes)
    packed = to_device([*entries, *source_ids, *target_ids], device)
    tensors, block_ids = packed.split([len(entries), 2 * len(source_ids)])
    copy_blocks_kernel[(len(source_ids), len(pairs))](
        tensors, block_ids, len(source_ids), WORD=word, TILE=TILE_WORDS
    )

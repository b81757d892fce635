"""Blocks in transit between the pool and a store: rows in host memory with the same parts.

The pool's tensors each have a row for every block, and staging has some rows for each tensor. A
block to be stored is copied out between two steps, and written from there while the next steps may
overwrite it. A block that is read is checked before it is copied to the pool.
"""

import ctypes
from collections.abc import Sequence

import torch

from worker_proc.kv.kv_pool import KVPool
from worker_proc.kv.kv_tensors import HostMemory
from worker_proc.offload.memory import Parts, Wait, no_wait


class PoolMemory:
    """The blocks of a pool, or of tensors that sleep together with it."""

    def __init__(
        self, pool: KVPool, num_slots: int, tensors: Sequence[torch.Tensor] | None = None
    ) -> None:
        self.num_slots = num_slots
        self._pool = pool
        tensors = self._tensors = pool.all_tensors if tensors is None else tensors
        self._device = tensors[0].device
        on_cpu = self._device.type == "cpu"
        # Not released while the pool sleeps, since a block may be in transit to a store.
        self._memory = [
            HostMemory((num_slots, *tensor.shape[1:]), tensor.dtype, pinned=not on_cpu)
            for tensor in tensors
        ]
        self.block_bytes = sum(tensor[0].nbytes for tensor in tensors)
        self._copy_blocks = copy_by_address if on_cpu else pool.copy_blocks
        self._stream = None if on_cpu else torch.cuda.Stream(self._device)

    def parts(self, slot: int) -> Parts:
        return [memory.row(slot) for memory in self._memory]

    @property
    def is_asleep(self) -> bool:
        return self._pool.is_asleep

    def wake(self) -> None:
        self._pool.wake()

    def copy_out(self, block_ids: Sequence[int], slots: Sequence[int]) -> Wait:
        pairs = [(t, m.tensor) for t, m in zip(self._tensors, self._memory, strict=True)]
        self._copy_blocks(pairs, block_ids, slots)
        if self._stream is None:
            return no_wait
        copied = torch.cuda.Event()
        copied.record(torch.cuda.current_stream(self._device))
        return copied.synchronize

    def copy_in(self, slot: int, block_id: int) -> None:
        pairs = [(m.tensor, t) for t, m in zip(self._tensors, self._memory, strict=True)]
        if self._stream is None:
            self._copy_blocks(pairs, [slot], [block_id])
            return
        # A step that was launched before the block was reassigned may still write to it.
        self._stream.wait_stream(torch.cuda.default_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._copy_blocks(pairs, [slot], [block_id])
        self._stream.synchronize()


def copy_by_address(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
    source_ids: Sequence[int],
    target_ids: Sequence[int],
) -> None:
    """Copy blocks between contiguous tensors on the CPU, without the interpreter's lock."""
    for source, target in pairs:
        num_bytes = source[0].nbytes
        begin, end = source.data_ptr(), target.data_ptr()
        for source_id, target_id in zip(source_ids, target_ids, strict=True):
            ctypes.memmove(end + target_id * num_bytes, begin + source_id * num_bytes, num_bytes)

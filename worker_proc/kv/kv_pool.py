"""The pool of KV blocks on the device, and the host's pool for swapped blocks."""

from collections.abc import Callable, Sequence

import torch

from protocol.core_worker import BlockCopies
from worker_proc.kv.kv_tensors import DeviceMemory, HostMemory, KVTensors, Shapes
from worker_proc.kv.pages_ahead import PagesAhead

Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Pairs of a source and a target tensor, whose rows are blocks."""
CopyBlocks = Callable[[Pairs, Sequence[int], Sequence[int]], None]
"""Copies the rows with the given source indices to the given target indices, in all pairs."""


def copy_by_index(pairs: Pairs, source_ids: Sequence[int], target_ids: Sequence[int]) -> None:
    """Copy blocks between tensors on the same device."""
    for source, target in pairs:
        rows = source.index_select(0, torch.tensor(source_ids, device=source.device))
        target.index_copy_(0, torch.tensor(target_ids, device=target.device), rows)


def _distinct(pair: KVTensors) -> Sequence[torch.Tensor]:
    return pair[:1] if pair.values is pair.keys else pair


class KVPool:
    """All KV tensors of a worker; copies and the forward of a step must use one stream."""

    def __init__(
        self,
        shapes: Sequence[Shapes],
        num_host_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
        copy_blocks: CopyBlocks = copy_by_index,
    ) -> None:
        """Allocate tensors for each of `shapes`, on the device and on the host.

        `copy_blocks` copies blocks between the two.
        """
        self.copy_blocks = copy_blocks
        self._device = device
        self._memory: list[HostMemory | DeviceMemory] = []
        self.is_asleep = False
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []  # on the device and on the host
        self.tensors: list[KVTensors] = []
        on_host: list[HostMemory] = []
        for pair in shapes:
            made = [self._allocate(shape, num_host_blocks, dtype) for shape in pair if shape]
            self.tensors.append(KVTensors(made[0].tensor, made[-1].tensor))
            on_host += (memory for memory in made if isinstance(memory, HostMemory))
        self._pages_ahead = PagesAhead(on_host, torch.get_num_threads())

    @property
    def all_tensors(self) -> list[torch.Tensor]:
        """All tensors; each has a row for every block."""
        return [tensor for pair in self.tensors for tensor in _distinct(pair)]

    def add(self, memory: Sequence[HostMemory]) -> None:
        """Release and restore further memory together with the tensors."""
        self._memory += memory

    def _allocate(
        self, shape: tuple[int, ...], num_host_blocks: int, dtype: torch.dtype
    ) -> HostMemory | DeviceMemory:
        on_cpu = self._device.type == "cpu"
        memory = HostMemory(shape, dtype) if on_cpu else DeviceMemory(shape, dtype, self._device)
        self._memory.append(memory)
        if num_host_blocks:
            host = HostMemory((num_host_blocks, *shape[1:]), dtype, pinned=not on_cpu)
            self._memory.append(host)
            self._pairs.append((memory.tensor, host.tensor))
        return memory

    def swap(self, out: BlockCopies, into: BlockCopies) -> None:
        """Copy blocks to the host, then others from it, on the current stream."""
        if not out.host_block_ids and not into.host_block_ids:
            return
        self.wake()
        if out.host_block_ids:
            self.copy_blocks(self._pairs, out.device_block_ids, out.host_block_ids)
        if into.host_block_ids:
            pairs = [(host, device) for device, host in self._pairs]
            self.copy_blocks(pairs, into.host_block_ids, into.device_block_ids)

    def sleep(self) -> None:
        """Release all memory until `wake`; its content is lost."""
        if self.is_asleep:
            return
        if self._device.type != "cpu":
            torch.cuda.synchronize(self._device)
        for memory in self._memory:
            memory.release()
        self._pages_ahead.forget()
        if self._device.type != "cpu":
            torch.cuda.empty_cache()
        self.is_asleep = True

    def allocate_ahead(self, highest_block: int, *, is_idle: bool = True) -> bool:
        """Allocate pages of the next unused blocks; return whether more are missing.

        Unless the worker is idle, these are about as many as the last steps have used.
        """
        if self.is_asleep:
            return False
        if is_idle:
            return self._pages_ahead.allocate(highest_block)
        return self._pages_ahead.keep_up(highest_block)

    def wake(self) -> None:
        """Make the tensors usable again; they are zero after a sleep."""
        if self.is_asleep:
            for memory in self._memory:
                memory.restore()
        self.is_asleep = False

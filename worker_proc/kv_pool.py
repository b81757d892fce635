"""The pool of KV blocks on the device, and the one on the host that it is swapped to."""

from collections.abc import Sequence

import torch

from protocol.core_worker import BlockCopies
from worker_proc.kv_tensors import DeviceMemory, HostMemory, KVTensors, Memory

Shapes = tuple[tuple[int, ...], tuple[int, ...]]
"""Of keys and of values; the first dimension counts blocks."""


class KVPool:
    """All KV tensors of a worker. A step's copies and its computing must use one stream."""

    def __init__(
        self,
        shapes: Sequence[Shapes],
        num_host_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocate one pair of tensors for each of `shapes`, and their like for the host."""
        self._device = device
        self._memory: list[Memory] = []
        self._is_asleep = False
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        """On the device and on the host."""
        self.tensors: list[KVTensors] = []
        for pair in shapes:
            keys, values = (self._allocate(shape, num_host_blocks, dtype) for shape in pair)
            self.tensors.append(KVTensors(keys, values))

    def _allocate(
        self, shape: tuple[int, ...], num_host_blocks: int, dtype: torch.dtype
    ) -> torch.Tensor:
        on_cpu = self._device.type == "cpu"
        memory = HostMemory(shape, dtype) if on_cpu else DeviceMemory(shape, dtype, self._device)
        self._memory.append(memory)
        if num_host_blocks:
            host = HostMemory((num_host_blocks, *shape[1:]), dtype, pinned=not on_cpu)
            self._memory.append(host)
            self._pairs.append((memory.tensor, host.tensor))
        return memory.tensor

    def swap(self, out: BlockCopies, into: BlockCopies) -> None:
        """Copy blocks to the host, then others from it, in the order of the current stream."""
        if out.host_block_ids:
            self.wake()
            pairs = [(device, host) for device, host in self._pairs]
            self._copy(pairs, out.device_block_ids, out.host_block_ids)
        if into.host_block_ids:
            self.wake()
            pairs = [(host, device) for device, host in self._pairs]
            self._copy(pairs, into.host_block_ids, into.device_block_ids)

    def _copy(
        self,
        pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
        source_ids: list[int],
        target_ids: list[int],
    ) -> None:
        if self._device.type == "cpu":
            sources, targets = torch.tensor(source_ids), torch.tensor(target_ids)
            for source, target in pairs:
                target.index_copy_(0, targets, source.index_select(0, sources))
            return
        # Host memory has no part in kernels: each block is a copy of its own, and nobody waits.
        for source, target in pairs:
            for source_id, target_id in zip(source_ids, target_ids, strict=True):
                target[target_id].copy_(source[source_id], non_blocking=True)

    def sleep(self) -> None:
        """Give all memory back until `wake`; what it held is lost."""
        if self._is_asleep:
            return
        if self._device.type != "cpu":
            torch.cuda.synchronize(self._device)
        for memory in self._memory:
            memory.release()
        if self._device.type != "cpu":
            torch.cuda.empty_cache()
        self._is_asleep = True

    def wake(self) -> None:
        """Make the tensors usable again; they hold zeros if there was a sleep."""
        if not self._is_asleep:
            return
        for memory in self._memory:
            memory.restore()
        self._is_asleep = False

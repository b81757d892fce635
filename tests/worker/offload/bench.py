"""A pool of blocks, and a service that keeps them in stores."""

import hashlib
import select
import time
from pathlib import Path

import torch

from protocol.core_worker import BlocksLoaded, LoadBlocks, StoreBlocks
from scripts.testing import eventually
from worker_proc.offload.block_store import BlockStore
from worker_proc.offload.drafts import DraftBlocks
from worker_proc.offload.service import MAX_READERS, OffloadService
from worker_proc.offload.staging import PoolMemory

NUM_BLOCKS = 12
SHAPES = ((2, 3, 5), (7,))


def key(number: int) -> bytes:
    return hashlib.sha256(bytes([number])).digest()


def state_key(number: int) -> bytes:
    return key(number) + b"\x01"


class FakePool:
    """Tensors whose rows are blocks."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.all_tensors = tensors
        self.is_asleep = False

    def copy_blocks(self, *_: object) -> None:
        raise AssertionError("there is no device")

    def wake(self) -> None:
        if self.is_asleep:
            for tensor in self.all_tensors:
                tensor.zero_()
        self.is_asleep = False


class FakeDraftKV:
    """The blocks that a draft model has computed."""

    def __init__(self) -> None:
        self.filled: set[int] = set()

    def holds(self, block_id: int) -> bool:
        return block_id in self.filled

    def note(self, block_id: int, *, is_filled: bool) -> None:
        (self.filled.add if is_filled else self.filled.discard)(block_id)


class Bench:
    """A pool, and a service with some stores."""

    def __init__(self, paths: list[Path], num_writer_slots: int = 8) -> None:
        self.tensors = [torch.randn(NUM_BLOCKS, *shape) for shape in SHAPES]
        self.tensors[1] = self.tensors[1].to(torch.bfloat16)
        self.pool = FakePool(self.tensors)
        self.memory = PoolMemory(self.pool, MAX_READERS + num_writer_slots)  # type: ignore[arg-type]
        self.stores = [BlockStore(path, 2**20, self.memory.block_bytes) for path in paths]
        self.states = [torch.randn(NUM_BLOCKS, 4)]
        self.state_memory = PoolMemory(self.pool, MAX_READERS + 2, self.states)  # type: ignore[arg-type]
        self.draft_tensors = [torch.randn(NUM_BLOCKS, 3)]
        drafts = PoolMemory(self.pool, MAX_READERS + 2, self.draft_tensors)  # type: ignore[arg-type]
        self.draft_kv = FakeDraftKV()
        self.drafts = DraftBlocks(drafts, self.draft_kv, 0, "one draft model")
        self.service = OffloadService(self.memory, self.stores, self.state_memory, self.drafts)

    def content(self, block_id: int) -> bytes:
        rows = [tensor[block_id].contiguous().view(torch.uint8) for tensor in self.tensors]
        return b"".join(row.numpy().tobytes() for row in rows)

    def load_state(self, number: int, block_id: int, kv_numbers: list[int]) -> BlocksLoaded:
        """Load a state to a block, and KV blocks to those from 6 on."""
        block_ids = list(range(6, 6 + len(kv_numbers)))
        keys = [key(n) for n in kv_numbers]
        message = LoadBlocks(5, block_ids, keys, block_id, state_key(number))
        return self.service.load(message) or self.answer()

    def store(self, *block_ids: int) -> None:
        """Store blocks, each under the key of its number."""
        self.service.store(StoreBlocks(list(block_ids), [key(i) for i in block_ids]))

    def wait_for(self, *numbers: int) -> None:
        for store in self.stores:
            eventually(lambda s=store: all(key(n) in s.index for n in numbers), "written")

    def load(self, numbers: list[int], block_ids: list[int]) -> BlocksLoaded:
        answer = self.service.load(LoadBlocks(5, block_ids, [key(n) for n in numbers]))
        return answer or self.answer()

    def answer(self) -> BlocksLoaded:
        """Wait as the worker's loop does."""
        poller = select.poll()
        poller.register(self.service.wake_fd, select.POLLIN)
        for _ in range(100):
            deadline = self.service.deadline
            assert deadline is not None
            poller.poll(max(0.0, deadline - time.monotonic()) * 1000 + 1)
            if answers := self.service.take_results():
                (answer,) = answers
                return answer
        raise AssertionError("no answer")

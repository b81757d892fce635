"""Handles the core's messages about blocks outside the pool: write, load and find them.

The work is done alongside the steps, in threads of low priority.
"""

import contextlib
import os
import time
from collections import deque
from collections.abc import Sequence

from protocol.core_worker import BlocksFound, BlocksLoaded, FindBlocks, LoadBlocks, StoreBlocks
from worker_proc.offload.block_store import BlockStore
from worker_proc.offload.drafts import DraftBlocks
from worker_proc.offload.finder import Finder
from worker_proc.offload.load import BlockLoad
from worker_proc.offload.memory import BlockMemory
from worker_proc.offload.peers import Peers
from worker_proc.offload.writers import BlockWriters

MAX_READERS = 8
"""Maximum number of concurrent loads. Each uses one slot of every memory, with a number below this
one."""


class OffloadService:
    """Takes messages about blocks; `wake_fd` is readable while there are answers."""

    def __init__(
        self,
        memory: BlockMemory,
        stores: Sequence[BlockStore],
        states: BlockMemory | None = None,
        drafts: DraftBlocks | None = None,
        peers: Peers | None = None,
    ) -> None:
        """Write to all stores, and read from the first one that has a block, or from `peers`.

        `states` are state blocks, with as many slots for readers; `drafts` are a draft model's
        blocks.
        """
        self._memory = memory
        self._stores = stores
        self._states = states
        self._drafts = drafts
        self._writers = _writers(memory, stores)
        self._state_writers = None if states is None else _writers(states, stores)
        self._draft_writers = None if drafts is None else _writers(drafts.memory, stores)
        self._reader_slots = deque(range(MAX_READERS))
        self._loads: list[BlockLoad] = []
        self.wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._peers = peers
        self._finder = None if peers is None else Finder(peers, self._wake)

    def begin_adoption(self) -> None:
        """End the loads of another core: they write to no block any more."""
        if self._finder is not None:
            self._finder.forget()
        for load in self._loads:
            load.end()
        self._loads.clear()

    def store(self, message: StoreBlocks) -> None:
        """Copy blocks out and have them written, as far as the stores keep up."""
        if self._state_writers is not None:
            self._state_writers.store(message.state_block_ids, message.state_keys)
        if self._drafts is not None and self._draft_writers is not None:
            beside = self._drafts.beside(message)
            self._draft_writers.store(beside.block_ids, beside.keys)
        self._writers.store(message.block_ids, message.keys)

    def load(self, message: LoadBlocks) -> BlocksLoaded | None:
        """Begin to read blocks; return the answer if that is not possible."""
        if not self._reader_slots:
            return BlocksLoaded(message.req_id, 0)
        self._memory.wake()
        if self._drafts is not None:
            self._drafts.memory.wake()
        slot = self._reader_slots.popleft()
        load = BlockLoad(
            message,
            self._memory,
            self._states,
            self._stores,
            drafts=self._drafts,
            peers=self._peers,
            slot=slot,
            on_end=self._end_reader,
        )
        self._loads.append(load)
        load.start()
        return None

    def find(self, message: FindBlocks) -> BlocksFound | None:
        """Ask another machine for blocks; return the answer if that is not possible."""
        if self._finder is None:
            return BlocksFound(message.req_id, b"")
        self._finder.find(message)
        return None

    def _end_reader(self, slot: int) -> None:
        """Free the slot of a load whose thread ends; called by that thread."""
        self._reader_slots.appendleft(slot)  # its memory is allocated already
        self._wake()

    def _wake(self) -> None:
        os.eventfd_write(self.wake_fd, 1)

    @property
    def deadline(self) -> float | None:
        """The latest time to call `take_results`, in seconds of `time.monotonic`."""
        deadlines = [load.deadline for load in self._loads]
        if self._finder is not None and (asked := self._finder.deadline) is not None:
            deadlines.append(asked)
        return min(deadlines, default=None)

    def take_results(self) -> list[BlocksLoaded | BlocksFound]:
        """Return other machines' answers, and those to loads that are done or overdue."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.wake_fd)
        now = time.monotonic()
        over = [load for load in self._loads if load.is_done or now >= load.deadline]
        self._loads = [load for load in self._loads if load not in over]
        found = [] if self._finder is None else self._finder.take_results()
        return [*found, *(load.end() for load in over)]


def _writers(memory: BlockMemory, stores: Sequence[BlockStore]) -> BlockWriters:
    return BlockWriters(memory, stores, range(MAX_READERS, memory.num_slots))

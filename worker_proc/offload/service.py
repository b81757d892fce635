"""Writes blocks to the stores and reads them beside the steps, in threads of low priority.

A block that is to be written is copied out between two steps, and a thread for each store writes
it from there. If a store cannot keep up, blocks are left out. A load has a thread of its own, which
copies each block to the pool once it has been read and checked. If a file system does not answer,
the load ends after some seconds with what it has: its thread is left behind, and copies nothing any
more. Blocks that no store has may come from another machine (`remote.py`).
"""

import contextlib
import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass

from protocol.core_worker import BlocksFound, BlocksLoaded, FindBlocks, LoadBlocks, StoreBlocks
from worker_proc.offload.block_store import BlockStore, unpack
from worker_proc.offload.drafts import DraftBlocks
from worker_proc.offload.finder import Finder
from worker_proc.offload.memory import BlockMemory, Wait
from worker_proc.offload.priority import lower_priority
from worker_proc.offload.remote import PeerPaused, Peers

MAX_READERS = 8
"""Loads at a time; each has a slot of the block memory."""
LOAD_TIMEOUT_S = 10.0
_PAUSE_S = 5.0
"""For which a store that has failed is not written to."""
_QUIET_S = 60.0
"""Between two lines about a store that fails."""

log = logging.getLogger("troika.worker")


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

        `states`: state blocks, with as many slots for readers. `drafts`: those of a draft model.
        """
        self._drafts = drafts
        self._draft_writers = None if drafts is None else OffloadService(drafts.memory, stores)
        self._states = states
        self._state_writers = None if states is None else OffloadService(states, stores)
        self._memory = memory
        self._stores = stores
        self._reader_slots = deque(range(MAX_READERS))
        self._writer_slots = deque(range(MAX_READERS, memory.num_slots))
        # A store that hangs keeps its blocks: it must leave slots for the others.
        most = max(1, len(self._writer_slots) // len(stores)) if stores else 0
        self._writers = [_Writer(store, memory, most) for store in stores]
        self._loads: list[_Load] = []
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
        """Copy blocks out and let them be written; those without a free slot are left out."""
        if message.state_keys and self._state_writers is not None:
            only = StoreBlocks(message.state_block_ids, message.state_keys)
            self._state_writers.store(only)
        if self._drafts is not None and self._draft_writers is not None:
            self._draft_writers.store(self._drafts.beside(message))
        if self._memory.is_asleep:  # they have no content
            return
        blocks = [
            (block_id, key)
            for block_id, key in zip(message.block_ids, message.keys, strict=True)
            if any(key not in store.index for store in self._stores)
        ][: len(self._writer_slots)]
        if not blocks:
            return
        slots = [self._writer_slots.popleft() for _ in blocks]
        wait = self._memory.copy_out([block_id for block_id, _ in blocks], slots)
        for slot, (_, key) in zip(slots, blocks, strict=True):
            staged = _Staged(slot, key, wait, self._writer_slots, len(self._writers))
            for writer in self._writers:
                writer.put(staged)

    def load(self, message: LoadBlocks) -> BlocksLoaded | None:
        """Begin to read blocks; returns the answer if it cannot be begun."""
        if not self._reader_slots:
            return BlocksLoaded(message.req_id, 0)
        self._memory.wake()
        if self._drafts is not None:
            self._drafts.memory.wake()
        slot = self._reader_slots.popleft()
        load = _Load(
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
        """Ask another machine for blocks; returns the answer if it cannot be asked."""
        if self._finder is None:
            return BlocksFound(message.req_id, b"")
        self._finder.find(message)
        return None

    def _end_reader(self, slot: int) -> None:
        """A load's thread ends; called by it."""
        self._reader_slots.appendleft(slot)  # its memory is there already
        self._wake()

    def _wake(self) -> None:
        os.eventfd_write(self.wake_fd, 1)

    @property
    def deadline(self) -> float | None:
        """When to call `take_results` at the latest, in seconds of `time.monotonic`."""
        deadlines = [load.deadline for load in self._loads]
        if self._finder is not None and (asked := self._finder.deadline) is not None:
            deadlines.append(asked)
        return min(deadlines, default=None)

    def take_results(self) -> list[BlocksLoaded | BlocksFound]:
        """Return other machines' answers, and those to loads that are done or over their time."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.wake_fd)
        now = time.monotonic()
        over = [load for load in self._loads if load.is_done or now >= load.deadline]
        self._loads = [load for load in self._loads if load not in over]
        found = [] if self._finder is None else self._finder.take_results()
        return [*found, *(load.end() for load in over)]


@dataclass
class _Staged:
    """A block that was copied out, for all writers."""

    slot: int
    key: bytes
    wait: Wait
    free_slots: "deque[int]"
    num_left: int
    """Writers that have not written or dropped it."""

    def leave(self) -> None:
        """A writer needs it no more; the last one frees the slot."""
        with _leaving:
            self.num_left -= 1
            if self.num_left == 0:
                self.free_slots.append(self.slot)


_leaving = threading.Lock()


class _Writer:
    """Writes blocks to one store, in a thread that starts with the first of them."""

    def __init__(self, store: BlockStore, memory: BlockMemory, most: int) -> None:
        """Keep at most `most` blocks waiting."""
        self._store = store
        self._memory = memory
        self._most = most
        self._waiting: queue.SimpleQueue[_Staged] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._silent_until = self._paused_until = 0.0

    def put(self, block: _Staged) -> None:
        """Let a block be written, or drop it if too many wait, or the store has failed."""
        is_full = self._waiting.qsize() >= self._most
        if is_full or time.monotonic() < self._paused_until:
            block.leave()
            return
        self._waiting.put(block)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="troika-store", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        lower_priority()
        while True:
            block = self._waiting.get()
            try:
                block.wait()
                self._store.write(block.key, self._memory.parts(block.slot))
            except Exception as error:
                now = time.monotonic()
                self._paused_until = now + _PAUSE_S
                if now >= self._silent_until:
                    self._silent_until = now + _QUIET_S
                    log.warning("KV blocks cannot be written: %s", error)
            finally:
                block.leave()


class _Load(threading.Thread):
    """Reads the blocks of one request, in order, until one is missing."""

    def __init__(
        self,
        message: LoadBlocks,
        memory: BlockMemory,
        states: BlockMemory | None,
        stores: Sequence[BlockStore],
        *,
        drafts: DraftBlocks | None,
        peers: Peers | None,
        slot: int,
        on_end: Callable[[int], None],
    ) -> None:
        """Read to a slot, which is free again with the call of `on_end`."""
        super().__init__(name="troika-load", daemon=True)
        self._message = message
        self._memory = memory
        self._states = states
        self._drafts = drafts
        self._stores = stores
        self._peers = peers
        self._slot = slot
        self._on_end = on_end
        self._began_ns = time.monotonic_ns()
        self.deadline = time.monotonic() + LOAD_TIMEOUT_S
        self._copying = threading.Lock()
        self._is_ended = False
        self._num_blocks = 0
        self._has_state = False
        self._num_remote_blocks = self._remote_ns = 0
        self.is_done = False

    def run(self) -> None:
        try:
            lower_priority()
            self._read_all()
        except PeerPaused:  # its silence was reported
            pass
        except Exception as error:
            log.warning("KV blocks cannot be read: %s", error)
        self.is_done = True
        self._on_end(self._slot)

    def _read_all(self) -> None:
        keys = self._message.keys
        is_here = [any(key in store.index for store in self._stores) for key in keys]
        missing = [key for key, here in zip(keys, is_here, strict=True) if not here]
        with contextlib.closing(self._contents(missing)) as contents:
            self._read_each(is_here, contents)

    def _contents(self, keys: Sequence[bytes]) -> Generator[memoryview]:
        """Yield blocks of the other machine; the first `next` connects. An OSError: it is gone."""
        source, peers = self._message.source, self._peers
        if not source or peers is None:
            return
        with peers.reader(source) as reader:
            yield from reader.contents(keys, self._memory.block_bytes, self._limit())

    def _limit(self) -> float:
        limit_ms = self._message.limit_ms
        if not limit_ms:
            return self.deadline
        return min(self.deadline, self._began_ns / 1e9 + limit_ms / 1000)

    def _read_each(self, is_here: Sequence[bool], contents: Iterator[memoryview]) -> None:
        """Fill the blocks, in order; `contents` are those that are not here."""
        message = self._message
        if message.state_key and not self._read_state():
            return
        for block_id, key, here in zip(message.block_ids, message.keys, is_here, strict=True):
            began_ns = time.monotonic_ns()
            if not (self._read(key, self._memory) if here else self._take(key, contents)):
                return
            with self._copying:
                if self._is_ended:
                    return
                self._memory.copy_in(self._slot, block_id)
                self._num_blocks += 1
                if self._drafts is not None:
                    self._drafts.note(block_id, is_filled=False)
                if not here:
                    self._num_remote_blocks += 1
                    self._remote_ns += time.monotonic_ns() - began_ns
            self._read_draft(block_id, key)

    def _take(self, key: bytes, contents: Iterator[memoryview]) -> bool:
        """Receive a block in the slot; False: the other machine does not have it, or not intact."""
        content = next(contents, None)
        if not content:
            return False
        if unpack(key, content, self._memory.parts(self._slot)):
            return True
        log.warning("a KV block of %s is damaged; it is computed", self._message.source)
        return False

    def _read_state(self) -> bool:
        """Fill the state block; returns whether its state was there."""
        states, message = self._states, self._message
        if states is None or not self._read(message.state_key, states):
            return False
        with self._copying:
            if not self._is_ended:
                states.copy_in(self._slot, message.state_block_id)
                self._has_state = True
        return self._has_state

    def _read_draft(self, block_id: int, key: bytes) -> None:
        """Fill the draft model's block beside one of the model, if it is there."""
        drafts = self._drafts
        name = None if drafts is None else drafts.name(key)
        if drafts is None or name is None or not self._read(name, drafts.memory):
            return
        with self._copying:
            if not self._is_ended:
                drafts.memory.copy_in(self._slot, block_id)
                drafts.note(block_id, is_filled=True)

    def _read(self, key: bytes, memory: BlockMemory) -> bool:
        """Read a block to the slot, from the first store that has it; faster ones get it, too."""
        block = memory.parts(self._slot)
        for number, store in enumerate(self._stores):
            if key in store.index and store.read(key, block):
                for faster in self._stores[:number]:
                    with contextlib.suppress(OSError):
                        faster.write(key, block, waits=False)
                return True
        return False

    def end(self) -> BlocksLoaded:
        """Return the answer; no block is written to after this."""
        with self._copying:
            self._is_ended = True
        if not self.is_done and time.monotonic() >= self.deadline:
            log.warning("KV blocks could not be read within %g s", LOAD_TIMEOUT_S)
        load_ns = time.monotonic_ns() - self._began_ns
        num_remote, remote_ns = self._num_remote_blocks, self._remote_ns
        return BlocksLoaded(
            self._message.req_id,
            self._num_blocks,
            load_ns,
            self._has_state,
            num_remote,
            remote_ns,
        )

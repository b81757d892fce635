"""Reads the blocks of a request from the stores, and from another machine what no store has.

Each load has a thread, which copies each block to the pool once it has been read and checked. If a
file system does not answer, the load ends after some seconds with what it has: its thread is left
behind, and copies nothing any more.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence

from protocol.core_worker import BlocksLoaded, LoadBlocks
from worker_proc.offload.block_store import BlockStore, unpack
from worker_proc.offload.drafts import DraftBlocks
from worker_proc.offload.memory import BlockMemory
from worker_proc.offload.priority import lower_priority
from worker_proc.offload.remote import Peers

LOAD_TIMEOUT_S = 10.0

log = logging.getLogger("troika.worker")


class BlockLoad(threading.Thread):
    """The load of one request: it reads blocks in order, until one is missing."""

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
        """Yield blocks of the other machine, as far as it answers; the first `next` connects."""
        source, peers = self._message.source, self._peers
        if not source or peers is None:
            return
        with (
            contextlib.suppress(OSError),
            peers.reader(source) as reader,
        ):  # errors are logged there
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

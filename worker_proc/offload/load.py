"""Reads a request's blocks from the stores, or from another machine if no store has them.

Each load has a thread, which copies each block to the pool once it has been read and checked. Until
then the parts of a block that have arrived are in a slot of its memory, so a load takes no other
memory. If a file system does not answer, the load ends after some seconds with the blocks it has;
its thread is abandoned, and copies nothing any more.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence, Set

from protocol.core_worker import BlocksLoaded, LoadBlocks
from worker_proc.offload.block_reader import Outcome, Wanted
from worker_proc.offload.block_store import BlockStore
from worker_proc.offload.drafts import DraftBlocks
from worker_proc.offload.memory import BlockMemory, Parts
from worker_proc.offload.peers import Peers
from worker_proc.offload.priority import lower_priority

LOAD_TIMEOUT_S = 10.0

log = logging.getLogger("troika.worker")


class BlockLoad(threading.Thread):
    """The load of one request: reads blocks in order, until one is missing."""

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
        """`slot` is the slot to read to; calling `on_end` frees it."""
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
        self._has_state = self._has_remote_state = False
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
        wanted = self._wanted()
        with contextlib.closing(self._arrivals(wanted)) as arrivals:
            self._read_each({each.key for each in wanted}, arrivals)

    def _wanted(self) -> list[Wanted]:
        """Return the blocks to read from the other machine, in the order in which they are used.

        A draft model's block follows if the model's block is read there.
        """
        message = self._message
        if not message.source or self._peers is None:
            return []
        wanted = []
        if self._states is not None and message.state_key and not self._is_here(message.state_key):
            wanted.append(Wanted(message.state_key, self._states.parts(self._slot)))
        block, draft = self._memory.parts(self._slot), self._draft_parts()
        for key in message.keys:
            if self._is_here(key):
                continue
            wanted.append(Wanted(key, block))
            name = self._draft_name(key)
            if name is not None and not self._is_here(name):
                wanted.append(Wanted(name, draft))
        return wanted

    def _is_here(self, key: bytes) -> bool:
        """Return whether a store of this machine probably has a block."""
        return any(key in store.index for store in self._stores)

    def _draft_name(self, key: bytes) -> bytes | None:
        return None if self._drafts is None else self._drafts.name(key)

    def _draft_parts(self) -> Parts:
        return [] if self._drafts is None else self._drafts.memory.parts(self._slot)

    def _arrivals(self, wanted: Sequence[Wanted]) -> Generator[Outcome]:
        """Yield the outcome of each block, until the machine stops answering.

        The first `next` connects.
        """
        peers = self._peers
        if not wanted or peers is None:
            return
        with (
            contextlib.suppress(OSError),
            peers.reader(self._message.source) as reader,
        ):  # errors are logged there
            yield from reader.read(wanted, self._limit())

    def _limit(self) -> float:
        limit_ms = self._message.limit_ms
        if not limit_ms:
            return self.deadline
        return min(self.deadline, self._began_ns / 1e9 + limit_ms / 1000)

    def _read_each(self, remote: Set[bytes], arrivals: Iterator[Outcome]) -> None:
        """Fill the blocks, in order; those of `remote` come from the other machine."""
        message = self._message
        if message.state_key and not self._read_state(remote, arrivals):
            return
        for block_id, key in zip(message.block_ids, message.keys, strict=True):
            is_remote = key in remote
            with self._timed(is_remote=is_remote):
                if not self._fetch(key, self._memory, remote, arrivals):
                    return
                with self._copying:
                    if self._is_ended:
                        return
                    self._memory.copy_in(self._slot, block_id)
                    self._num_blocks += 1
                    self._num_remote_blocks += is_remote
                    if self._drafts is not None:
                        self._drafts.note(block_id, is_filled=False)
                self._read_draft(block_id, key, remote, arrivals)

    @contextlib.contextmanager
    def _timed(self, *, is_remote: bool) -> Iterator[None]:
        """Count the elapsed time as the other machine's, if `is_remote`."""
        began_ns = time.monotonic_ns()
        yield
        if is_remote:
            self._remote_ns += time.monotonic_ns() - began_ns

    def _fetch(
        self, key: bytes, memory: BlockMemory, remote: Set[bytes], arrivals: Iterator[Outcome]
    ) -> bool:
        """Read a block to the slot, locally or remotely; False: it is missing or damaged."""
        if key not in remote:
            return self._read(key, memory)
        outcome = next(arrivals, None)
        if outcome is Outcome.DAMAGED:
            log.warning("a KV block of %s is damaged; it is computed", self._message.source)
        return outcome is Outcome.READ

    def _read_state(self, remote: Set[bytes], arrivals: Iterator[Outcome]) -> bool:
        """Fill the state block; return whether its state was found."""
        states, message = self._states, self._message
        is_remote = message.state_key in remote
        with self._timed(is_remote=is_remote):
            if states is None or not self._fetch(message.state_key, states, remote, arrivals):
                return False
            with self._copying:
                if not self._is_ended:
                    states.copy_in(self._slot, message.state_block_id)
                    self._has_state, self._has_remote_state = True, is_remote
        return self._has_state

    def _read_draft(
        self, block_id: int, key: bytes, remote: Set[bytes], arrivals: Iterator[Outcome]
    ) -> None:
        """Fill the draft model's block that accompanies a block of the model, if it is found."""
        drafts, name = self._drafts, self._draft_name(key)
        if drafts is None or name is None:
            return
        if not self._fetch(name, drafts.memory, remote, arrivals):
            return
        with self._copying:
            if not self._is_ended:
                drafts.memory.copy_in(self._slot, block_id)
                drafts.note(block_id, is_filled=True)

    def _read(self, key: bytes, memory: BlockMemory) -> bool:
        """Read a block to the slot from the first store that has it; copy it to faster stores."""
        block = memory.parts(self._slot)
        for number, store in enumerate(self._stores):
            if key in store.index and store.read(key, block):
                for faster in self._stores[:number]:
                    with contextlib.suppress(OSError):
                        faster.write(key, block, waits=False)
                return True
        return False

    def end(self) -> BlocksLoaded:
        """Return the answer; no block is written afterwards."""
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
            self._has_remote_state,
        )

"""Writes blocks to stores alongside the steps.

A block to be written is copied out between two steps, and a thread for each store writes it from
there. If a store cannot keep up, blocks are left out.
"""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from worker_proc.offload.block_store import BlockStore
from worker_proc.offload.memory import BlockMemory, Wait
from worker_proc.offload.priority import lower_priority

_PAUSE_S = 5.0
"""Time for which a store is not written to after a failure."""
_QUIET_S = 60.0
"""Time between two log lines about a failing store."""

log = logging.getLogger("troika.worker")


class BlockWriters:
    """Writes the blocks of one memory to all stores."""

    def __init__(
        self, memory: BlockMemory, stores: Sequence[BlockStore], slots: Sequence[int]
    ) -> None:
        """Copy blocks to `slots` of the memory, which nothing else uses."""
        self._memory = memory
        self._stores = stores
        self._free_slots = deque(slots)
        # A store that hangs keeps its blocks, and must leave slots for the others.
        max_waiting = max(1, len(slots) // len(stores)) if stores else 0
        self._writers = [_Writer(store, memory, max_waiting) for store in stores]

    def store(self, block_ids: Sequence[int], keys: Sequence[bytes]) -> None:
        """Copy blocks out and have them written; those without a free slot are left out."""
        if self._memory.is_asleep:  # they have no content
            return
        blocks = [
            (block_id, key)
            for block_id, key in zip(block_ids, keys, strict=True)
            if any(key not in store.index for store in self._stores)
        ][: len(self._free_slots)]
        if not blocks:
            return
        slots = [self._free_slots.popleft() for _ in blocks]
        wait = self._memory.copy_out([block_id for block_id, _ in blocks], slots)
        for slot, (_, key) in zip(slots, blocks, strict=True):
            staged = _Staged(slot, key, wait, self._free_slots, len(self._writers))
            for writer in self._writers:
                writer.put(staged)


@dataclass
class _Staged:
    """A block that was copied out, for all writers."""

    slot: int
    key: bytes
    wait: Wait
    free_slots: "deque[int]"
    num_left: int
    """Number of writers that have neither written nor dropped it."""

    def leave(self) -> None:
        """Record that a writer no longer needs it; the last one frees the slot."""
        with _leaving:
            self.num_left -= 1
            if self.num_left == 0:
                self.free_slots.append(self.slot)


_leaving = threading.Lock()


class _Writer:
    """Writes blocks to one store, in a thread that starts with the first block."""

    def __init__(self, store: BlockStore, memory: BlockMemory, max_waiting: int) -> None:
        """Keep at most `max_waiting` blocks waiting."""
        self._store = store
        self._memory = memory
        self._max_waiting = max_waiting
        self._waiting: queue.SimpleQueue[_Staged] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._silent_until = self._paused_until = 0.0

    def put(self, block: _Staged) -> None:
        """Queue a block for writing, or drop it if too many wait, or if the store has failed."""
        is_full = self._waiting.qsize() >= self._max_waiting
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

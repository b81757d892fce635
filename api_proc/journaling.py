"""The journal inside the event loop: groups what is to be written, survives a disk that fails.

While nothing can be written, requests are kept in memory only, which the log, the metrics and
/readyz say. It is tried again and again, each time with a snapshot of everything open in a new
segment; the same snapshot keeps segments short.
"""

import asyncio
import logging
import os
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from api_proc.session_log import Brought, Forgotten, Row
from protocol.journal import Journal, Recovered
from protocol.journal_segments import MAX_RECORD_BYTES
from protocol.message import Message, encode

FLUSH_S = 0.005
"""Tokens are written this long after they have come, together with all others."""
SEGMENT_BYTES = 16 * 2**20
"""A segment of this size is followed by a new one; or of twice its snapshot's, if that is more."""
READ_TIMEOUT_S = 5.0
"""Longest wait for what a predecessor has left, before requests are served."""
_FIRST_RETRY_S = 1.0
_LOCK_RETRY_S = 0.1
_RETRY_MAX_S = 10.0
_SNAPSHOT_BYTES = 64 * 1024
"""Of a snapshot, encoded before other work of the event loop."""
_SNAPSHOT_QUEUE_BYTES = 4 * 2**20
"""A snapshot waits while so much is to be written: it may be larger than the queue's bound."""
_SNAPSHOT_PAUSE_S = 0.01

log = logging.getLogger("troika.api")


class Journaling:
    """One journal and everybody who waits for it."""

    def __init__(
        self,
        directory: str,
        snapshot: Callable[[], Iterator[Message]],
        *,
        is_synced: bool = False,
        make_journal: Callable[..., Journal] = Journal,
    ) -> None:
        """Name the directory.

        Args:
            directory: see `Journal`.
            snapshot: iterates over records that tell of everything open; what comes meanwhile is
                written between them.
            is_synced: whether written means on the medium.
            make_journal: takes the arguments of `Journal`.
        """
        self._directory = directory
        self._snapshot = snapshot
        self._make_journal = make_journal
        self._sync = os.fsync if is_synced else None
        self._rows: list[Row] = []
        self._flushing: asyncio.TimerHandle | None = None
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._snapshot_bytes = 0
        self._is_waiting = False
        self._is_rotating = False
        self._rotation = 0
        self._retry_s = _FIRST_RETRY_S
        self._retry: asyncio.TimerHandle | None = None
        self._restoring: asyncio.Task[None] | None = None
        self._was_read = asyncio.Event()
        self.is_recovered = False
        """Whether all that a predecessor has left is there again."""
        self.is_failed = True
        """Whether requests are kept in memory only."""
        self.num_failures = 0
        self.num_bytes = 0
        """Handed over to be written."""

    def start(self, restore: Callable[[list[bytes]], Coroutine[Any, Any, None]]) -> None:
        """Read what a predecessor has left, restore it, and begin to write; inside the event loop.

        All of that happens later, as soon as the disk allows. What cannot be read or restored is
        tried again, and nothing is written before.
        """
        self._loop = asyncio.get_running_loop()
        self._restore = restore
        self._journal = self._make_journal(
            self._directory,
            self._loop.call_soon_threadsafe,
            self._on_written,
            self._on_failed,
            sync=self._sync,
        )
        self._take_over()

    async def wait_read(self) -> None:
        """Wait until all is restored, or cannot be now, or takes too long."""
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                await self._was_read.wait()
        except TimeoutError:
            log.error(
                "the journal in %s is not restored within %.0f s: what is in it goes on later",
                self._directory,
                READ_TIMEOUT_S,
            )

    def close(self) -> None:
        """Write what is left."""
        self._flush()
        for later in (self._flushing, self._retry, self._restoring):
            if later is not None:
                later.cancel()
        self._journal.close()

    def write(self, message: Message) -> None:
        """Have a record written soon, after all that came before it."""
        self._flush()
        self._append(message)

    def row(self, row: Row) -> None:
        """Have an output written, together with others."""
        self._rows.append(row)
        if self._flushing is None:
            self._flushing = self._loop.call_later(FLUSH_S, self._flush)

    async def written(self, timeout_s: float) -> None:
        """Wait until all that was handed over is on disk, or will not be; at most so long."""
        position = self._journal.num_appended
        if self._journal.num_written >= position:
            return
        future: asyncio.Future[None] = self._loop.create_future()
        self._waiting.append((position, future))
        await asyncio.wait([future], timeout=timeout_s)

    def _append(self, message: Message) -> int:
        """Hand over one record; returns its size in bytes."""
        body = encode(message)
        if len(body) > MAX_RECORD_BYTES:
            log.warning("a request of %d bytes is too large for the journal", len(body))
            return 0
        self.num_bytes += len(body)
        self._journal.append(body)
        limit = max(SEGMENT_BYTES, 2 * self._snapshot_bytes)
        if self._journal.num_segment_bytes > limit and not self._is_rotating and not self.is_failed:
            self._rotate()
        return len(body)

    def _flush(self) -> None:
        if self._flushing is not None:
            self._flushing.cancel()
            self._flushing = None
        if self._rows:
            rows, self._rows = self._rows, []
            self._append(Brought(rows))

    def _on_written(self) -> None:
        waiting = self._waiting
        while waiting and waiting[0][0] <= self._journal.num_written:
            future = waiting.popleft()[1]
            if not future.done():
                future.set_result(None)

    # Segments -----------------------------------------------------------------------------------

    def _take_over(self) -> None:
        self._retry = None
        if self.is_recovered:
            self._rotate()
        else:
            self._journal.recover(self._on_read)

    def _on_read(self, outcome: Recovered) -> None:
        if isinstance(outcome, BlockingIOError):  # a predecessor still finishes what it has
            if not self._is_waiting:
                self._is_waiting = True
                log.warning("the journal waits: %s", outcome)
            self._retry = self._loop.call_later(_LOCK_RETRY_S, self._take_over)
        elif isinstance(outcome, OSError):
            self._on_failed(outcome)
        else:
            self._restoring = self._loop.create_task(self._go_on_with(outcome))
            return
        self._was_read.set()

    async def _go_on_with(self, records: list[bytes]) -> None:
        try:
            await self._restore(records)
            self.is_recovered = True
            self._rotate()
        except Exception as error:
            log.exception("what the journal says cannot be restored")
            self._on_failed(OSError(repr(error)))
        self._was_read.set()

    def _rotate(self) -> None:
        """Go on in a new segment, with everything open at its beginning."""
        self._is_rotating = True
        self._rotation += 1
        self._journal.begin_segment()
        self._write_snapshot(self._snapshot(), self._rotation)

    def _write_snapshot(self, records: Iterator[Message], rotation: int) -> None:
        """A part at a time, so that no stream waits for it, and no faster than the disk."""
        if rotation != self._rotation or not self._journal.is_writing:
            return
        if self._journal.num_queued_bytes > _SNAPSHOT_QUEUE_BYTES:
            self._loop.call_later(_SNAPSHOT_PAUSE_S, self._write_snapshot, records, rotation)
            return
        num_bytes = 0
        while num_bytes < _SNAPSHOT_BYTES:
            message = next(records, None)
            if message is None:
                self._end_snapshot(rotation)
                return
            num_bytes += self._append(message)
        self._loop.call_soon(self._write_snapshot, records, rotation)

    def _end_snapshot(self, rotation: int) -> None:
        self._journal.complete_segment()
        self._snapshot_bytes = self._journal.num_segment_bytes
        self._append(Forgotten(0))  # to hear of the end also where nothing is open
        future: asyncio.Future[None] = self._loop.create_future()
        self._waiting.append((self._journal.num_appended, future))
        future.add_done_callback(lambda _: self._snapshot_written(rotation))

    def _snapshot_written(self, rotation: int) -> None:
        if rotation != self._rotation or not self._journal.is_writing:
            return
        self._is_rotating = False
        self._retry_s = _FIRST_RETRY_S
        if self.is_failed:
            self.is_failed = False
            if self.num_failures:
                log.warning("the journal in %s is written again", self._directory)

    def _on_failed(self, error: OSError) -> None:
        if not self.is_failed or not self.num_failures:
            log.error(
                "the journal in %s cannot be used (%s): requests are kept in memory only",
                self._directory,
                error,
            )
        self.is_failed = True
        self.num_failures += 1
        self._is_rotating = False
        self._on_written()
        if self._retry is None:
            self._retry = self._loop.call_later(self._retry_s, self._take_over)
            self._retry_s = min(2 * self._retry_s, _RETRY_MAX_S)

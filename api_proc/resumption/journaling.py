"""The journal inside the event loop: groups records, starts segments, retries a failed disk.

While the journal cannot be written, requests are kept in memory only, which the log, the metrics
and /readyz report. Each retry begins a new segment with a snapshot of all open requests. The same
snapshot keeps the directory small: a segment above its size limit is replaced by a new one.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from api_proc.resumption.journal import Journal, JournalOwner, Recovered
from api_proc.resumption.journal_segments import MAX_RECORD_BYTES
from api_proc.resumption.session_log import OutputRecord, RemoveRecord, Row
from protocol.message import Message, encode

FLUSH_S = 0.005
"""Outputs are collected for this long and written as one record."""
SEGMENT_BYTES = 16 * 2**20
"""Above this size, or twice its snapshot's if that is more, a segment is replaced."""
READ_TIMEOUT_S = 5.0
"""Longest wait for the journal at the start of the server."""
_FIRST_RETRY_S = 1.0
_LOCK_RETRY_S = 0.1
_RETRY_MAX_S = 10.0
_SNAPSHOT_BYTES = 64 * 1024
"""Size of the part of a snapshot that is encoded in one turn of the event loop."""
_SNAPSHOT_QUEUE_BYTES = 4 * 2**20
"""A snapshot may be larger than the queue's bound, so it waits while this much is queued."""
_SNAPSHOT_PAUSE_S = 0.01

log = logging.getLogger("troika.api")


class Journaling:
    """Writes one journal and reads it at the start."""

    def __init__(
        self,
        directory: str,
        snapshot: Callable[[], Iterator[Message]],
        *,
        is_synced: bool,
        make_journal: Callable[..., Journal],
    ) -> None:
        """Name the directory; with `is_synced` a record is written only once it is on the medium.

        `snapshot` iterates over records of all open requests; records of new events are written
        between them.
        """
        self._directory = directory
        self._snapshot = snapshot
        self._make_journal = make_journal
        self._is_synced = is_synced
        self._rows: list[Row] = []
        self._flushing: asyncio.TimerHandle | None = None
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._snapshot_bytes = 0
        self._is_locked_elsewhere = False
        self._is_rotating = False
        self._rotation = 0
        self._retry_s = _FIRST_RETRY_S
        self._retry: asyncio.TimerHandle | None = None
        self._restoring: asyncio.Task[None] | None = None
        self._was_read = asyncio.Event()
        self.is_recovered = False
        """Whether the requests of the predecessor are restored."""
        self.is_failed = True
        """Whether requests are kept in memory only."""
        self.num_failures = 0
        self.num_bytes = 0
        """Bytes of all records so far."""

    def start(self, restore: Callable[[list[bytes]], Coroutine[Any, Any, None]]) -> None:
        """Begin to read, restore and then write the journal, inside the event loop.

        A journal that cannot be read or restored is tried again, and not written until then.
        """
        self._loop = asyncio.get_running_loop()
        self._restore = restore
        self._journal = self._make_journal(
            self._directory,
            JournalOwner(self._loop.call_soon_threadsafe, self._on_written, self._on_failed),
            is_synced=self._is_synced,
        )
        self._take_over()

    async def wait_read(self) -> None:
        """Wait until the journal is restored or has failed, for at most `READ_TIMEOUT_S`."""
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                await self._was_read.wait()
        except TimeoutError:
            text = "the journal in %s is not restored within %.0f s: its requests continue later"
            log.error(text, self._directory, READ_TIMEOUT_S)

    def close(self) -> None:
        self._flush()
        for later in (self._flushing, self._retry, self._restoring):
            if later is not None:
                later.cancel()
        self._journal.close()

    def write(self, message: Message) -> None:
        """Queue a record, after the outputs that were collected so far."""
        self._flush()
        self._append(message)

    def row(self, row: Row) -> None:
        """Collect an output, to be written together with others."""
        self._rows.append(row)
        if self._flushing is None:
            self._flushing = self._loop.call_later(FLUSH_S, self._flush)

    async def written(self, timeout_s: float) -> None:
        """Wait until all records so far are written or lost, for at most `timeout_s`."""
        if self._journal.num_written < self._journal.num_appended:
            await asyncio.wait([self._wait_for_last()], timeout=timeout_s)

    def _wait_for_last(self) -> asyncio.Future[None]:
        future: asyncio.Future[None] = self._loop.create_future()
        self._waiting.append((self._journal.num_appended, future))
        return future

    def _append(self, message: Message) -> int:
        """Hand over one record; returns its size in bytes."""
        body = encode(message)
        if len(body) > MAX_RECORD_BYTES:
            text = "a record of %d bytes is not written: the journal takes %d"
            log.warning(text, len(body), MAX_RECORD_BYTES)
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
            self._append(OutputRecord(rows))

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
        if isinstance(outcome, BlockingIOError):  # a predecessor is still finishing its requests
            if not self._is_locked_elsewhere:
                self._is_locked_elsewhere = True
                log.warning("the journal waits: %s", outcome)
            self._retry = self._loop.call_later(_LOCK_RETRY_S, self._take_over)
        elif isinstance(outcome, OSError):
            self._on_failed(outcome)
        else:
            self._restoring = self._loop.create_task(self._restore_and_write(outcome))
            return
        self._was_read.set()

    async def _restore_and_write(self, records: list[bytes]) -> None:
        try:
            await self._restore(records)
            self.is_recovered = True
            self._rotate()
        except Exception as error:
            log.exception("the journal cannot be restored")
            self._on_failed(OSError(repr(error)))
        self._was_read.set()

    def _rotate(self) -> None:
        """Continue in a new segment, which begins with a snapshot."""
        self._is_rotating = True
        self._rotation += 1
        self._journal.begin_segment()
        self._write_snapshot(self._snapshot(), self._rotation)

    def _write_snapshot(self, records: Iterator[Message], rotation: int) -> None:
        """Write the next part, so that no stream waits for all of it; no faster than the disk."""
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
        self._append(RemoveRecord(0))  # settled after the mark, even where no request is open
        self._wait_for_last().add_done_callback(lambda _: self._snapshot_written(rotation))

    def _snapshot_written(self, rotation: int) -> None:
        if rotation != self._rotation or not self._journal.is_writing:
            return
        self._is_rotating = False
        self._retry_s = _FIRST_RETRY_S
        if self.is_failed and self.num_failures:
            log.warning("the journal in %s is written again", self._directory)
        self.is_failed = False

    def _on_failed(self, error: OSError) -> None:
        if not self.is_failed or not self.num_failures:
            text = "the journal in %s cannot be used (%s): requests are kept in memory only"
            log.error(text, self._directory, error)
        self.is_failed = True
        self.num_failures += 1
        self._is_rotating = False
        self._on_written()
        if self._retry is None:
            self._retry = self._loop.call_later(self._retry_s, self._take_over)
            self._retry_s = min(2 * self._retry_s, _RETRY_MAX_S)

"""An append-only journal on disk: records in, records back after a death of the process.

A thread of its own reads and writes, so that no disk stalls the caller: all that was appended
meanwhile goes out in one write, and one sync where records shall survive a loss of power too (those
of a process that dies survive without). An error, or a disk that is too slow for the bounded queue,
ends the writing; the owner hears of it, and begins a new segment when it likes to try again. What
the files look like: `protocol.journal_segments`.
"""

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

from protocol.journal_segments import (
    FRAME_BYTES,
    MAX_RECORD_BYTES,
    OpenFile,
    Segments,
    Sync,
    Write,
    frame,
)
from protocol.runtime import Clock

MAX_QUEUED_BYTES = 32 * 2**20
"""Waiting to be written; past it the disk counts as failed."""
STALL_TIMEOUT_S = 5.0
"""So does one that has not come back from a write for so long."""
_CLOSE_TIMEOUT_S = 2.0


Recovered = list[bytes] | OSError
"""What a predecessor has left, in its order, or why that cannot be read: BlockingIOError where
another process has the directory."""


class Threads(Protocol):
    """As much of the module `threading` as a journal uses."""

    def Condition(self) -> threading.Condition: ...

    def Thread(
        self, *, target: Callable[[], None], name: str, daemon: bool
    ) -> threading.Thread: ...


class _Recovery(NamedTuple):
    """To the thread: take the directory over, and read it."""

    on_done: Callable[[Recovered], None]


class _Segment(NamedTuple):
    """To the thread: go on in a new file."""

    number: int


class _Complete(NamedTuple):
    """To the thread: the snapshot ends here; older files may go."""


_Order = bytes | _Recovery | _Segment | _Complete


class Journal:
    """One directory, one owner. Methods are called from one thread, callbacks through `notify`."""

    def __init__(
        self,
        directory: str,
        notify: Callable[[Callable[[], None]], object],
        on_written: Callable[[], None],
        on_failed: Callable[[OSError], None],
        *,
        open_file: OpenFile = os.open,
        write: Write = os.write,
        sync: Sync | None = None,
        clock: Clock = time,
        threads: Threads = threading,
    ) -> None:
        """Name the directory; nothing is opened yet.

        Args:
            directory: made with mode 0700 if it is not there.
            notify: runs a function in the owner's thread, as `call_soon_threadsafe` does.
            on_written: `num_written` has grown.
            on_failed: nothing is written any more until `begin_segment`.
            open_file: in place of `os.open`.
            write: in place of `os.write`.
            sync: `os.fsync` or the like, after each write; None: what was written is left to the
                operating system, which keeps it whatever happens to the process.
            clock: measures how long the disk holds a write.
            threads: creates the thread that writes.
        """
        self._segments = Segments(Path(directory), open_file, write, sync)
        self._notify, self._on_written, self._on_failed = notify, on_written, on_failed
        self._clock = clock
        self._threads = threads
        self._wakes = threads.Condition()
        self._thread: threading.Thread | None = None
        self._next_number = 1
        # Shared with the thread, under the condition's lock.
        self._orders: deque[_Order] = deque()
        self._num_waiting_bytes = 0
        self._num_taken_bytes = 0
        self._taken_since: float | None = None
        self._last_position = 0
        self._is_closing = False
        self.is_recovered = False
        """Whether the directory is this process's, and what was there has been read."""
        self.is_writing = False
        """Whether what is appended will be written."""
        self.num_appended = 0
        """Records so far, those that were lost included."""
        self.num_written = 0
        """Of these, settled: written, or lost with an error."""
        self.num_segment_bytes = 0
        """In the newest segment."""

    # The owner's side ---------------------------------------------------------------------------

    @property
    def num_queued_bytes(self) -> int:
        """Appended and not written yet."""
        return self._num_waiting_bytes + self._num_taken_bytes

    def recover(self, on_done: Callable[[Recovered], None]) -> None:
        """Take the directory over and read it, however long the disk takes; then tell.

        It may be tried again after an error. Nothing is told any more after `close`.
        """
        if self._thread is None:
            self._thread = self._threads.Thread(target=self._run, name="journal", daemon=True)
            self._thread.start()
        self._order(_Recovery(on_done))

    def begin_segment(self) -> None:
        """Go on in a new file; the caller appends a snapshot, then calls `complete_segment`."""
        assert self.is_recovered  # else the end of the snapshot would delete what was not read
        self.is_writing = True
        self.num_segment_bytes = 0
        self._order(_Segment(self._next_number))
        self._next_number += 1

    def append(self, record: bytes) -> int:
        """Have a record written; returns what `num_written` is when that is settled."""
        assert 0 < len(record) <= MAX_RECORD_BYTES
        self.num_appended += 1
        if not self.is_writing:
            self.num_written = self.num_appended
            return self.num_appended
        if self.num_queued_bytes > MAX_QUEUED_BYTES or self._is_stalled():
            self._fail(OSError("the disk does not keep up"))
            return self.num_appended
        self.num_segment_bytes += FRAME_BYTES + len(record)
        self._order(record)
        return self.num_appended

    def complete_segment(self) -> None:
        """The snapshot ends here: what older segments hold is not needed any more."""
        if self.is_writing:  # else it was given up on the way
            self._order(_Complete())

    def close(self) -> None:
        """Write what is queued, within a bounded time, and let go of the directory.

        A disk that holds the thread longer keeps the directory locked until the process ends.
        """
        self.is_writing = False
        with self._wakes:
            self._is_closing = True
            self._wakes.notify()
        if self._thread is not None:
            self._thread.join(_CLOSE_TIMEOUT_S)

    def _is_stalled(self) -> bool:
        since = self._taken_since
        return since is not None and self._clock.monotonic() - since > STALL_TIMEOUT_S

    def _order(self, order: _Order) -> None:
        with self._wakes:
            self._orders.append(order)
            self._last_position = self.num_appended
            if isinstance(order, bytes):
                self._num_waiting_bytes += len(order)
            self._wakes.notify()

    def _fail(self, error: OSError) -> None:
        if not self.is_writing:
            return
        self.is_writing = False
        with self._wakes:
            self._orders.clear()
            self._num_waiting_bytes = 0
        self.num_written = self.num_appended
        self._on_failed(error)

    def _read(self, order: _Recovery, outcome: tuple[list[bytes], int] | OSError) -> None:
        if self._is_closing:
            return
        if isinstance(outcome, OSError):
            order.on_done(outcome)
        else:
            records, self._next_number = outcome
            self.is_recovered = True
            order.on_done(records)

    def _settle(self, position: int) -> None:
        self.num_written = max(self.num_written, position)
        self._on_written()

    # The thread's side --------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            orders, position = self._take()
            if not orders:
                break
            try:
                self._obey(orders)
            except Exception as problem:  # whatever it is, the thread is needed for the next try
                self._give_up_file()
                self._tell(partial(self._fail, _os_error(problem)))
            else:
                self._tell(partial(self._settle, position))
        self._give_up_file()
        self._segments.unlock()

    def _give_up_file(self) -> None:
        with contextlib.suppress(OSError):  # it is closed nevertheless
            self._segments.close()

    def _take(self) -> tuple[list[_Order], int]:
        """All that waits, and the number of the last record; nothing at the end."""
        with self._wakes:
            self._num_taken_bytes, self._taken_since = 0, None
            while not self._orders and not self._is_closing:
                self._wakes.wait()
            orders = list(self._orders)
            self._orders.clear()
            self._num_taken_bytes, self._num_waiting_bytes = self._num_waiting_bytes, 0
            self._taken_since = self._clock.monotonic()
            return orders, self._last_position

    def _obey(self, orders: list[_Order]) -> None:
        frames: list[bytes] = []
        for order in orders:
            if isinstance(order, bytes):
                frames += frame(order)
                continue
            if isinstance(order, _Recovery):
                outcome = self._recover()
                with self._wakes:
                    self._taken_since = self._clock.monotonic()  # no write has taken long
                self._tell(partial(self._read, order, outcome))
                continue
            self._segments.append(b"".join(frames))
            frames.clear()
            if isinstance(order, _Segment):
                self._segments.begin(order.number)
            else:
                self._segments.complete()
        self._segments.append(b"".join(frames))
        self._segments.sync()

    def _recover(self) -> tuple[list[bytes], int] | OSError:
        try:
            self._segments.lock()
            return self._segments.read()
        except Exception as problem:
            return _os_error(problem)

    def _tell(self, function: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the owner's loop is closed
            self._notify(function)


def _os_error(problem: Exception) -> OSError:
    return problem if isinstance(problem, OSError) else OSError(repr(problem))

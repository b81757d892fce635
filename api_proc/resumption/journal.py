"""An append-only journal on disk: records that survive the death of the process.

The disk must never stall the caller, so a thread does all reading and writing. It writes the
records that were appended since its last write in one call, followed by one sync where records must
survive a loss of power as well. An error, or a disk too slow for the bounded queue, ends the
writing: the owner is notified and begins a new segment when it wants to try again.
`api_proc.resumption.journal_segments` describes the files.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

from api_proc.resumption.journal_segments import (
    FRAME_BYTES,
    MAX_RECORD_BYTES,
    SYSTEM_CALLS,
    DiskCalls,
    Segments,
    frame,
)
from protocol.transport.runtime import Clock

MAX_QUEUED_BYTES = 32 * 2**20
"""Once more than this waits to be written, the disk counts as failed."""
STALL_TIMEOUT_S = 5.0
"""A disk that takes longer for one write counts as failed."""
_CLOSE_TIMEOUT_S = 2.0


Recovered = list[bytes] | OSError
"""The records of the directory in their order, or the reason why they cannot be read:
BlockingIOError where another process has locked the directory."""


class Threads(Protocol):
    """The part of the module `threading` that a journal uses."""

    def Condition(self) -> threading.Condition: ...

    def Thread(
        self, *, target: Callable[[], None], name: str, daemon: bool
    ) -> threading.Thread: ...


class JournalOwner(NamedTuple):
    """The functions by which a journal reports to its owner."""

    notify: Callable[[Callable[[], None]], object]
    """Runs a function in the owner's thread, as `call_soon_threadsafe` does."""
    on_written: Callable[[], None]
    """Called when `num_written` has grown."""
    on_failed: Callable[[OSError], None]
    """Called when writing has ended."""


_Command = bytes | Callable[[], None]
"""A record, or a function that the thread calls after writing the records before it."""


class Journal:
    """One directory with one owner, which calls all methods from one thread."""

    def __init__(
        self,
        directory: str,
        owner: JournalOwner,
        *,
        is_synced: bool = False,
        disk: DiskCalls = SYSTEM_CALLS,
        clock: Clock = time,
        threads: Threads = threading,
    ) -> None:
        """Name the directory, which gets mode 0700 if it does not exist; nothing is opened yet.

        With `is_synced`, every write is followed by a sync; otherwise a record survives the
        process, but not a loss of power. `disk`, `clock` and `threads` replace functions of the
        system in tests.
        """
        self._segments = Segments(Path(directory), disk, is_synced=is_synced)
        self._owner = owner
        self._clock = clock
        self._threads = threads
        self._wakes = threads.Condition()
        self._thread: threading.Thread | None = None
        self._next_number = 1
        # The thread shares the following fields, under the condition's lock.
        self._commands: deque[_Command] = deque()
        self._num_waiting_bytes = 0
        self._num_taken_bytes = 0
        self._taken_since: float | None = None
        self._last_position = 0
        self._is_closing = False
        self.is_recovered = False
        """Whether the directory is locked and its records have been read."""
        self.is_writing = False
        self.num_appended = 0
        """Number of all records so far."""
        self.num_written = 0
        """Number of records that are written, or lost with an error."""
        self.num_segment_bytes = 0
        """Size of the newest segment."""

    # The owner's side ---------------------------------------------------------------------------

    @property
    def num_queued_bytes(self) -> int:
        """Bytes that were appended and are not written yet."""
        return self._num_waiting_bytes + self._num_taken_bytes

    def recover(self, on_done: Callable[[Recovered], None]) -> None:
        """Lock the directory, read it, and pass the result to `on_done`, unless closed before."""
        if self._thread is None:
            self._thread = self._threads.Thread(target=self._run, name="journal", daemon=True)
            self._thread.start()
        self._enqueue(partial(self._recover, on_done))

    def begin_segment(self) -> None:
        """Continue in a new file; the caller appends a snapshot and calls `complete_segment`."""
        assert self.is_recovered  # else completing it would delete records that were not read
        self.is_writing = True
        self.num_segment_bytes = 0
        self._enqueue(partial(self._segments.begin, self._next_number))
        self._next_number += 1

    def append(self, record: bytes) -> int:
        """Queue a record; returns the value of `num_written` once it is settled."""
        assert 0 < len(record) <= MAX_RECORD_BYTES
        self.num_appended += 1
        if not self.is_writing:
            self.num_written = self.num_appended
            return self.num_appended
        since = self._taken_since
        is_stalled = since is not None and self._clock.monotonic() - since > STALL_TIMEOUT_S
        if self.num_queued_bytes > MAX_QUEUED_BYTES or is_stalled:
            self._fail(OSError("the disk does not keep up"))
            return self.num_appended
        self.num_segment_bytes += FRAME_BYTES + len(record)
        self._enqueue(record)
        return self.num_appended

    def complete_segment(self) -> None:
        """End the snapshot: the records of older segments are obsolete."""
        if self.is_writing:  # else the segment has failed before
            self._enqueue(self._segments.complete)

    def close(self) -> None:
        """Write the queued records and unlock the directory, for at most `_CLOSE_TIMEOUT_S`."""
        self.is_writing = False
        with self._wakes:
            self._is_closing = True
            self._wakes.notify()
        if self._thread is not None:
            self._thread.join(_CLOSE_TIMEOUT_S)

    def _enqueue(self, command: _Command) -> None:
        with self._wakes:
            self._commands.append(command)
            self._last_position = self.num_appended
            if isinstance(command, bytes):
                self._num_waiting_bytes += len(command)
            self._wakes.notify()

    def _fail(self, error: OSError) -> None:
        if not self.is_writing:
            return
        self.is_writing = False
        with self._wakes:
            self._commands.clear()
            self._num_waiting_bytes = 0
        self.num_written = self.num_appended
        self._owner.on_failed(error)

    def _on_read(
        self, on_done: Callable[[Recovered], None], outcome: tuple[list[bytes], int] | OSError
    ) -> None:
        if self._is_closing:
            return
        if isinstance(outcome, OSError):
            on_done(outcome)
        else:
            records, self._next_number = outcome
            self.is_recovered = True
            on_done(records)

    def _settle(self, position: int) -> None:
        self.num_written = max(self.num_written, position)
        self._owner.on_written()

    # The thread's side --------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            commands, position = self._take()
            if not commands:
                break
            try:
                self._execute(commands)
            except Exception as error:  # the thread must survive for the next attempt
                self._close_file()
                self._call_owner(partial(self._fail, _os_error(error)))
            else:
                self._call_owner(partial(self._settle, position))
        self._close_file()
        self._segments.unlock()

    def _close_file(self) -> None:
        with contextlib.suppress(OSError):  # the file is closed nevertheless
            self._segments.close()

    def _take(self) -> tuple[list[_Command], int]:
        """Wait for commands; returns them with the last record's number, or nothing at the end."""
        with self._wakes:
            self._num_taken_bytes, self._taken_since = 0, None
            while not self._commands and not self._is_closing:
                self._wakes.wait()
            commands = list(self._commands)
            self._commands.clear()
            self._num_taken_bytes, self._num_waiting_bytes = self._num_waiting_bytes, 0
            self._taken_since = self._clock.monotonic()
            return commands, self._last_position

    def _execute(self, commands: list[_Command]) -> None:
        frames: list[bytes] = []
        for command in commands:
            if isinstance(command, bytes):
                frames += frame(command)
            else:
                self._segments.append(b"".join(frames))
                frames.clear()
                command()
        self._segments.append(b"".join(frames))
        self._segments.sync()

    def _recover(self, on_done: Callable[[Recovered], None]) -> None:
        outcome: tuple[list[bytes], int] | OSError
        try:
            self._segments.lock()
            outcome = self._segments.read()
        except Exception as error:
            outcome = _os_error(error)
        with self._wakes:
            self._taken_since = self._clock.monotonic()  # reading is not a slow write
        self._call_owner(partial(self._on_read, on_done, outcome))

    def _call_owner(self, function: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the owner's loop is closed
            self._owner.notify(function)


def _os_error(error: Exception) -> OSError:
    return error if isinstance(error, OSError) else OSError(repr(error))

"""An append-only journal on disk: records in, records back after a death of the process.

A directory of numbered segments. A segment is a sequence of records, each with its length and its
CRC-32 in front; the owner begins each one with a snapshot of all that it wants to keep, and says
where that ends (a record of no bytes). From then on older segments are not needed, and are deleted.
What a crash has torn off ends at the last record with a good CRC.

A thread of its own writes, so that no disk stalls the caller: all that was appended meanwhile goes
out in one write. Nothing is synchronized to the medium: records survive the death of the process,
not of the host. An error, or a disk that is too slow for the bounded queue, ends the writing; the
owner hears of it, and begins a new segment when it likes to try again.
"""

import contextlib
import fcntl
import os
import stat
import struct
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

MAX_RECORD_BYTES = 2**28
MAX_QUEUED_BYTES = 32 * 2**20
"""Waiting to be written; past it the disk counts as failed."""
LOCK_TIMEOUT_S = 2.0
_PROBE_BYTES = 64 * 1024
"""What a new segment must have room for before anything relies on it."""
_CLOSE_TIMEOUT_S = 2.0
_SUFFIX = ".journal"
_MAGIC = b"TKJ1\r\n\x1a\n"
_FRAME = struct.Struct("<II")

OpenFile = Callable[[str, int, int], int]
"""`os.open`, or a stand-in that fails."""
Write = Callable[[int, bytes], int]
"""`os.write`, or a stand-in that fails."""


class _Segment(NamedTuple):
    """To the thread: go on in a new file."""

    number: int


class _Complete(NamedTuple):
    """To the thread: the snapshot ends here; older files may go."""


_Order = bytes | _Segment | _Complete


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
    ) -> None:
        """Name the directory; nothing is opened yet.

        Args:
            directory: made with mode 0700 if it is not there.
            notify: runs a function in the owner's thread, as `call_soon_threadsafe` does.
            on_written: `num_written` has grown.
            on_failed: nothing is written any more until `begin_segment`.
            open_file: in place of `os.open`.
            write: in place of `os.write`.
        """
        self._directory = Path(directory)
        self._notify, self._on_written, self._on_failed = notify, on_written, on_failed
        self._open_file, self._write = open_file, write
        self._orders: deque[_Order] = deque()
        self._num_queued_bytes = 0
        self._wakes = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_closing = False
        self._next_number = 1
        self._lock_fd: int | None = None
        self._fd: int | None = None
        self._number = 0
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
    def is_locked(self) -> bool:
        """Whether the directory is this process's."""
        return self._lock_fd is not None

    def recover(self, timeout_s: float = LOCK_TIMEOUT_S) -> list[bytes]:
        """Take the directory over and read what a predecessor has left, in its order.

        Args:
            timeout_s: how long to wait for a predecessor that still has it.

        Raises:
            OSError: the directory cannot be used, or another process has it.
        """
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = os.lstat(self._directory)
        if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid():
            raise PermissionError(f"{self._directory} must be a directory of this user")
        self._lock(timeout_s)
        numbers = self._numbers()
        self._next_number = max(numbers, default=0) + 1
        parts: list[list[bytes]] = []
        for number in sorted(numbers, reverse=True):
            records, is_complete = read_segment(self._path(number))
            parts.append(records)
            if is_complete:
                break
        return [record for records in reversed(parts) for record in records]

    def begin_segment(self) -> None:
        """Go on in a new file; the caller appends a snapshot, then calls `complete_segment`."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
            self._thread.start()
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
        self.num_segment_bytes += _FRAME.size + len(record)
        self._order(record)
        if self._num_queued_bytes > MAX_QUEUED_BYTES:
            self._fail(OSError("the disk does not keep up"))
        return self.num_appended

    def complete_segment(self) -> None:
        """The snapshot ends here: what older segments hold is not needed any more."""
        self._order(_Complete())

    def close(self) -> None:
        """Write what is queued, within a bounded time, and let go of the directory."""
        with self._wakes:
            self._is_closing = True
            self._wakes.notify()
        if self._thread is not None:
            self._thread.join(_CLOSE_TIMEOUT_S)
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def _lock(self, timeout_s: float) -> None:
        if self._lock_fd is not None:
            return
        fd = os.open(self._directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                if time.monotonic() >= deadline:
                    os.close(fd)
                    text = f"{self._directory} is in use by another process"
                    raise BlockingIOError(text) from error
                time.sleep(0.02)
            else:
                self._lock_fd = fd
                return

    def _order(self, order: _Order) -> None:
        with self._wakes:
            self._orders.append(order)
            if isinstance(order, bytes):
                self._num_queued_bytes += len(order)
            self._wakes.notify()

    def _fail(self, error: OSError) -> None:
        if not self.is_writing:
            return
        self.is_writing = False
        with self._wakes:
            self._orders.clear()
            self._num_queued_bytes = 0
        self.num_written = self.num_appended
        self._on_failed(error)

    def _settle(self, num_records: int) -> None:
        if self.is_writing:
            self.num_written = min(self.num_written + num_records, self.num_appended)
        self._on_written()

    # The thread's side --------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._wakes:
                while not self._orders and not self._is_closing:
                    self._wakes.wait()
                orders = list(self._orders)
                self._orders.clear()
                self._num_queued_bytes = 0
                if not orders:
                    break
            try:
                self._obey(orders)
            except OSError as error:
                self._close_file(unlink=False)
                failure = error
                with contextlib.suppress(RuntimeError):  # the owner's loop is closed
                    self._notify(lambda error=failure: self._fail(error))  # type: ignore[misc]
        self._close_file(unlink=False)

    def _obey(self, orders: list[_Order]) -> None:
        frames: list[bytes] = []
        num_records = 0
        for order in orders:
            if isinstance(order, bytes):
                frames += (_FRAME.pack(len(order), zlib.crc32(order)), order)
                num_records += 1
                continue
            self._write_all(frames)
            if isinstance(order, _Segment):
                self._open_segment(order.number)
            elif self._fd is not None:
                self._write_all([_FRAME.pack(0, 0)])
                self._delete_others()
        self._write_all(frames)
        if num_records:
            with contextlib.suppress(RuntimeError):
                self._notify(lambda: self._settle(num_records))

    def _write_all(self, frames: list[bytes]) -> None:
        data = b"".join(frames)
        frames.clear()
        while data and self._fd is not None:
            data = data[self._write(self._fd, data) :]

    def _open_segment(self, number: int) -> None:
        self._close_file(unlink=False)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self._number = number
        self._fd = self._open_file(os.fspath(self._path(number)), flags, 0o600)
        try:
            self._write_all([bytes(_PROBE_BYTES)])
            os.ftruncate(self._fd, 0)
            self._write_all([_MAGIC])
        except OSError:
            self._close_file(unlink=True)
            raise

    def _delete_others(self) -> None:
        for number in self._numbers():
            if number != self._number:
                self._path(number).unlink(missing_ok=True)

    def _close_file(self, *, unlink: bool) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)
            if unlink:
                self._path(self._number).unlink(missing_ok=True)

    def _numbers(self) -> list[int]:
        names = [path.name.removesuffix(_SUFFIX) for path in self._directory.glob(f"*{_SUFFIX}")]
        return [int(name) for name in names if name.isdigit()]

    def _path(self, number: int) -> Path:
        return self._directory / f"{number:016d}{_SUFFIX}"


def read_segment(path: Path) -> tuple[list[bytes], bool]:
    """Return the records before the first that is torn, and whether the snapshot is whole.

    Raises:
        OSError: the file cannot be read.
    """
    records: list[bytes] = []
    is_complete = False
    for record in _records(path.read_bytes()):
        if record:
            records.append(record)
        else:
            is_complete = True
    return records, is_complete


def _records(data: bytes) -> Iterator[bytes]:
    if not data.startswith(_MAGIC):
        return
    position = len(_MAGIC)
    while position + _FRAME.size <= len(data):
        length, crc = _FRAME.unpack_from(data, position)
        position += _FRAME.size
        record = data[position : position + length]
        if length > MAX_RECORD_BYTES or len(record) < length or zlib.crc32(record) != crc:
            return
        position += length
        yield record

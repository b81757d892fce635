"""The files of a journal: numbered segments of records, each with its length and CRC-32 in front.

A segment begins with a snapshot of all that its owner wants to keep, and says where that ends. From
then on older segments are not needed, and are deleted. What a crash has torn off ends at the last
record with a good CRC. Everything here blocks; `protocol.journal` has a thread for it.
"""

import errno
import fcntl
import os
import stat
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

MAX_RECORD_BYTES = 2**28
_PROBE_BYTES = 64 * 1024
"""What a new segment must have room for before anything relies on it."""
_SUFFIX = ".journal"
_MAGIC = b"TKJ2\r\n\x1a\n"
_FRAME = struct.Struct("<II")
FRAME_BYTES = _FRAME.size
"""In front of each record."""
_END = _FRAME.pack(0, zlib.crc32(b"the snapshot is whole"))
"""Nothing that a file system makes up by itself: a lost tail may come back as zeros."""
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)

OpenFile = Callable[[str, int, int], int]
"""`os.open`, or a stand-in that fails."""
Write = Callable[[int, memoryview], int]
"""`os.write`, or a stand-in that fails."""
Sync = Callable[[int], None]
"""`os.fsync`, or a stand-in that fails."""


def frame(record: bytes) -> tuple[bytes, bytes]:
    """What stands in front of a record, and the record."""
    return _FRAME.pack(len(record), zlib.crc32(record)), record


class Segments:
    """One directory: locked and read, then written, all by one thread."""

    def __init__(self, directory: Path, open_file: OpenFile, write: Write, sync: Sync | None):
        """Name the directory; `sync`: how what was written gets to the medium, if it must."""
        self._directory = directory
        self._open_file, self._write, self._sync = open_file, write, sync
        self._lock_fd: int | None = None
        self._fd: int | None = None
        self._number = 0
        self._is_complete = False

    # Before anything is written -----------------------------------------------------------------

    def lock(self) -> None:
        """Make the directory this process's; harmless when repeated.

        Raises:
            OSError: it cannot be used; BlockingIOError: another process still has it.
        """
        if self._lock_fd is not None:
            return
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = os.lstat(self._directory)
        if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid():
            raise PermissionError(f"{self._directory} must be a directory of this user")
        fd = os.open(self._directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(fd)
            text = f"{self._directory} is in use by another process"
            raise BlockingIOError(error.errno, text) from error
        except OSError:
            os.close(fd)
            raise
        self._lock_fd = fd

    def unlock(self) -> None:
        """Let go of it; harmless when repeated."""
        fd, self._lock_fd = self._lock_fd, None
        if fd is not None:
            os.close(fd)

    def read(self) -> tuple[list[bytes], int]:
        """Return what was left there, in its order, and a number for the next segment.

        Raises:
            OSError: a file cannot be read.
        """
        numbers = self._numbers()
        parts: list[list[bytes]] = []
        for number in sorted(numbers, reverse=True):
            records, is_complete = read_segment(self._path(number))
            parts.append(records)
            if is_complete:
                break
        records = [record for part in reversed(parts) for record in part]
        return records, max(numbers, default=0) + 1

    # Writing ------------------------------------------------------------------------------------

    def begin(self, number: int) -> None:
        """Go on in a new file.

        Where there is no room for it, older ones are given up: else a disk that only they have
        filled would stay full for ever.

        Raises:
            OSError: it cannot be had.
        """
        unfinished = None if self._is_complete else self._number
        self.sync()  # its last records are settled together with the first of the next
        self.close()
        try:
            self._create(number)
        except OSError as error:
            if error.errno not in _NO_ROOM or not self._delete_below(number):
                raise
            self._create(number)
        self._number, self._is_complete = number, False
        if unfinished:
            self._path(unfinished).unlink(missing_ok=True)

    def append(self, data: bytes) -> None:
        """Write all of it, or nothing where there is no file.

        Raises:
            OSError: some of it could not be written.
        """
        rest = memoryview(data)
        while rest and self._fd is not None:
            num_bytes = self._write(self._fd, rest)
            if num_bytes <= 0:
                raise OSError(errno.EIO, "nothing could be written")
            rest = rest[num_bytes:]

    def complete(self) -> None:
        """The snapshot is whole: older segments go."""
        if self._fd is None:
            return
        self.append(_END)
        self.sync()
        self._is_complete = True
        self._delete_below(self._number)

    def sync(self) -> None:
        """Wait until what was written is on the medium, where that is wanted."""
        if self._sync is not None and self._fd is not None:
            self._sync(self._fd)

    def close(self) -> None:
        """End the file, if there is one."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def _create(self, number: int) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self._fd = self._open_file(os.fspath(self._path(number)), flags, 0o600)
        try:
            self.append(bytes(_PROBE_BYTES))
            os.ftruncate(self._fd, 0)
            self.append(_MAGIC)
            self._sync_directory()
        except OSError:
            self.close()
            self._path(number).unlink(missing_ok=True)
            raise

    def _sync_directory(self) -> None:
        """A file that was synced can be found only if its name is there too."""
        if self._sync is None:
            return
        fd = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._sync(fd)
        finally:
            os.close(fd)

    def _delete_below(self, number: int) -> bool:
        """Whether there was any; those of a successor, which are greater, are not ours."""
        older = [other for other in self._numbers() if other < number]
        for other in older:
            self._path(other).unlink(missing_ok=True)
        return bool(older)

    def _numbers(self) -> list[int]:
        names = [path.name.removesuffix(_SUFFIX) for path in self._directory.glob(f"*{_SUFFIX}")]
        return [int(name) for name in names if name.isascii() and name.isdecimal()]

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
        if record is None:
            is_complete = True
        else:
            records.append(record)
    return records, is_complete


def _records(data: bytes) -> Iterator[bytes | None]:
    """Each record; None where the snapshot ends."""
    if not data.startswith(_MAGIC):
        return
    position = len(_MAGIC)
    while position + _FRAME.size <= len(data):
        length, crc = _FRAME.unpack_from(data, position)
        if length == 0:
            if not data.startswith(_END, position):
                return
            yield None
        record = data[position + _FRAME.size : position + _FRAME.size + length]
        if length > MAX_RECORD_BYTES or len(record) < length:
            return
        position += _FRAME.size + length
        if length:
            if zlib.crc32(record) != crc:
                return
            yield record

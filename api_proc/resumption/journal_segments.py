"""The files of a journal: numbered segments of records, each preceded by its length and CRC-32.

A segment begins with a snapshot of all open requests, followed by a mark. Once the mark is written,
older segments are obsolete and deleted. A segment that a crash has cut short ends at its last
record with a valid CRC. Everything here blocks; `api_proc.resumption.journal` calls it in a thread.
"""

import errno
import fcntl
import os
import stat
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

MAX_RECORD_BYTES = 2**28
_PROBE_BYTES = 64 * 1024
"""A new segment must have room for this before it replaces an older one."""
_SUFFIX = ".journal"
_MAGIC = b"TKJ2\r\n\x1a\n"
_FRAME = struct.Struct("<II")
FRAME_BYTES = _FRAME.size
_END = _FRAME.pack(0, zlib.crc32(b"the snapshot is whole"))
"""The mark after a snapshot. A file system may restore a lost tail as zeros, never as this."""
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


class DiskCalls(NamedTuple):
    """The system calls by which segments reach the disk; tests replace them."""

    open_file: Callable[[str, int, int], int] = os.open
    write: Callable[[int, memoryview], int] = os.write
    sync: Callable[[int], None] = os.fsync


SYSTEM_CALLS = DiskCalls()


def frame(record: bytes) -> tuple[bytes, bytes]:
    """Return the frame's head, and the record."""
    return _FRAME.pack(len(record), zlib.crc32(record)), record


class Segments:
    """One directory, which one thread locks, reads and writes."""

    def __init__(self, directory: Path, disk: DiskCalls, *, is_synced: bool) -> None:
        """With `is_synced`, `sync` waits until the data is on the medium."""
        self._directory = directory
        self._disk = disk
        self._is_synced = is_synced
        self._lock_fd: int | None = None
        self._fd: int | None = None
        self._number = 0
        self._is_complete = False

    # Reading ------------------------------------------------------------------------------------

    def lock(self) -> None:
        """Lock the directory for this process; BlockingIOError: another process has locked it."""
        if self._lock_fd is not None:
            return
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = os.lstat(self._directory)
        if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid():
            raise PermissionError(f"{self._directory} must be a directory of this user")
        fd = os.open(self._directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            if not isinstance(error, BlockingIOError):
                raise
            text = f"{self._directory} is in use by another process"
            raise BlockingIOError(error.errno, text) from error
        self._lock_fd = fd

    def unlock(self) -> None:
        fd, self._lock_fd = self._lock_fd, None
        if fd is not None:
            os.close(fd)

    def read(self) -> tuple[list[bytes], int]:
        """Return all valid records in their order, and a number for the next segment."""
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
        """Continue in a new file.

        If the disk is full, older segments are deleted first: otherwise a disk that only they have
        filled would stay full forever.
        """
        unfinished = None if self._is_complete else self._number
        self.sync()  # its last records are settled together with the first of the new file
        self.close()
        try:
            self._create(number)
        except OSError as error:
            if error.errno not in _NO_SPACE or not self._delete_below(number):
                raise
            self._create(number)
        self._number, self._is_complete = number, False
        if unfinished:
            self._path(unfinished).unlink(missing_ok=True)

    def append(self, data: bytes) -> None:
        """Write all of `data`; without an open file this does nothing."""
        rest = memoryview(data)
        while rest and self._fd is not None:
            num_bytes = self._disk.write(self._fd, rest)
            if num_bytes <= 0:
                raise OSError(errno.EIO, "write() wrote 0 bytes")
            rest = rest[num_bytes:]

    def complete(self) -> None:
        """Mark the snapshot as complete and delete older segments."""
        if self._fd is None:
            return
        self.append(_END)
        self.sync()
        self._is_complete = True
        self._delete_below(self._number)

    def sync(self) -> None:
        """Wait until all written data is on the medium, if syncing is enabled."""
        if self._is_synced and self._fd is not None:
            self._disk.sync(self._fd)

    def close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def _create(self, number: int) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self._fd = self._disk.open_file(os.fspath(self._path(number)), flags, 0o600)
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
        """A synced file can be found after a crash only if its name is synced too."""
        if not self._is_synced:
            return
        fd = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._disk.sync(fd)
        finally:
            os.close(fd)

    def _delete_below(self, number: int) -> bool:
        """Delete older segments, never those of a successor; returns whether any existed."""
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
    """Return the records before the first damaged one, and whether the snapshot is complete."""
    found = list(_records(path.read_bytes()))
    return [record for record in found if record is not None], None in found


def _records(data: bytes) -> Iterator[bytes | None]:
    """Yield each record, and None at the end of the snapshot."""
    if not data.startswith(_MAGIC):
        return
    position = len(_MAGIC)
    while position + FRAME_BYTES <= len(data):
        length, crc = _FRAME.unpack_from(data, position)
        if length == 0:
            if not data.startswith(_END, position):
                return
            yield None
        record = data[position + FRAME_BYTES : position + FRAME_BYTES + length]
        if length > MAX_RECORD_BYTES or len(record) < length:
            return
        position += FRAME_BYTES + length
        if length:
            if zlib.crc32(record) != crc:
                return
            yield record

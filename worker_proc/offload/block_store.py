"""A store of KV blocks: a directory with a file for each block, named by its prefix hash.

Several processes use it at a time, and any of them may be killed at any moment. A file appears
under its name only when it is complete, and has a checksum over its name and its content. A read
therefore returns the requested block, or nothing. The least recently used files are removed when
the store is full. Nothing is synced: files that are incomplete after a machine crash fail their
check.
"""

import contextlib
import fcntl
import heapq
import itertools
import logging
import os
import secrets
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from protocol.stores.index import BlockIndex
from protocol.stores.tiers import block_path
from worker_proc.offload.block_file import HEADER_BYTES, read_file, taken_bytes, write_file
from worker_proc.offload.memory import Parts

_LOCK = "lock"
_DRAFT = "new-"
_STALE_S = 60.0
"""Age of an incomplete file at which its writer must be dead."""
_KEPT_SHARE = 0.9
"""Share of the usable bytes that remains when old blocks are removed."""
_LOCK_TRIES = 20
_START_TRIES = 6000
"""The number of tries at the start, when another process may be entering all blocks in a new
index."""
_LOCK_PAUSE_S = 0.005

log = logging.getLogger("troika.worker")


class _File(NamedTuple):
    used_ns: int
    num_bytes: int
    path: str
    key: bytes


class BlockStore:
    """The blocks of one rank in one tier."""

    def __init__(self, directory: Path, max_bytes: int, block_bytes: int) -> None:
        """Create the directory, or use its existing blocks; raise OSError if that fails.

        `block_bytes` is the size of the smallest blocks.
        """
        self._directory = directory
        self._max_bytes = max_bytes
        self._numbers = itertools.count()
        self._thread_lock = threading.Lock()
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock_fd = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        max_blocks = max_bytes // taken_bytes(block_bytes)
        # Locked, since processes that start together would each create an index.
        with self._locked(_START_TRIES) as has_lock:
            if not has_lock:
                raise TimeoutError(f"the lock of {directory} is held by another process")
            self.index = BlockIndex(directory / "index", max_blocks=max_blocks)
            if self.index.is_new:
                self._enter_all()

    def write(self, key: bytes, block: Parts, *, waits: bool = True) -> bool:
        """Store a block; return whether it is stored now.

        With `waits`, wait up to a tenth of a second for other processes that use the store. Raises
        OSError if the block cannot be written.
        """
        if key in self.index:
            return True
        num_bytes = taken_bytes(sum(map(len, block)))
        num_tries = _LOCK_TRIES if waits else 1
        if num_bytes > self._max_bytes or not self._make_room(num_bytes, num_tries):
            return False
        path = self._path(key)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        # Processes of several machines may share the directory, so pids are not unique.
        draft = path.with_name(f"{_DRAFT}{next(self._numbers)}-{secrets.token_hex(8)}")
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(fd):
                write_file(fd, key, block)
            draft.rename(path)
        except OSError:
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)
            raise
        self.index.add(key)
        return True

    def read(self, key: bytes, block: Parts) -> bool:
        """Fill `block`; return False, with `block` undefined, if it is missing or damaged.

        Raises OSError if it cannot be read.
        """
        path = self._path(key)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            self.index.discard(key)
            return False
        with os.fdopen(fd):
            if read_file(fd, key, block):
                with contextlib.suppress(OSError):
                    os.utime(fd)
                return True
        log.warning("KV block %s is damaged; it is computed again", path)
        self.index.discard(key)
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        return False

    def _path(self, key: bytes) -> Path:
        return block_path(self._directory, key)

    def _make_room(self, num_bytes: int, num_tries: int) -> bool:
        """Count a block that will be written, and remove old ones if there are too many."""
        with self._locked(num_tries) as has_lock:
            if not has_lock:
                return False
            self.index.num_bytes += num_bytes
            if self.index.num_bytes > self._max_bytes:
                self._remove_old(self._max_bytes * _KEPT_SHARE - num_bytes)
                self.index.num_bytes += num_bytes
        return True

    @contextlib.contextmanager
    def _locked(self, num_tries: int) -> Iterator[bool]:
        """Hold the store's lock, if it becomes free within `num_tries` tries with short pauses."""
        for number in range(num_tries):
            if number:
                time.sleep(_LOCK_PAUSE_S)
            if self._try_lock():
                break
        else:
            yield False
            return
        try:
            yield True
        finally:
            fcntl.flock(self._lock_fd, fcntl.LOCK_UN)
            self._thread_lock.release()

    def _try_lock(self) -> bool:
        if not self._thread_lock.acquire(blocking=False):  # the file's lock is per process
            return False
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._thread_lock.release()
            return False
        except BaseException:
            self._thread_lock.release()
            raise
        return True

    def _remove_old(self, max_bytes: float) -> None:
        """Remove the least recently used blocks, and count the others anew."""
        # Each directory is sorted separately: sorting all files would hold the interpreter for
        # long.
        directories = [sorted(self._files_in(path)) for path in self._directories()]
        left = sum(file.num_bytes for files in directories for file in files)
        for file in heapq.merge(*directories):
            if left <= max_bytes:
                break
            self.index.discard(file.key)
            with contextlib.suppress(OSError):
                os.unlink(file.path)
            left -= file.num_bytes
        self.index.num_bytes = left

    def _enter_all(self) -> None:
        """Enter the existing blocks in a new index."""
        num_bytes = 0
        for directory in self._directories():
            for file in self._files_in(directory):
                self.index.add(file.key)
                num_bytes += file.num_bytes
        self.index.num_bytes = num_bytes

    def _directories(self) -> list[str]:
        """Return the directories that contain blocks."""
        return [entry.path for entry in _entries(self._directory) if entry.is_dir()]

    def _files_in(self, directory: str) -> Iterator[_File]:
        """Yield the blocks of a directory; remove the files of dead writers."""
        for entry in _entries(directory):
            try:
                info = entry.stat()
                if entry.name.startswith(_DRAFT):
                    if time.time() - info.st_mtime > _STALE_S:
                        os.unlink(entry.path)
                    continue
                key = bytes.fromhex(entry.name)
            except (OSError, ValueError):  # just removed, or not a block
                continue
            num_bytes = taken_bytes(info.st_size - HEADER_BYTES)
            yield _File(info.st_mtime_ns, num_bytes, entry.path, key)


def _entries(directory: str | Path) -> list["os.DirEntry[str]"]:
    try:
        with os.scandir(directory) as entries:
            return list(entries)
    except FileNotFoundError:
        return []

"""A table of the KV blocks that a store probably holds, in a file that all processes map.

The core asks it before it lets a worker read a block, so that no message is needed to learn that
there is none. A table is a hint: a block that it names may be gone, and one that it has lost may be
there. Whether a block is right is decided where it is read (`worker_proc/offload/block_store.py`).

Writes are single words without a lock. If two processes write to one place, one entry is lost.
"""

import contextlib
import mmap
import os
import secrets
import sys
from pathlib import Path

_MAGIC = 0x78646E49766B0001
_WORD_BYTES = 8
_HEADER_WORDS = 8
_MAGIC_AT, _BYTES_AT = 0, 1
_WAYS = 4
"""Places where one block may be entered."""
_MIN_SLOTS, _MAX_SLOTS = 2**10, 2**22
_ODD = 0x9E3779B97F4A7C15
_WORD_MASK = 2**64 - 1
NUM_SLOTS_PER_BLOCK = 4
"""Slots of a table for each block that the store may have: the table is mostly empty, so that few
entries collide."""


class BlockIndex:
    """A view of the table of one store."""

    def __init__(self, path: Path, *, max_blocks: int | None = None) -> None:
        """Map the file. With `max_blocks` it is made if it is not there, or has another size.

        Processes that may make it must do so one after the other, under a lock. OSError: there is
        no file, or no room for it. ValueError: it is not a table.
        """
        self.is_new = max_blocks is not None and _make(path, max_blocks)
        """Whether the file was made here, and names nothing."""
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        with os.fdopen(fd):
            found = os.fstat(fd).st_size
            if found < _num_bytes(_MIN_SLOTS):
                raise ValueError(f"{path} is not a block index: it has {found} bytes")
            self._words = memoryview(mmap.mmap(fd, found)).cast("Q")
        if self._words[_MAGIC_AT] != _MAGIC:
            raise ValueError(f"{path} is not a block index, or is one of another version")
        self._num_buckets = (len(self._words) - _HEADER_WORDS) // _WAYS

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks in the store; to be changed under the store's lock."""
        return self._words[_BYTES_AT]

    @num_bytes.setter
    def num_bytes(self, value: int) -> None:
        self._words[_BYTES_AT] = max(value, 0)

    def __contains__(self, key: bytes) -> bool:
        mark, first = self._place(key)
        return mark in self._words[first : first + _WAYS].tolist()

    def add(self, key: bytes) -> None:
        """Enter a block; if all of its places are taken, another one loses its entry."""
        mark, first = self._place(key)
        entries = self._words[first : first + _WAYS].tolist()
        if mark not in entries:
            way = entries.index(0) if 0 in entries else (mark >> 32) % _WAYS
            self._words[first + way] = mark

    def discard(self, key: bytes) -> None:
        mark, first = self._place(key)
        for place in range(first, first + _WAYS):
            if self._words[place] == mark:
                self._words[place] = 0

    def clear(self) -> None:
        """Forget all entries; the blocks stay where they are."""
        empty = memoryview(bytes(_WORD_BYTES * _WAYS * self._num_buckets)).cast("Q")
        self._words[_HEADER_WORDS : _HEADER_WORDS + len(empty)] = empty

    def _place(self, key: bytes) -> tuple[int, int]:
        """Return the mark of a block, and the number of the first word of its places."""
        number = int.from_bytes(key[:_WORD_BYTES], "little")
        if len(key) > _HASH_BYTES:  # of another KV group than the first
            number = (number + _ODD * int.from_bytes(key[_HASH_BYTES:], "little")) & _WORD_MASK
        bucket = (number >> 20) % self._num_buckets
        return number | 1, _HEADER_WORDS + _WAYS * bucket


_HASH_BYTES = 32


def _make(path: Path, max_blocks: int) -> bool:
    """Make a table for a number of blocks, unless there is one of that size.

    It replaces another one, which stays as it is for the processes that have mapped it.
    """
    num_slots = min(max(NUM_SLOTS_PER_BLOCK * max_blocks, _MIN_SLOTS), _MAX_SLOTS)
    with contextlib.suppress(FileNotFoundError):
        if path.stat().st_size == _num_bytes(num_slots):
            return False
    draft = path.with_name(f"{path.name}-{secrets.token_hex(8)}")
    fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd):
            os.posix_fallocate(fd, 0, _num_bytes(num_slots))
            os.pwrite(fd, _MAGIC.to_bytes(_WORD_BYTES, sys.byteorder), _MAGIC_AT * _WORD_BYTES)
        draft.rename(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
    return True


def _num_bytes(num_slots: int) -> int:
    return _WORD_BYTES * (_HEADER_WORDS + num_slots)

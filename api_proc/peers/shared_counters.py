"""Counters of all API processes in one file that they map, so that no death loses a count.

The file has two pages for each index: a predecessor that finishes its requests, and its successor,
count at the same time. A process locks the page that it writes; its successors add to the same
pages. So the sums over all pages never fall, which a monitoring system would take for a restart.
"""

import fcntl
import mmap
import os
from collections.abc import Callable, MutableSequence
from typing import cast

FILE_NAME = "api-counters"
_PAGE_BYTES = 4096
_NUMBER_BYTES = 8

Numbers = MutableSequence[float]
Take = Callable[[int], Numbers]
"""Returns the next numbers of a block, zero at first."""


def private(count: int) -> Numbers:
    """Return numbers of this process only."""
    return [0.0] * count


class SharedCounters:
    """The mapped file, as process `index` of `count` uses it."""

    def __init__(self, run_dir: str, index: int, count: int) -> None:
        """Map the file and lock a page of this index; OSError: there is no room, or another reason.

        The descriptor stays open: closing it would release the lock.
        """
        size = 2 * count * _PAGE_BYTES
        fd = os.open(f"{run_dir}/{FILE_NAME}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        # Else a write to a full file system would end the process.
        os.posix_fallocate(fd, 0, size)
        self._own = next((page for page in (index, count + index) if _lock(fd, page)), None)
        self._num_pages = 2 * count
        self._memory = memoryview(mmap.mmap(fd, size)).cast("d")

    def own(self) -> Take:
        """Return the numbers of this process; private ones if both of its pages are locked."""
        return private if self._own is None else self._taker(self._own)

    def others(self) -> list[Take]:
        return [self._taker(page) for page in range(self._num_pages) if page != self._own]

    def _taker(self, page: int) -> Take:
        page_numbers = _PAGE_BYTES // _NUMBER_BYTES
        position = page * page_numbers
        end = position + page_numbers

        def take(count: int) -> Numbers:
            nonlocal position
            first, position = position, position + count
            assert position <= end, "a page is too small for the counters"
            return cast(Numbers, self._memory[first:position])

        return take


def _lock(fd: int, page: int) -> bool:
    """Lock a page until the end of this process; False: another one has locked it."""
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, _PAGE_BYTES, page * _PAGE_BYTES)
    except OSError:
        return False
    return True

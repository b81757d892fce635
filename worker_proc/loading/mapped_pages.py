"""Releases pages of mapped weight files that a load has read and nothing will read again.

They count as the process's memory as long as they are mapped, although the system can reclaim them.
A page that is read again after all comes from the page cache.
"""

import ctypes
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from protocol.process.model_files import weight_files

_HEADER = re.compile(r"([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ \d+\s*(.*)")
_CHANGED = "Anonymous:"
"""Prefix of the line with the kilobytes written to a private mapping."""
_DONTNEED = 4
_PATTERNS = ("*.safetensors", "*.gguf")
_MIN_BYTES = 8 << 20
"""The pages of smaller files are not worth the time to list all mappings."""


def release_mapped_pages(directory: str) -> None:
    """Release the pages of a large checkpoint's files; the mappings stay valid."""
    found = [file for pattern in _PATTERNS for file in Path(directory).glob(pattern)]
    files = set(map(os.path.realpath, [*found, *weight_files(Path(directory))]))
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    try:
        if madvise is None or sum(map(os.path.getsize, files)) < _MIN_BYTES:
            return
        mappings = list(_unchanged_mappings(files))
    except OSError:
        return
    for start, end in mappings:
        madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), ctypes.c_int(_DONTNEED))


def _unchanged_mappings(files: Iterable[str]) -> Iterator[tuple[int, int]]:
    """Yield the mappings of files to which nothing was written, since writes would be lost."""
    place: tuple[int, int] | None = None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if (header := _HEADER.fullmatch(line)) is not None:
            is_wanted = header[3] in files
            place = (int(header[1], 16), int(header[2], 16)) if is_wanted else None
        elif place is not None and line.startswith(_CHANGED):
            if line.split()[1] == "0":
                yield place
            place = None

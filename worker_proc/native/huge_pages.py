"""Memory in huge pages, where the system has them: the KV pool, packed weights, the rows of a step.

A product reads its weight as one stream, and a processor prefetches within a page only. Most
weights are smaller than a huge page, so tensors lie one after the other in larger mappings.
"""

import ctypes
import mmap
import threading
import weakref
from dataclasses import dataclass

import torch

from worker_proc.native.packed_weights import round_up

CHUNK_BYTES = 64 << 20
"""Size of a mapping; a larger tensor gets a separate one. Pages that are not written take no
memory."""
_ALIGNMENT = 128
_HUGE_PAGE_BYTES = 2 << 20


def map_memory(num_bytes: int) -> mmap.mmap:
    """Map zeroed memory of this process, whose pages are allocated when they are written."""
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


@dataclass
class _Span:
    end: int
    is_used: bool = True


class _Chunk:
    """A mapping that holds tensors, one after the other from its start."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._pages = map_memory(num_bytes)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._pages))
        self._written_end = 0
        """The offset after which no page takes memory."""
        self._spans: list[_Span] = []

    def take(self, num_bytes: int) -> "ctypes.Array[ctypes.c_char] | None":
        """Return bytes after those in use, which are free when it is deleted; None: no room."""
        start = round_up(self._end, _ALIGNMENT)
        if start + num_bytes > self._num_bytes:
            return None
        span = _Span(start + num_bytes)
        self._spans.append(span)
        self._written_end = max(self._written_end, span.end)
        taken = (ctypes.c_char * num_bytes).from_buffer(self._pages, start)
        weakref.finalize(taken, self._free, span).atexit = False
        return taken

    @property
    def _end(self) -> int:
        return self._spans[-1].end if self._spans else 0

    def _free(self, span: _Span) -> None:
        with _lock:
            span.is_used = False
            while self._spans and not self._spans[-1].is_used:
                self._spans.pop()
            self._return_pages()

    def _return_pages(self) -> None:
        """Return the huge pages after those in use to the system: a part of one would split it."""
        first = round_up(self._address + self._end, _HUGE_PAGE_BYTES) - self._address
        if first < self._written_end:
            self._pages.madvise(mmap.MADV_DONTNEED, first, self._written_end - first)
            self._written_end = first


_lock = threading.RLock()
"""It can be taken again, since a tensor may be deleted within any call of the same thread."""
_chunks: list["weakref.ref[_Chunk]"] = []
"""The mappings for several tensors; each lasts as long as any tensor in it."""


def empty(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor, `[count]`, whose content is undefined."""
    num_bytes = count * dtype.itemsize
    if not num_bytes:
        return torch.empty(0, dtype=dtype)
    if num_bytes > CHUNK_BYTES:
        taken = _Chunk(num_bytes).take(num_bytes)
    else:
        with _lock:
            for chunk in _live_chunks():
                taken = chunk.take(num_bytes)
                if taken is not None:
                    break
            else:
                chunk = _Chunk(CHUNK_BYTES)
                taken = chunk.take(num_bytes)
                _chunks.append(weakref.ref(chunk))
    assert taken is not None
    return torch.frombuffer(taken, dtype=dtype, count=count)


def _live_chunks() -> list[_Chunk]:
    found = [chunk for chunk in (one() for one in _chunks) if chunk is not None]
    _chunks[:] = map(weakref.ref, found)
    return found


def copy_of(values: torch.Tensor) -> torch.Tensor:
    """Return a flat copy of the values, in their order."""
    memory = empty(values.numel(), values.dtype)
    memory.view(values.shape).copy_(values)
    return memory

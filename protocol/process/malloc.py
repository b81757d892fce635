"""Settings of the C library's allocator for processes that hold large texts for a short time."""

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h has these numbers
_LARGE_BYTES = 256 * 1024


def return_memory_early() -> None:
    """Let the C library return the memory of a large text to the system as soon as it is free."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # glibc
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        mallopt(_M_TRIM_THRESHOLD, 4 * _LARGE_BYTES)

"""Returns the allocator's free memory to the system, since a load frees much of it at once."""

import ctypes


def return_freed_memory() -> None:
    """Return freed memory to the system, if the C library supports it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))

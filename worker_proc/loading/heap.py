"""The allocator's heap: freed memory stays in it for later, although a load frees most at once."""

import ctypes


def return_freed_memory() -> None:
    """Return freed memory to the system, where the C library has a call for it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))

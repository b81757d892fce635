"""Returns memory that loading has freed to the system.

The allocator keeps freed memory for later, and most of what a load needs is never needed again.
"""

import ctypes


def return_freed_memory() -> None:
    """Do so where the C library can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))

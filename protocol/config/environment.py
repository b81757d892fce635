"""Removes secrets from the environment of this process."""

import ctypes
import os


def erase_variable(name: str) -> None:
    """Unset a variable, and overwrite the memory that /proc/PID/environ shows."""
    if name not in os.environ:
        return
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_void_p
    address = libc.getenv(os.fsencode(name))
    if address is not None:
        ctypes.memset(address, 0, len(os.fsencode(os.environ[name])))
    del os.environ[name]

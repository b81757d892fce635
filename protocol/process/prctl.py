"""The prctl calls of Linux that Python's `os` lacks."""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36


def set_subreaper(is_one: bool) -> None:
    """Choose whether orphaned descendants become children of this process, which must reap them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, int(is_one))


def die_with_parent() -> None:
    """Get SIGKILL when the thread that started this process ends; forks do not inherit it."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def set_name(name: str) -> None:
    """Set the name that `ps -o comm` and `top` show: the first 15 bytes."""
    buffer = ctypes.create_string_buffer(name.encode()[:15])
    _prctl(_PR_SET_NAME, ctypes.addressof(buffer))


def _prctl(option: int, argument: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(argument), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))

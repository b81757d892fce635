"""Locks on the directories that stand for GGUF files: an engine's successors read them again."""

import contextlib
import fcntl
import os
from collections.abc import Iterable, Iterator
from pathlib import Path


def hold_directories(directories: Iterable[Path]) -> list[int]:
    """Return file descriptors which, while they are open, keep directories from being removed."""
    held = []
    for directory in directories:
        with contextlib.suppress(OSError):  # the file system may lack locks, or the directory
            fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
            held.append(fd)
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return held


def has_locks(directory: Path) -> bool:
    """Return whether directories of a file system can be locked."""
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return True  # it is not known, and nothing is kept there
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


@contextlib.contextmanager
def alone(key: Path) -> Iterator[bool]:
    """Yield whether no engine holds a directory below a key's; none does until the exit."""
    fds: list[int] = []
    try:
        for inner in key.iterdir():
            fds.append(os.open(inner, os.O_RDONLY))
            try:
                fcntl.flock(fds[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
        yield True
    finally:
        for fd in fds:
            os.close(fd)

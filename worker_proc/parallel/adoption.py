"""The state that ranks share from the time a core adopts them: an epoch, and files.

One rank makes a file of shared memory. The file is removed from its directory once all ranks have
mapped it. Its name contains the epoch of the link, so ranks of different adoptions never map the
same file, and the memory of each adoption begins with zeros.

A core may die between sending a step to one rank and to the next. Each rank therefore writes two
numbers to a further file, in the run directory: the epoch of its last adoption, and the last
adoption that it has left. A waiting rank abandons its step if another rank has left the adoption,
or belongs to a later one. It also reports that it waits, so that the supervisor ends only the rank
that computes for too long.
"""

import contextlib
import logging
import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path

from protocol.process.run_dir import ADOPTIONS_FILE, exchange_prefix
from worker_proc.runner import StepAbandoned

TIMEOUT_S = 60.0
"""The limit for one wait. A wait for a dead rank ends earlier: the supervisor kills the group."""
SHARED_MEMORY = Path("/dev/shm")
SLICE_NS = 50_000_000
"""The longest part of a wait in which no signal is handled and no epoch is read."""
_LOOK_S = 0.001
"""The time between two attempts to open the file of another rank."""
_ADOPTION_WORDS = 3
_WORD_BYTES = 8

log = logging.getLogger("troika.worker")


class RankMissing(RuntimeError):
    """Another rank has not taken part in an exchange in time."""


class Adoption:
    """One rank's view of the group's adoption."""

    def __init__(
        self, rank: int, num_ranks: int, run_dir: str, *, timeout_s: float = TIMEOUT_S
    ) -> None:
        """Prepare an adoption; `rank` is this rank's number in the whole group.

        Files are made in shared memory, or in the run directory if that fails. Their names contain
        the pid of the supervisor, which is the parent of all ranks, and the inode of the run
        directory.
        """
        self.report_wait: Callable[[], None] = _nothing
        """Called several times a second while this rank waits for another one."""
        self.rank = rank
        self.num_ranks = num_ranks
        self.epoch: int | None = None
        self.timeout_s = timeout_s
        self._directories = [SHARED_MEMORY, Path(run_dir)]
        self._prefix = exchange_prefix(run_dir)
        self._adoptions = _Adoptions(Path(run_dir), num_ranks)

    def begin(self, epoch: int) -> None:
        """Record that a core has adopted the group under an epoch."""
        self.epoch = epoch
        self._adoptions.enter(self.rank, epoch)

    def leave(self) -> None:
        """Record that this rank takes no part in further steps of the adoption."""
        if self.epoch is not None:
            self._adoptions.leave(self.rank, self.epoch)

    @property
    def deadline(self) -> float:
        """The deadline of a wait that begins now, in seconds of `time.monotonic`."""
        return time.monotonic() + self.timeout_s

    def check(self, deadline: float, problem: str) -> None:
        """Report a wait, and raise an error if the wait is over.

        Raises RankMissing with `problem` after the deadline, and StepAbandoned if another rank has
        left the adoption.
        """
        self.report_wait()
        assert self.epoch is not None
        if self._adoptions.has_ended(self.epoch):
            raise StepAbandoned("another rank has left the adoption")
        if time.monotonic() > deadline:
            raise RankMissing(f"{problem} in {self.timeout_s} s")

    def map_file(self, label: str, num_bytes: int, *, makes: bool, deadline: float) -> mmap.mmap:
        """Map a file of this adoption, which one rank makes while the others wait for it.

        Raises ValueError if the file does not have `num_bytes` bytes.
        """
        name = self._name(label)
        fd = self._make(name, label, num_bytes) if makes else self._open(name, deadline)
        with os.fdopen(fd):
            found = os.fstat(fd).st_size
            if found != num_bytes:
                raise ValueError(f"{name} has {found} bytes; rank {self.rank} needs {num_bytes}")
            return mmap.mmap(fd, num_bytes)

    def path(self, label: str) -> Path:
        """Return the path in the run directory of a file of this adoption."""
        return self._directories[-1] / self._name(label)

    def remove_older(self, label: str) -> None:
        """Remove files of adoptions that ended before all ranks had joined."""
        for directory in self._directories:
            for old in directory.glob(f"*{self._prefix}{label}*"):
                old.unlink(missing_ok=True)

    def remove_file(self, label: str) -> None:
        """Remove a file of this adoption from its directory; it stays mapped."""
        for directory in self._directories:
            (directory / self._name(label)).unlink(missing_ok=True)

    def _name(self, label: str) -> str:
        if self.epoch is None:
            raise RuntimeError("ranks exchange rows after an adoption only")
        return f"{self._prefix}{label}{os.getppid()}-{self.epoch}"

    def _make(self, name: str, label: str, num_bytes: int) -> int:
        """Make the file in the first directory that has room for it, and return its descriptor."""
        self.remove_older(label)
        for directory in self._directories[:-1]:
            try:
                return _make_file(directory / name, num_bytes)
            except OSError as error:
                log.warning("the ranks do not use %s: %s", directory, error)
        return _make_file(self._directories[-1] / name, num_bytes)

    def _open(self, name: str, deadline: float) -> int:
        while True:
            for directory in self._directories:
                with contextlib.suppress(FileNotFoundError):
                    return os.open(directory / name, os.O_RDWR | os.O_CLOEXEC)
            self.check(deadline, f"rank 0 has not made {name}")
            time.sleep(_LOOK_S)


def _nothing() -> None:
    pass


def _make_file(path: Path, num_bytes: int) -> int:
    """Make a file of zeros, which appears once it has its size; return its descriptor."""
    hidden = path.with_name(f"new-{path.name}")
    fd = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        # Without this, writing to a page on a full file system would end the process (SIGBUS).
        os.posix_fallocate(fd, 0, num_bytes)
        hidden.rename(path)
    except OSError:
        os.close(fd)
        hidden.unlink(missing_ok=True)
        raise
    return fd


class _Adoptions:
    """Three words for each rank in a mapped file: its pid, its last adoption, the last it has left.

    The ranks of a new group write to the same file as those of the previous group, which are dead
    by then.
    """

    def __init__(self, run_dir: Path, num_ranks: int) -> None:
        path = run_dir / f"{ADOPTIONS_FILE}{os.getppid()}"
        for old in run_dir.glob(f"{ADOPTIONS_FILE}*"):  # of supervisors that have ended
            if old != path:
                old.unlink(missing_ok=True)
        num_bytes = num_ranks * _ADOPTION_WORDS * _WORD_BYTES
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd):
            os.posix_fallocate(fd, 0, num_bytes)
            self._words = memoryview(mmap.mmap(fd, num_bytes)).cast("q")

    def enter(self, rank: int, epoch: int) -> None:
        first = rank * _ADOPTION_WORDS
        self._words[first + 2] = 0  # the previous process of this rank may have left a later one
        self._words[first], self._words[first + 1] = os.getpid(), epoch

    def leave(self, rank: int, epoch: int) -> None:
        self._words[rank * _ADOPTION_WORDS + 2] = epoch + 1

    def has_ended(self, epoch: int) -> bool:
        """Return whether a living rank has left an adoption or has a greater epoch."""
        words = self._words.tolist()
        columns = (words[column::_ADOPTION_WORDS] for column in range(_ADOPTION_WORDS))
        return any(
            max(adopted, left) > epoch and _is_alive(pid)
            for pid, adopted, left in zip(*columns, strict=True)
        )


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # the pid now belongs to a process of another user
        return False
    return True

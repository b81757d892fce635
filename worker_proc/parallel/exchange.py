"""The sums that the ranks of a model exchange in every layer, through memory that they share.

The memory is a file that rank 0 makes when a core has adopted the group, and that is gone from its
directory once all ranks have it. Its name contains the epoch of the link, so ranks of different
adoptions never meet, and each adoption begins with counters at zero.

A core may die between sending a step to one rank and to the next. So each rank writes the epoch of
its last adoption to a second file, in the run directory, and a rank that waits for one with a
greater epoch abandons its step. A rank that waits for another one does not hang: it reports this,
so that only the one that computes too long is ended.
"""

import contextlib
import ctypes
import logging
import mmap
import os
import time
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from worker_proc.native.exchange import ALL_PUBLISHED, NativeExchange, exchange_bytes
from worker_proc.native.kernels import NativeLibrary
from worker_proc.runner import StepAbandoned

SLOT_BYTES = 1 << 20
"""Of the rows that are exchanged at once; more are divided."""
TIMEOUT_S = 60.0
"""Of one wait. If a rank dies, it ends earlier: the supervisor kills the others of its group."""
SHARED_MEMORY = Path("/dev/shm")
_LOOK_S = 0.001  # between looks for the file of rank 0
_SLICE_NS = 50_000_000  # of a wait, in which no signal is handled and no epoch is read
_ADOPTIONS = "ranks-"
_ADOPTION_WORDS = 2
_WORD_BYTES = 8

log = logging.getLogger("troika.worker")


class RankMissing(RuntimeError):
    """Another rank has not taken its part in an exchange."""


class RanksDiffer(RuntimeError):
    """The ranks have computed different things, so all later sums would be wrong."""


class RankExchange:
    """One rank's side; every rank makes the same calls in the same order."""

    def __init__(
        self,
        library: NativeLibrary,
        rank: int,
        num_ranks: int,
        run_dir: str,
        *,
        slot_bytes: int = SLOT_BYTES,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """Take the rank's number; the file is made in shared memory, or else in the run directory.

        The ranks are children of one supervisor: the file's name contains its pid, and the inode
        of the run directory.
        """
        self.report_wait: Callable[[], None] = _nothing
        """Called several times a second while this rank waits for another one."""
        self.rank = rank
        self.num_ranks = num_ranks
        self._library = library
        self._slot_bytes = slot_bytes
        self._timeout_s = timeout_s
        self._directories = [SHARED_MEMORY, Path(run_dir)]
        place = os.stat(run_dir)
        self._prefix = f"troika-{place.st_dev:x}-{place.st_ino:x}-"
        self._adoptions = _Adoptions(Path(run_dir), num_ranks)
        self._epoch: int | None = None
        self._memory: mmap.mmap | None = None
        self._native: NativeExchange | None = None
        self._sequence = 0

    def begin(self, epoch: int) -> None:
        """Leave the exchange of the last adoption; the first call after this joins the next one."""
        self._native, self._memory = None, None
        self._epoch = epoch
        self._adoptions.enter(self.rank, epoch)

    def add(self, rows: torch.Tensor) -> None:
        """Replace rows, `[T, width]`, by the sums of all ranks' rows, in float32.

        All ranks get the same bits. RankMissing: another rank is not there. StepAbandoned: it was
        adopted again.
        """
        native = self._joined()
        for part in self._parts(rows):
            self._exchange(native, part)
            native.add(part, self._sequence)

    def gather(self, columns: torch.Tensor) -> torch.Tensor:
        """Return the columns of all ranks, `[T, num_ranks * width]`, in the order of the ranks."""
        native = self._joined()
        shape = len(columns), self.num_ranks * columns.shape[1]
        out = torch.empty(shape, dtype=columns.dtype)
        first = 0
        for part in self._parts(columns):
            self._exchange(native, part)
            native.gather(part, self._sequence, out[first:])
            first += len(part)
        return out

    def agree(self, token_ids: Sequence[int]) -> None:
        """Raise RanksDiffer if another rank has sampled other tokens in this step."""
        checksum = zlib.crc32(array("q", token_ids).tobytes())
        found = self.gather(torch.tensor([[checksum]]))[0].tolist()
        if len(set(found)) > 1:
            raise RanksDiffer(f"the ranks have sampled different tokens (checksums {found})")

    def _parts(self, rows: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield consecutive rows that fit into a slot."""
        row_bytes = rows.shape[1] * rows.element_size()
        if row_bytes > self._slot_bytes:
            raise ValueError(f"a row of {row_bytes} bytes exceeds a slot of {self._slot_bytes}")
        yield from rows.split(self._slot_bytes // row_bytes)

    def _exchange(self, native: NativeExchange, rows: torch.Tensor) -> None:
        self._sequence += 1
        native.publish(rows, self._sequence)
        self._await_all(native, time.monotonic() + self._timeout_s)

    def _await_all(self, native: NativeExchange, deadline: float) -> None:
        while (found := native.wait(self._sequence, _SLICE_NS)) != ALL_PUBLISHED:
            self.report_wait()
            self._check(deadline, f"rank {found} has not computed its part")

    def _check(self, deadline: float, problem: str) -> None:
        """Raise an error if there is nothing to wait for any more."""
        assert self._epoch is not None
        if self._adoptions.has_later(self._epoch):
            raise StepAbandoned("another rank was adopted again")
        if time.monotonic() > deadline:
            raise RankMissing(f"{problem} in {self._timeout_s} s")

    def _joined(self) -> NativeExchange:
        if self._native is None:
            self._native = self._join()
        return self._native

    def _join(self) -> NativeExchange:
        """Map the file of this adoption, and wait until all ranks have it."""
        if self._epoch is None:
            raise RuntimeError("ranks exchange rows after an adoption only")
        name = f"{self._prefix}{os.getppid()}-{self._epoch}"
        deadline = time.monotonic() + self._timeout_s
        num_bytes = exchange_bytes(self.num_ranks, self._slot_bytes)
        try:
            fd = self._make(name, num_bytes) if self.rank == 0 else self._open(name, deadline)
            with os.fdopen(fd):
                self._memory = mmap.mmap(fd, num_bytes)
            address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
            native = self._library.exchange(address, self.rank, self.num_ranks, self._slot_bytes)
            self._sequence = 1
            native.publish(torch.empty(0, 1), self._sequence)
            self._await_all(native, deadline)
        finally:
            if self.rank == 0:
                for directory in self._directories:
                    (directory / name).unlink(missing_ok=True)
        return native

    def _make(self, name: str, num_bytes: int) -> int:
        """Make the file, in the first directory that has room for it.

        Files of adoptions that ended before all ranks had joined are removed.
        """
        for directory in self._directories:
            for old in directory.glob(f"*{self._prefix}*"):
                old.unlink(missing_ok=True)
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
            self.report_wait()
            self._check(deadline, f"rank 0 has not made {name}")
            time.sleep(_LOOK_S)


def _nothing() -> None:
    pass


def _make_file(path: Path, num_bytes: int) -> int:
    """Make a file of zeros, which appears when it has its size; returns its descriptor."""
    hidden = path.with_name(f"new-{path.name}")
    fd = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        # Else a write to a full file system would end the process.
        os.posix_fallocate(fd, 0, num_bytes)
        hidden.rename(path)
    except OSError:
        os.close(fd)
        hidden.unlink(missing_ok=True)
        raise
    return fd


class _Adoptions:
    """The epoch of each rank's last adoption, in a file that they map, and the rank's process.

    The ranks of a new group write to the same file as those before it, which are dead by then.
    """

    def __init__(self, run_dir: Path, num_ranks: int) -> None:
        path = run_dir / f"{_ADOPTIONS}{os.getppid()}"
        for old in run_dir.glob(f"{_ADOPTIONS}*"):  # of supervisors that have ended
            if old != path:
                old.unlink(missing_ok=True)
        num_bytes = num_ranks * _ADOPTION_WORDS * _WORD_BYTES
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd):
            os.posix_fallocate(fd, 0, num_bytes)
            self._words = memoryview(mmap.mmap(fd, num_bytes)).cast("q")

    def enter(self, rank: int, epoch: int) -> None:
        first = rank * _ADOPTION_WORDS
        self._words[first], self._words[first + 1] = os.getpid(), epoch

    def has_later(self, epoch: int) -> bool:
        """Whether a living rank was adopted under a greater epoch."""
        words = self._words.tolist()
        pairs = zip(words[::_ADOPTION_WORDS], words[1::_ADOPTION_WORDS], strict=True)
        return any(adopted > epoch and _is_alive(pid) for pid, adopted in pairs)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # of another user: the pid was used again
        return False
    return True

"""The journal's disk: real files with slow, short and failing writes."""

import errno
import os
import shutil
import tempfile
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

from api_proc.resumption.journal import Journal, JournalOwner, Threads
from api_proc.resumption.journal_segments import DiskCalls
from tests.simulation.world import SECOND, KilledHere, Process, World

DISK_FAULTS = ("full", "broken", "unsynced", "short", "torn")
"""ENOSPC, EIO, a failing fsync, a partial write, a death in the middle of a write."""
_HARD = ("full", "broken", "unsynced")
_IN_MEMORY = Path("/dev/shm")
_LATENCY_S = (0.0001, 0.004)
_STALL_S = (0.2, 1.0)
_STOPPED_S = 0.01


class Disk:
    """A directory in memory for one run."""

    def __init__(self, world: World, rates: dict[str, float], stall_rate: float) -> None:
        """Take the probabilities of `DISK_FAULTS` and of a slow write."""
        self.world = world
        self._rates = dict(rates)
        self._stall_rate = stall_rate
        self.has_failed = False
        """A write has failed: the journal may have lost records."""
        parent = _IN_MEMORY if os.access(_IN_MEMORY, os.W_OK) else None
        self.directory = tempfile.mkdtemp(prefix="troika-simulation-", dir=parent)

    def close(self) -> None:
        """Remove the directory."""
        shutil.rmtree(self.directory, ignore_errors=True)

    def heal(self) -> None:
        """End all faults."""
        self._rates.clear()
        self._stall_rate = 0.0

    def latency(self) -> int:
        """Draw the time until the writer thread runs."""
        is_long = self._stall_rate and self.world.random() < self._stall_rate
        return self.world.between(*(_STALL_S if is_long else _LATENCY_S))

    def journal(self, directory: str, owner: JournalOwner, *, is_synced: bool) -> Journal:
        """Create a journal on this disk, whatever directory the configuration names."""
        threads = types.SimpleNamespace(Thread=partial(Thread, self), Condition=Condition)
        return Journal(
            self.directory,
            owner,
            is_synced=is_synced,
            disk=DiskCalls(self.open_file, self.write, self.sync),
            clock=self.world.clock,
            threads=cast(Threads, threads),
        )

    # In place of the functions of `os` ------------------------------------------------------------

    def open_file(self, path: str, flags: int, mode: int) -> int:
        self._fail("full", errno.ENOSPC)
        return os.open(path, flags, mode)

    def write(self, fd: int, data: memoryview) -> int:
        self._fail("full", errno.ENOSPC)
        self._fail("broken", errno.EIO)
        is_torn = self._draws("torn")
        if not is_torn and not self._draws("short"):
            return os.write(fd, data)
        num_bytes = os.write(fd, data[: self.world.rng.randrange(1, len(data) + 1)])
        if is_torn:
            raise KilledHere
        return num_bytes

    def sync(self, fd: int) -> None:
        self._fail("unsynced", errno.EIO)

    def _draws(self, kind: str) -> bool:
        rate = self._rates.get(kind)
        if not rate or self.world.random() >= rate:
            return False
        self.world.counts[f"disk {kind}"] += 1
        self.has_failed |= kind in _HARD
        return True

    def _fail(self, kind: str, number: int) -> None:
        if self._draws(kind):
            raise OSError(number, os.strerror(number))


class _NothingToDo(Exception):
    """The thread has no work and waits."""


class Condition:
    """A `threading.Condition` between an event loop and one thread."""

    def __init__(self) -> None:
        self.thread: Thread | None = None

    def __enter__(self) -> "Condition":
        return self

    def __exit__(self, *_: object) -> None:
        return

    def notify(self) -> None:
        """Wake the thread."""
        if self.thread is not None:
            self.thread.wake()

    def wait(self) -> None:
        """Called by the thread: its target starts again when it is woken."""
        raise _NothingToDo


class Thread:
    """A `threading.Thread` whose target runs as events of the world, after the disk's latency."""

    def __init__(self, disk: Disk, *, target: Callable[[], None], **_: object) -> None:
        """Belong to the process whose code runs."""
        process = disk.world.current
        assert process is not None
        self._process: Process = process
        self._disk = disk
        self._target = target
        self._is_waking = False
        self.has_ended = False
        journal: Any = target.__self__  # type: ignore[attr-defined]
        journal._wakes.thread = self

    def start(self) -> None:
        """Run soon."""
        self.wake()

    def join(self, timeout: float | None = None) -> None:
        """Do not wait: nothing here blocks."""

    def wake(self) -> None:
        """Run the target soon."""
        if not self._is_waking:
            self._is_waking = True
            self._disk.world.after(self._disk.latency(), self._run)

    def _run(self) -> None:
        world, process = self._disk.world, self._process
        if process.is_stopped and process.is_alive:
            world.after(int(_STOPPED_S * SECOND), self._run)
            return
        self._is_waking = False
        if not process.is_alive:
            return
        try:
            self._target()
        except _NothingToDo:
            return
        except KilledHere:
            process.is_stopped = True
            world.at(world.now, process.die)
        self.has_ended = True
        process.wake()

"""The disk under the journal: real files, whose writes take time, come up short, or fail."""

import errno
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scripts.simulation.world import SECOND, KilledHere, Process, World

DISK_FAULTS = ("full", "broken", "unsynced", "short", "torn")
"""ENOSPC, EIO, an error of fsync, a part of a write, a death in the middle of one."""
_HARD = ("full", "broken", "unsynced")
_IN_MEMORY = Path("/dev/shm")
_LATENCY_S = (0.0001, 0.004)
_STALL_S = (0.2, 1.0)
_STOPPED_S = 0.01


class Disk:
    """One directory in memory, for one run."""

    def __init__(self, world: World, rates: dict[str, float], stall_rate: float) -> None:
        """Take the probability of each of `DISK_FAULTS`, and of a wait that is long."""
        self.world = world
        self._rates = dict(rates)
        self._stall_rate = stall_rate
        self.has_failed = False
        """What was written before may have been given up since."""
        parent = _IN_MEMORY if os.access(_IN_MEMORY, os.W_OK) else None
        self.directory = tempfile.mkdtemp(prefix="troika-simulation-", dir=parent)

    def close(self) -> None:
        """Remove it."""
        shutil.rmtree(self.directory, ignore_errors=True)

    def heal(self) -> None:
        """From now on everything works."""
        self._rates.clear()
        self._stall_rate = 0.0

    def latency(self) -> int:
        """What the writer waits until it gets to write."""
        is_long = self._stall_rate and self.world.random() < self._stall_rate
        return self.world.between(*(_STALL_S if is_long else _LATENCY_S))

    # In place of the system's -------------------------------------------------------------------

    def open_file(self, path: str, flags: int, mode: int) -> int:
        """`os.open`."""
        self._fail("full", errno.ENOSPC)
        return os.open(path, flags, mode)

    def write(self, fd: int, data: memoryview) -> int:
        """`os.write`."""
        self._fail("full", errno.ENOSPC)
        self._fail("broken", errno.EIO)
        is_torn = self._strikes("torn")
        if not is_torn and not self._strikes("short"):
            return os.write(fd, data)
        num_bytes = os.write(fd, data[: self.world.rng.randrange(1, len(data) + 1)])
        if is_torn:
            raise KilledHere
        return num_bytes

    def sync(self, fd: int) -> None:
        """`os.fsync`."""
        self._fail("unsynced", errno.EIO)

    def _strikes(self, kind: str) -> bool:
        rate = self._rates.get(kind)
        if not rate or self.world.random() >= rate:
            return False
        self.world.counts[f"disk {kind}"] += 1
        self.has_failed |= kind in _HARD
        return True

    def _fail(self, kind: str, number: int) -> None:
        if self._strikes(kind):
            raise OSError(number, os.strerror(number))


class _NothingToDo(Exception):
    """The thread waits."""


class Condition:
    """A `threading.Condition` between an event loop and its one thread."""

    def __init__(self) -> None:
        """Nobody waits yet."""
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
        """Called by the thread: it goes on from the beginning, later."""
        raise _NothingToDo


class Thread:
    """A `threading.Thread` that takes its orders in turns, when the disk lets it."""

    def __init__(self, disk: Disk, target: Callable[[], None]) -> None:
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
        """Begin soon."""
        self.wake()

    def join(self, timeout: float | None = None) -> None:
        """Nobody waits for its end here."""

    def wake(self) -> None:
        """There is something to do."""
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

"""The supervisor's interface to the operating system; the simulation passes its own."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import zmq

from protocol.process.child_handle import Child
from protocol.process.fork_server import ForkServer, reap_unknown_children
from protocol.transport.runtime import Clock, Poller, SocketFactory

_KILL_TO_DEATH_S = 10.0
"""Longest time in seconds from the kernel's count of a kill to the end of the process."""


class OomCounter:
    """Counts out-of-memory kills in this control group; an unreadable count never grows."""

    def __init__(
        self, root: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc/self")
    ) -> None:
        self._file = _counter_file(root, proc)
        self._num_seen = 0
        self._num_seen = self._read()
        self._grown_at: float | None = None

    def has_grown(self) -> bool:
        """Return whether the count has grown since the last call; to be called once per death."""
        before, self._num_seen = self._num_seen, self._read()
        self._grown_at = None
        return self._num_seen > before

    def expire(self, now: float) -> None:
        """Forget a kill that no death has followed: another process was killed."""
        if self._read() <= self._num_seen:
            return
        if self._grown_at is None:
            self._grown_at = now
        elif now - self._grown_at > _KILL_TO_DEATH_S:
            self.has_grown()

    def _read(self) -> int:
        try:
            lines = [] if self._file is None else self._file.read_text().splitlines()
        except OSError:
            return self._num_seen
        counts = dict(line.split(maxsplit=1) for line in lines if " " in line)
        return int(counts.get("oom_kill", 0))


def _counter_file(root: Path, proc: Path) -> Path | None:
    """Return the file with this control group's counts, of version 2 or 1."""
    try:
        groups = (proc / "cgroup").read_text().splitlines()
    except OSError:
        return None
    files: list[Path] = []
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            files += [root / path[1:] / "memory.events"]
        elif "memory" in controllers.split(","):
            memory = root / "memory"
            files += [memory / path[1:] / "memory.oom_control", memory / "memory.oom_control"]
    return next((file for file in files if file.is_file()), None)


@dataclass(frozen=True, slots=True)
class System:
    """The clock, the poller, the sockets, and how processes are started and reaped."""

    clock: Clock = time
    make_poller: Callable[[], Poller] = zmq.Poller
    make_context: Callable[[], SocketFactory] = zmq.Context
    make_rng: Callable[[], random.Random] = random.Random
    make_oom_counter: Callable[[], OomCounter] = OomCounter
    start_child: Callable[..., Child] = Child
    start_fork_server: Callable[..., ForkServer] = ForkServer
    reap_unknown_children: Callable[[frozenset[int]], None] = reap_unknown_children

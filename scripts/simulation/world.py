"""Virtual time, processes and their deaths: the ground on which the real code is run.

One thread, one heap of events, one source of random numbers. Times are whole microseconds, so the
same seed gives the same events in the same order, and the same hash over all of them.
"""

import hashlib
import heapq
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

SECOND = 1_000_000
"""In the world's unit, microseconds."""
START_TIME = 1000 * SECOND
_FIRST_PID = 100
_FIRST_FD = 10_000
_SIGKILL_STATUS = -9


class Violation(Exception):
    """Something happened that must never happen; the text says what."""


class KilledHere(BaseException):
    """Raised where a process is to be killed, in the middle of whatever it does."""


class World:
    """The clock, what is to happen, and who lives."""

    def __init__(self, seed: int, *, keeps_trace: bool = False) -> None:
        self.rng = random.Random(seed)
        self.now = START_TIME
        self.current: Process | None = None
        """Whose code runs."""
        self.processes: dict[int, Process] = {}
        self.counts: Counter[str] = Counter()
        """Of faults and kills by kind, for the table."""
        self.num_events = 0
        self.is_over = False
        self.violation: Violation | None = None
        self.lines: list[str] | None = [] if keeps_trace else None
        self._heap: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._num_scheduled = 0
        self._hash = hashlib.sha256()
        self._next_pid = _FIRST_PID
        self._next_fd = _FIRST_FD
        self._pidfds: dict[int, Process] = {}

    def at(self, time: int, action: Callable[..., None], *arguments: Any) -> None:
        """Let something happen at `time`."""
        self._num_scheduled += 1
        heapq.heappush(self._heap, (time, self._num_scheduled, action, arguments))

    def after(self, delay: int, action: Callable[..., None], *arguments: Any) -> None:
        """Let something happen after `delay`."""
        self.at(self.now + delay, action, *arguments)

    def run(self, until: int) -> None:
        """Let events happen up to a time, or until somebody sets `is_over`.

        Raises:
            Violation: something happened that must never happen.
        """
        self.is_over = False
        heap = self._heap
        while heap and heap[0][0] <= until:
            self.now, _, action, arguments = heapq.heappop(heap)
            self.num_events += 1
            action(*arguments)
            if self.is_over:
                break
        if self.violation is not None:
            raise self.violation
        if self.is_over:
            return
        self.now = max(self.now, until)

    def fail(self, violation: Violation) -> None:
        """End at once: called where an exception would be somebody else's to catch."""
        self.violation = violation
        self.is_over = True

    def between(self, low: float, high: float) -> int:
        """Draw a duration, given in seconds."""
        return int((low + (high - low) * self.rng.random()) * SECOND)

    def trace(self, text: str, data: bytes = b"") -> None:
        """Enter an event into the hash, and into the lines where somebody reads them."""
        line = f"{self.now} {text}"
        self._hash.update(line.encode())
        if data:
            self._hash.update(data)
        if self.lines is not None:
            self.lines.append(line)

    @property
    def trace_hash(self) -> str:
        """Of all events so far."""
        return self._hash.hexdigest()

    # Clocks, as the code that runs sees them ------------------------------------------------------

    @property
    def local_time(self) -> int:
        """Of whose code runs: it may be ahead, for its own work takes time."""
        return self.now if self.current is None else self.current.busy_until

    def seconds(self) -> float:
        """The same in seconds."""
        return self.local_time / SECOND

    # Processes ----------------------------------------------------------------------------------

    def new_pid(self, process: "Process") -> int:
        """Enter a process into the table."""
        self._next_pid += 1
        self.processes[self._next_pid] = process
        return self._next_pid

    def new_fd(self) -> int:
        """A number that stands for something to poll."""
        self._next_fd += 1
        return self._next_fd

    def open_pidfd(self, pid: int) -> int | None:
        """Descriptor of a living process; None: there is none."""
        process = self.processes.get(pid)
        if process is None or not process.is_alive:
            return None
        fd = self.new_fd()
        self._pidfds[fd] = process
        return fd

    def process_of(self, pidfd: int) -> "Process | None":
        """Whom a descriptor stands for; None where it is no such descriptor."""
        return self._pidfds.get(pidfd)


class Process:
    """Something that runs now and then, and can be stopped and killed at any moment."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.is_alive = True
        self.is_stopped = False
        self.busy_until = world.now
        """Its own clock: what it does takes time, and it does one thing after the other."""
        self.on_death: list[Callable[[], None]] = []
        self._next_turn: int | None = None
        self.pid = world.new_pid(self)

    def turn(self) -> int | None:
        """Do what is due; returns when to be called again, None: when something arrives."""
        raise NotImplementedError

    def wake(self, time: int | None = None) -> None:
        """Something has arrived: take a turn soon, or at `time`."""
        due = max(self.world.now if time is None else time, self.busy_until)
        if self._next_turn is None or due < self._next_turn:
            self._next_turn = due
            self.world.at(due, self._run, due)

    def _run(self, due: int) -> None:
        if due != self._next_turn or not self.is_alive:
            return
        self._next_turn = None
        if self.is_stopped:
            return  # `resume` wakes it
        world = self.world
        self.busy_until = world.now
        world.current = self
        try:
            again = self.turn()
        except KilledHere:
            self.is_stopped = True  # what it has sent before leaves it
            world.at(self.busy_until, self.die)
            return
        finally:
            world.current = None
        self.busy_until += 10 + int(world.rng.random() * 50)
        if again is not None:
            self.wake(again)

    def arrived(self, fd: int) -> None:
        """Something is to be read from a descriptor."""
        self.wake()

    def sleep(self, seconds: float) -> None:
        """Work for so long; what is sent afterwards leaves later."""
        self.busy_until += int(seconds * SECOND)

    def stop(self) -> None:
        """SIGSTOP."""
        if self.is_alive:
            self.world.trace(f"stop {self.name}")
            self.is_stopped = True

    def resume(self) -> None:
        """SIGCONT."""
        if self.is_alive and self.is_stopped:
            self.world.trace(f"resume {self.name}")
            self.is_stopped = False
            self.wake()

    def die(self, status: int = _SIGKILL_STATUS) -> None:
        """End at this moment; whoever watches notices a little later."""
        if not self.is_alive:
            return
        world = self.world
        world.trace(f"death {self.name} {status}")
        self.is_alive = False
        for action in self.on_death:
            action()
        self.on_death.clear()
        for watcher in list(world.processes.values()):
            if watcher.is_alive:
                world.after(world.between(0.0001, 0.002), watcher.notice_death, self, status)
        del world.processes[self.pid]

    def notice_death(self, process: "Process", status: int) -> None:
        """Somebody has died; those who hold a descriptor of it care."""

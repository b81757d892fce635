"""Virtual time, processes and their deaths.

One thread, one heap of events, one source of random numbers. Times are whole microseconds, so the
same seed gives the same events in the same order, and the same hash over all of them.
"""

import hashlib
import heapq
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

SECOND = 1_000_000
"""In the world's unit, microseconds."""
START_TIME = 1000 * SECOND
_FIRST_PID = 100
_FIRST_FD = 10_000
_SIGKILL_STATUS = -9
_NEVER = 2**62
_WALL_CLOCK = 1_700_000_000.0


class Violation(Exception):
    """A property does not hold; the text describes it."""


class KilledHere(BaseException):
    """Raised to kill a process in the middle of its turn."""


class SimulatedClock:
    """The `protocol.transport.runtime.Clock` of the process whose code runs."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self.monotonic = world.seconds
        self.monotonic_ns = world.nanoseconds

    def time(self) -> float:
        return _WALL_CLOCK + self._world.seconds()

    def sleep(self, seconds: float, /) -> None:
        assert self._world.current is not None
        self._world.current.sleep(seconds)


class World:
    """The clock, the scheduled events, and the living processes."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.random = self.rng.random
        self.now = START_TIME
        self.clock = SimulatedClock(self)
        self.current: Process | None = None
        """The process whose code runs."""
        self.processes: dict[int, Process] = {}
        self.counts: Counter[str] = Counter()
        """Injected faults and kills by kind, for the table."""
        self.excuse: str | None = None
        """Why a healthy process may be killed: a fault that looks like a hang was injected."""
        self.is_ending = False
        """The engine was asked to end: standbys and starting processes are killed."""
        self.is_over = False
        self.violation: Violation | None = None
        self.lines: list[str] = []
        """All traced events, with their times."""
        self._data: list[bytes] = []
        """All frames that have arrived, in order."""
        self._heap: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._num_scheduled = 0
        self._next_pid = _FIRST_PID
        self._next_fd = _FIRST_FD
        self._pidfds: dict[int, Process] = {}
        self.dead_pidfds: set[int] = set()
        """The pidfds of dead processes."""
        self.readable_fds: set[int] = set()
        """Other descriptors that a poller returns."""

    def at(self, time: int, action: Callable[..., None], *arguments: Any) -> None:
        """Schedule an event at `time`."""
        self._num_scheduled += 1
        heapq.heappush(self._heap, (time, self._num_scheduled, action, arguments))

    def after(self, delay: int, action: Callable[..., None], *arguments: Any) -> None:
        """Schedule an event after `delay`."""
        self.at(self.now + delay, action, *arguments)

    def run(self, until: int) -> None:
        """Run events up to a time, or until `is_over` is set.

        Raises:
            Violation: a property does not hold.
        """
        self.is_over = False
        heap, pop = self._heap, heapq.heappop
        while heap and heap[0][0] <= until:
            self.now, _, action, arguments = pop(heap)
            action(*arguments)
            if self.is_over:
                break
        if self.violation is not None:
            raise self.violation
        if not self.is_over:
            self.now = max(self.now, until)

    @property
    def num_events(self) -> int:
        """Number of events that have happened."""
        return self._num_scheduled - len(self._heap)

    def fail(self, violation: Violation) -> None:
        """End the run at once; used where product code would catch an exception."""
        self.violation = violation
        self.is_over = True

    def between(self, low: float, high: float) -> int:
        """Draw a duration between two bounds in seconds."""
        return int((low + (high - low) * self.random()) * SECOND)

    def trace(self, text: str) -> None:
        """Add an event to the trace and its hash."""
        self.lines.append(f"{self.now} {text}")

    def trace_frame(self, text: str, parts: Sequence[bytes]) -> None:
        """Add the arrival of a frame, with all its bytes."""
        self.lines.append(f"{self.now} {text}")
        self._data += parts

    @property
    def trace_hash(self) -> str:
        """SHA-256 of all events so far."""
        digest = hashlib.sha256("\n".join(self.lines).encode())
        digest.update(b"".join(self._data))
        return digest.hexdigest()

    # The clock of the process whose code runs -----------------------------------------------------

    @property
    def local_time(self) -> int:
        """Its time; ahead of `now`, because its own work takes time."""
        return self.now if self.current is None else self.current.busy_until

    def seconds(self) -> float:
        current = self.current
        return (self.now if current is None else current.busy_until) / SECOND

    def nanoseconds(self) -> int:
        current = self.current
        return (self.now if current is None else current.busy_until) * 1000

    # Processes ----------------------------------------------------------------------------------

    def new_pid(self, process: "Process") -> int:
        """Add a process to the table."""
        self._next_pid += 1
        self.processes[self._next_pid] = process
        return self._next_pid

    def new_fd(self) -> int:
        """Return a number that stands for a descriptor."""
        self._next_fd += 1
        return self._next_fd

    def open_pidfd(self, pid: int) -> int | None:
        """Return a pidfd of a living process; None if there is none."""
        process = self.processes.get(pid)
        if process is None or not process.is_alive:
            return None
        return self.watch(process)

    def watch(self, process: "Process") -> int:
        """Return a pidfd of a process, dead or alive, for the process whose code runs."""
        fd = self.new_fd()
        self._pidfds[fd] = process
        process.pidfds.append(fd)
        if not process.is_alive:
            self.dead_pidfds.add(fd)
        if self.current is not None:
            process.watchers.append(self.current)
        return fd

    def process_of(self, pidfd: int) -> "Process | None":
        """Return the process of a pidfd; None for another descriptor."""
        return self._pidfds.get(pidfd)


class Process:
    """A process: it takes turns, and can be stopped and killed at any moment."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.is_alive = True
        self.status: int | None = None
        """Exit status; negative for a signal."""
        self.is_stopped = False
        self.is_dispensable = False
        """It is a starting successor of a living process: the supervisor may kill it."""
        self.busy_until = world.now
        """Its own clock: its work takes time, and is done one thing after the other."""
        self.on_death: list[Callable[[], None]] = []
        self.pidfds: list[int] = []
        """The pidfds that stand for it."""
        self.watchers: list[Process] = []
        """Processes that poll such a pidfd, and its parent."""
        self._next_turn = _NEVER
        self._armed = [_NEVER]
        """Times of the scheduled calls of `_run`, the earliest last; a postponed turn adds none."""
        self.pid = world.new_pid(self)

    @property
    def role(self) -> str:
        """Its name without numbers."""
        return self.name.rstrip("0123456789.")

    def turn(self) -> int | None:
        """Do the due work; returns the time of the next turn, or None: when something arrives."""
        raise NotImplementedError

    def wake(self, time: int = 0) -> None:
        """Take a turn soon, or at `time`."""
        due, now = self.busy_until, self.world.now
        if due < now:  # noqa: PLR1730 - called for every event
            due = now
        if due < time:  # noqa: PLR1730
            due = time
        if due < self._next_turn:
            self._next_turn = due
            if due < self._armed[-1]:
                self._armed.append(due)
                self.world.at(due, self._run)

    def _run(self) -> None:
        self._armed.pop()
        if not self.is_alive:
            return
        world, due = self.world, self._next_turn
        if due > world.now:
            if due < self._armed[-1]:
                self._armed.append(due)
                world.at(due, self._run)
            return
        self._next_turn = _NEVER
        if not self.is_stopped:  # `resume` wakes a stopped process
            self._take_turn()

    def _take_turn(self) -> None:
        world = self.world
        self._next_turn = _NEVER
        self.busy_until = world.now
        world.current = self
        try:
            again = self.turn()
        except KilledHere:
            self.is_stopped = True  # messages that it has sent still leave it
            world.at(self.busy_until, self.die)
            return
        finally:
            world.current = None
        self.busy_until += 10 + int(world.random() * 50)
        if again is not None:
            self.wake(again)

    def arrived(self, fd: int) -> None:
        """A descriptor has become readable."""
        if self.busy_until > self.world.now:
            self.wake()
        elif not self.is_stopped:
            self._take_turn()

    def sleep(self, seconds: float) -> None:
        """Spend time; messages sent afterwards leave later."""
        self.busy_until += int(seconds * SECOND)

    def stop(self) -> None:
        if self.is_alive:
            self.world.trace(f"stop {self.name}")
            self.is_stopped = True

    def resume(self) -> None:
        if self.is_alive and self.is_stopped:
            self.world.trace(f"resume {self.name}")
            self.is_stopped = False
            self.wake()

    def die(self, status: int = _SIGKILL_STATUS) -> None:
        """End now; watchers notice a little later."""
        if not self.is_alive:
            return
        world = self.world
        world.trace(f"death {self.name} {status}")
        self.is_alive = False
        self.status = status
        self.release()
        world.dead_pidfds.update(self.pidfds)
        for watcher in self.watchers:
            if watcher.is_alive:
                world.after(world.between(0.0001, 0.002), watcher.wake)
        del world.processes[self.pid]

    def release(self) -> None:
        """Release what the system releases at the end of a process."""
        for action in self.on_death:
            action()
        self.on_death.clear()

"""Virtual time, processes and their deaths: the ground on which the real code is run.

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


class Violation(Exception):
    """Something happened that must never happen; the text says what."""


class KilledHere(BaseException):
    """Raised where a process is to be killed, in the middle of whatever it does."""


class World:
    """The clock, what is to happen, and who lives."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.random = self.rng.random
        self.now = START_TIME
        self.current: Process | None = None
        """Whose code runs."""
        self.processes: dict[int, Process] = {}
        self.counts: Counter[str] = Counter()
        """Of faults and kills by kind, for the table."""
        self.excuse: str | None = None
        """Why somebody may be killed who is well: something was done that looks like a hang."""
        self.is_ending = False
        """The engine was asked to end: helpers, and who only starts, are killed for that."""
        self.is_over = False
        self.violation: Violation | None = None
        self.lines: list[str] = []
        """Every event that was traced, with its time."""
        self._data: list[bytes] = []
        """What arrived over the wire, in order."""
        self._heap: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._num_scheduled = 0
        self._next_pid = _FIRST_PID
        self._next_fd = _FIRST_FD
        self._pidfds: dict[int, Process] = {}
        self.dead_pidfds: set[int] = set()
        """Those whose process has ended."""

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
        """Those that have happened."""
        return self._num_scheduled - len(self._heap)

    def fail(self, violation: Violation) -> None:
        """End at once: called where an exception would be somebody else's to catch."""
        self.violation = violation
        self.is_over = True

    def between(self, low: float, high: float) -> int:
        """Draw a duration, given in seconds."""
        return int((low + (high - low) * self.random()) * SECOND)

    def trace(self, text: str) -> None:
        """Enter an event into the trace, and so into its hash."""
        self.lines.append(f"{self.now} {text}")

    def trace_frame(self, text: str, parts: Sequence[bytes]) -> None:
        """Enter the arrival of a frame, with all its bytes."""
        self.lines.append(f"{self.now} {text}")
        self._data += parts

    @property
    def trace_hash(self) -> str:
        """SHA-256 of all events so far."""
        digest = hashlib.sha256("\n".join(self.lines).encode())
        digest.update(b"".join(self._data))
        return digest.hexdigest()

    # Clocks, as the code that runs sees them ------------------------------------------------------

    @property
    def local_time(self) -> int:
        """Of whose code runs: it may be ahead, for its own work takes time."""
        return self.now if self.current is None else self.current.busy_until

    def seconds(self) -> float:
        """The same in seconds."""
        current = self.current
        return (self.now if current is None else current.busy_until) / SECOND

    def nanoseconds(self) -> int:
        """The same in nanoseconds."""
        current = self.current
        return (self.now if current is None else current.busy_until) * 1000

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
        return self.watch(process)

    def watch(self, process: "Process") -> int:
        """A descriptor of a process, dead or alive, for whose code runs."""
        fd = self.new_fd()
        self._pidfds[fd] = process
        process.pidfds.append(fd)
        if not process.is_alive:
            self.dead_pidfds.add(fd)
        if self.current is not None:
            process.watchers.append(self.current)
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
        self.status: int | None = None
        """How it ended; negative for a signal."""
        self.is_stopped = False
        self.is_dispensable = False
        """A successor of somebody who lives, and does not serve yet: another may be started."""
        self.busy_until = world.now
        """Its own clock: what it does takes time, and it does one thing after the other."""
        self.on_death: list[Callable[[], None]] = []
        self.pidfds: list[int] = []
        """Descriptors of it."""
        self.watchers: list[Process] = []
        """Who polls one, and who has started it."""
        self._next_turn = _NEVER
        self._armed = [_NEVER]
        """Times of the events that call `_run`, the earliest last: a turn that is put off costs no
        event of its own."""
        self.pid = world.new_pid(self)

    @property
    def role(self) -> str:
        """Its name without a number."""
        return self.name.rstrip("0123456789.")

    def turn(self) -> int | None:
        """Do what is due; returns when to be called again, None: when something arrives."""
        raise NotImplementedError

    def wake(self, time: int = 0) -> None:
        """Something has arrived: take a turn soon, or at `time`."""
        due, now = self.busy_until, self.world.now
        if due < now:  # noqa: PLR1730 - this is called for everything that happens
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
        if not self.is_stopped:  # else `resume` wakes it
            self._take_turn()

    def _take_turn(self) -> None:
        world = self.world
        self._next_turn = _NEVER
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
        self.busy_until += 10 + int(world.random() * 50)
        if again is not None:
            self.wake(again)

    def arrived(self, fd: int) -> None:
        """Something is to be read from a descriptor."""
        if self.busy_until > self.world.now:
            self.wake()
        elif not self.is_stopped:
            self._take_turn()

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
        self.status = status
        self.let_go()
        world.dead_pidfds.update(self.pidfds)
        for watcher in self.watchers:
            if watcher.is_alive:
                world.after(world.between(0.0001, 0.002), watcher.wake)
        del world.processes[self.pid]

    def let_go(self) -> None:
        """What the system does for whoever ends."""
        for action in self.on_death:
            action()
        self.on_death.clear()

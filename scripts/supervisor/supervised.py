"""What supervision handles: slots, processes, groups of ranks, and the actions it asks for."""

import enum
import logging
import random
import signal
from dataclasses import dataclass

from protocol.lifecycle import (
    DeathCause,
    Drain,
    Fatal,
    Health,
    ProcessState,
    Progress,
    Promote,
    Ready,
    Role,
    Stop,
    Suspect,
    WorkerDied,
)

HEALTHY_S = 60.0
"""A group ready for so long has its deaths forgotten."""
_FIRST_BACKOFF_S = 0.1
_MAX_DOUBLINGS = 32


@dataclass(frozen=True, slots=True, order=True)
class Slot:
    """A place for one process; its incarnations follow each other there."""

    role: Role
    rank: int = 0

    def __str__(self) -> str:
        return f"{self.role} {self.rank}" if self.rank else str(self.role)


class Origin(enum.Enum):
    """How a process comes into its slot."""

    STARTED = "started"
    """By command: it loads everything by itself."""
    FORKED = "forked"
    """From the zygote, which has loaded it."""
    PROMOTED = "promoted"
    """It was the standby."""


@dataclass(frozen=True, slots=True)
class Start:
    """Start a process with this epoch."""

    slot: Slot
    epoch: int
    origin: Origin = Origin.STARTED


@dataclass(frozen=True, slots=True)
class Kill:
    """Send SIGKILL."""

    slot: Slot


@dataclass(frozen=True, slots=True)
class DumpStacks:
    """Have a process print what its threads are doing."""

    slot: Slot


@dataclass(frozen=True, slots=True)
class LeaveWord:
    """Write into a slot's progress page how its last incarnation ended, for the next."""

    slot: Slot
    epoch: int
    cause: DeathCause
    step_id: int | None


@dataclass(frozen=True, slots=True)
class Tell:
    """Send a message over the lifecycle link."""

    slot: Slot
    message: Drain | Stop | Promote | Suspect | WorkerDied | Health


@dataclass(frozen=True, slots=True)
class Swap:
    """The processes of two slots of one role change places."""

    one: Slot
    other: Slot


@dataclass(frozen=True, slots=True)
class Show:
    """A step of a start, for the console."""

    slot: Slot
    message: Progress | Ready


@dataclass(frozen=True, slots=True)
class Announce:
    """The engine serves for the first time."""


@dataclass(frozen=True, slots=True)
class Note:
    """A line for the log; `severity` is a level of the logging module."""

    severity: int
    text: str


@dataclass(frozen=True, slots=True)
class Exit:
    """Everything has ended; the supervisor exits with this status."""

    status: int


Action = Start | Kill | DumpStacks | LeaveWord | Tell | Swap | Show | Announce | Note | Exit


class Process:
    """One slot and its present incarnation."""

    __slots__ = (
        "asked",
        "deadline",
        "epoch",
        "fatal",
        "is_alive",
        "is_doomed",
        "is_overdue",
        "last_progress",
        "num_restarts",
        "slot",
        "state",
    )

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        self.epoch = 0
        self.state = ProcessState.STOPPED
        self.num_restarts = -1
        self.is_alive = False
        self.is_doomed = False
        """SIGKILL was sent; its death is awaited."""
        self.is_overdue = False
        """It was sent because a deadline had passed."""
        self.deadline: float | None = None
        """When it is killed unless its start makes progress."""
        self.asked: Drain | Stop | None = None
        """To end, by this message."""
        self.last_progress: Progress | None = None
        """In its start."""
        self.fatal: Fatal | None = None
        """Its last words."""

    @property
    def serves(self) -> bool:
        """Whether it can be relied on now."""
        return self.is_alive and not self.is_doomed and self.state is ProcessState.READY

    @property
    def is_coming(self) -> bool:
        """Whether its start goes on."""
        return self.is_alive and not self.is_doomed and self.state is ProcessState.STARTING

    def begin(self, epoch: int, deadline: float, origin: Origin = Origin.STARTED) -> Start:
        """A new incarnation."""
        assert not self.is_alive, f"{self.slot} would live twice"
        assert epoch > self.epoch
        self.epoch = epoch
        self.state = ProcessState.STARTING
        self.num_restarts += 1
        self.is_alive = True
        self.is_doomed = False
        self.is_overdue = False
        self.deadline = deadline
        self.asked = None
        self.last_progress = None
        self.fatal = None
        return Start(self.slot, epoch, origin)

    def leave(self, deadline: float, message: Drain | Stop) -> list[Action]:
        """Ask it to end; it is killed when it has not by then."""
        self.state = ProcessState.DRAINING
        self.deadline = deadline
        return self.ask(message)

    def ask(self, message: Drain | Stop) -> list[Action]:
        """Ask it to end; `ask_again` follows until it has."""
        self.asked = message
        return [Tell(self.slot, message)]

    def ask_again(self) -> list[Action]:
        """What it was asked for, in case it has not heard it."""
        if self.asked is None or not self.is_alive or self.is_doomed:
            return []
        return [Tell(self.slot, self.asked)]

    def vacate(self) -> None:
        """It lives on in another slot."""
        self.is_alive = False
        self.deadline = None
        self.state = ProcessState.BACKOFF

    def moves_on(self, message: object) -> bool:
        """Whether a start goes on, by what it says. Saying the same again does not count."""
        if isinstance(message, Progress):
            if message == self.last_progress:
                return False
            self.last_progress = message
        return not self.is_doomed

    def kill(self) -> list[Action]:
        """Kill it if that is still needed."""
        if not self.is_alive or self.is_doomed:
            return []
        self.is_doomed = True
        self.deadline = None
        return [Kill(self.slot)]

    def run_out(self) -> list[Action]:
        """Its deadline has passed. Who does not leave in time is not said to have hung."""
        self.deadline = None
        if self.state is ProcessState.DRAINING:
            text = f"{self.slot} does not leave in time; it is killed"
            return [Note(logging.WARNING, text), *self.kill()]
        text = f"{self.slot} has made no progress in its start; it is killed"
        return [Note(logging.ERROR, text), *self.kill_overdue()]

    def kill_overdue(self) -> list[Action]:
        """Kill it because it hangs, which is then what it died of."""
        kills = self.kill()
        self.is_overdue |= bool(kills)
        return kills


class Group:
    """All ranks of one role."""

    __slots__ = (
        "is_failing",
        "is_leaving",
        "num_deaths",
        "num_failures",
        "processes",
        "ready_since",
        "resume_at",
        "role",
        "spare",
    )

    def __init__(self, role: Role, num_ranks: int) -> None:
        self.role = role
        self.processes = [Process(Slot(role, rank)) for rank in range(num_ranks)]
        self.spare: Process | None = None
        """One more beside them during a planned restart: first the successor, then who leaves."""
        self.is_leaving = False
        """They were asked to end and to be replaced: their deaths count for nothing."""
        self.resume_at: float | None = None
        """When the successors start; the group may still have to die until then."""
        self.is_failing = False
        """One rank has died; the others are being killed."""
        self.num_deaths = 0
        """In a row, without a healthy time between."""
        self.num_failures = 0
        """Of these, not by a signal from outside."""
        self.ready_since: float | None = None

    @property
    def members(self) -> list[Process]:
        """All processes, the spare one included."""
        return [*self.processes, *([] if self.spare is None else [self.spare])]

    @property
    def is_gone(self) -> bool:
        """Whether nobody of it lives."""
        return not any(process.is_alive for process in self.members)

    @property
    def is_vacant(self) -> bool:
        """Whether its places can be taken: who leaves beside them does not matter."""
        return not any(process.is_alive for process in self.processes)

    @property
    def is_ready(self) -> bool:
        return all(process.state is ProcessState.READY for process in self.processes)

    def begin(self, now: float) -> None:
        """New incarnations of all its processes follow."""
        self._forget_deaths(now)
        self.resume_at = None
        self.is_failing = False
        self.is_leaving = False
        self.ready_since = None

    def kill(self) -> list[Action]:
        """Kill everybody."""
        return [action for process in self.members for action in process.kill()]

    def kill_rest(self) -> list[Action]:
        """One of them has died, and the others with it, but not who leaves beside them."""
        spare = self.spare
        is_leaving = spare is not None and spare.state is ProcessState.DRAINING
        doomed = self.processes if is_leaving else self.members
        return [action for process in doomed for action in process.kill()]

    def count_death(self, status: int, now: float) -> None:
        """One more in a row, unless the group was healthy meanwhile."""
        self._forget_deaths(now)
        self.num_deaths += 1
        if status not in (-signal.SIGKILL, -signal.SIGTERM):
            self.num_failures += 1

    def _forget_deaths(self, now: float) -> None:
        if self.ready_since is not None and now - self.ready_since >= HEALTHY_S:
            self.num_deaths = self.num_failures = 0

    def delay_s(self, longest_s: float, rng: random.Random) -> float:
        """The pause before the next start: none, then one that doubles, with jitter."""
        if self.num_deaths == 1:
            return 0.0
        doublings = min(self.num_deaths - 2, _MAX_DOUBLINGS)
        return min(_FIRST_BACKOFF_S * 2.0**doublings, longest_s) * rng.uniform(0.5, 1.0)


def phase_name(phase: str) -> str:
    """A phase of a start as a person reads it."""
    return phase.replace("_", " ")

"""What the policy asks for: slots of processes, and actions on them."""

import enum
from dataclasses import dataclass

from protocol.lifecycle import (
    DeathCause,
    Drain,
    Health,
    Progress,
    Promote,
    Ready,
    Role,
    Stop,
    Suspect,
    WorkerDied,
)


@dataclass(frozen=True, slots=True, order=True)
class Slot:
    """A place for one process at a time, whose incarnations have increasing epochs."""

    role: Role
    rank: int = 0

    def __str__(self) -> str:
        return f"{self.role} {self.rank}" if self.rank else str(self.role)


class Origin(enum.Enum):
    """How a process comes into its slot."""

    STARTED = "started"
    """By command; it loads everything itself."""
    FORKED = "forked"
    """By the zygote, which has loaded the model."""
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
    """Make a process print the stacks of its threads."""

    slot: Slot


@dataclass(frozen=True, slots=True)
class RecordDeath:
    """Write the last incarnation's death into the slot's progress page, for the next one."""

    slot: Slot
    epoch: int
    cause: DeathCause
    step_id: int | None


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message over the lifecycle link."""

    slot: Slot
    message: Drain | Stop | Promote | Suspect | WorkerDied | Health


@dataclass(frozen=True, slots=True)
class Swap:
    """Exchange the processes of two slots of one role."""

    one: Slot
    other: Slot


@dataclass(frozen=True, slots=True)
class Show:
    """Show the progress of a start on the console."""

    slot: Slot
    message: Progress | Ready


@dataclass(frozen=True, slots=True)
class Announce:
    """Print that the engine serves, for the first time."""


@dataclass(frozen=True, slots=True)
class Note:
    """Write a line to the log; `severity` is a level of the logging module."""

    severity: int
    text: str


@dataclass(frozen=True, slots=True)
class Exit:
    """End the supervisor with this status; all processes have ended."""

    status: int


Action = Start | Kill | DumpStacks | RecordDeath | Send | Swap | Show | Announce | Note | Exit

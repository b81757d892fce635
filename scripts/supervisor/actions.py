"""The actions that the policy orders: slots of processes, and what to do with them."""

import enum

import msgspec

from protocol.lifecycle import Command, DeathCause, Progress, Ready, Role, process_name


class Slot(msgspec.Struct, frozen=True, order=True):
    """A place for one process at a time; its successive incarnations have increasing epochs."""

    role: Role
    rank: int = 0
    name: str = ""
    """The name shown to users; empty: role and rank are shown."""

    def __str__(self) -> str:
        return self.name or process_name(self.role, self.rank)


def api_slot(index: int, count: int, *, is_spare: bool = False) -> Slot:
    """Return the slot of one of `count` API processes.

    With `is_spare`, the slot is that of the second process with this index during a planned
    restart.
    """
    name = ("api" if count == 1 else f"api-{index}") + " spare" * is_spare
    return Slot(Role.API, index + count * is_spare, name)


def replica_slot(index: int) -> Slot:
    """Return the slot of the supervisor of a replica."""
    return Slot(Role.REPLICA, index, f"replica-{index}")


class Origin(enum.Enum):
    """How a process is started in its slot."""

    STARTED = "started"
    """It is started by command, and loads everything itself."""
    FORKED = "forked"
    """The zygote, which has loaded the model, forks it."""
    PROMOTED = "promoted"
    """It was the standby."""


class Start(msgspec.Struct, frozen=True):
    """Start a process with this epoch."""

    slot: Slot
    epoch: int
    origin: Origin = Origin.STARTED


class Kill(msgspec.Struct, frozen=True):
    """Kill a process with SIGKILL."""

    slot: Slot
    spares_zygote: bool = False
    """True if a zygote that has not forked the process yet is left alive. Otherwise it counts as
    hanging."""


class DumpStacks(msgspec.Struct, frozen=True):
    """Make a process print the stacks of its threads."""

    slot: Slot


class RecordDeath(msgspec.Struct, frozen=True):
    """Write the last incarnation's death into the slot's progress page, for the next one."""

    slot: Slot
    epoch: int
    cause: DeathCause
    step_id: int | None


class Send(msgspec.Struct, frozen=True):
    """Send a message over the lifecycle link."""

    slot: Slot
    message: Command


class Swap(msgspec.Struct, frozen=True):
    """Exchange the processes of two slots of one role."""

    one: Slot
    other: Slot


class Show(msgspec.Struct, frozen=True):
    """Show the progress of a start on the console."""

    slot: Slot
    message: Progress | Ready


class Announce(msgspec.Struct, frozen=True):
    """Print that the engine serves, for the first time."""


class Note(msgspec.Struct, frozen=True):
    """Write a line to the log; `severity` is a level of the logging module."""

    severity: int
    text: str


class Exit(msgspec.Struct, frozen=True):
    """End the supervisor with this status; all processes have ended."""

    status: int


Action = Start | Kill | DumpStacks | RecordDeath | Send | Swap | Show | Announce | Note | Exit

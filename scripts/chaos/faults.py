"""The fault plan: who is killed in which phase, and how the phase is hit."""

import enum
import random
from collections.abc import Iterable, Iterator
from typing import NamedTuple


class Fault(enum.StrEnum):
    """Who is killed."""

    WORKER = "worker"
    CORE = "core"
    BOTH = "both"
    STANDBY = "standby"
    ZYGOTE = "zygote"
    API = "api"
    SUPERVISOR = "supervisor"
    WORKER_HANG = "worker_hang"
    """SIGSTOP instead of SIGKILL: it is there, and does nothing."""
    CORE_HANG = "core_hang"

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles in the status of the engine."""
        return ("worker", "core") if self is Fault.BOTH else (self.removesuffix("_hang"),)

    @property
    def hangs(self) -> bool:
        """Whether the victims are stopped, and not killed."""
        return self.endswith("_hang")

    @property
    def breaks_streams(self) -> bool:
        """Whether open connections may break: see docs/failure.md."""
        return self in (Fault.API, Fault.SUPERVISOR)


DEADLY_FAULTS = tuple(fault for fault in Fault if not fault.hangs)
"""Hangs take seconds to be noticed, so they come only when asked for."""


class Phase(enum.StrEnum):
    """When."""

    IDLE = "idle"
    """No request is open; all of them come right after the kill."""
    QUEUED = "queued"
    """Some run, others wait."""
    FIRST_CHUNK = "first_chunk"
    """The first step of the round is being computed."""
    MIDDLE_CHUNK = "middle_chunk"
    """One of the next steps, in which prompts go on."""
    DECODE = "decode"
    """Most requests have tokens already."""
    FLUSH = "flush"
    """Tokens were computed and are on their way to the client."""
    ABORT = "abort"
    """A client has disconnected."""
    PREEMPTION = "preemption"
    """A running request has lost its blocks to another."""
    LOAD = "load"
    """The successor dies while it starts."""
    RECOVERY = "recovery"
    """The successor dies while it takes over."""
    THRICE = "thrice"
    """Three deaths within ten seconds."""
    RANDOM = "random"
    """At any time."""


class Cell(NamedTuple):
    """One round of the plan."""

    number: int
    fault: Fault
    phase: Phase
    seed: int


class Place(NamedTuple):
    """A failpoint that marks a phase."""

    failpoint: str
    hit: int
    by_itself: bool
    """Whether the process that gets there kills or stops itself; otherwise it is held while the
    victims are killed from outside, so that no descriptor is left in the state in which a signal to
    oneself would leave it."""


HOLD_MS = 120
"""Longer than it takes to see that a failpoint has fired, and to kill."""

_PLACES: dict[Phase, dict[str, tuple[str, int, int]]] = {
    Phase.QUEUED: {
        "": ("ledger.after_accept", 20, 30),
        "api": ("api.after_accept", 15, 25),
    },
    Phase.FIRST_CHUNK: {
        "": ("worker.mid_step", 1, 1),
        "core": ("core.after_dispatch", 1, 1),
    },
    Phase.MIDDLE_CHUNK: {
        "": ("worker.mid_step", 2, 5),
        "core": ("core.after_dispatch", 2, 5),
    },
    Phase.DECODE: {
        "": ("worker.before_step", 20, 80),
        "core": ("core.after_drain", 60, 200),
    },
    Phase.FLUSH: {
        "": ("api.before_flush", 100, 900),
        "worker": ("worker.after_step", 20, 80),
        "core": ("core.before_reply", 20, 80),
    },
    Phase.ABORT: {"": ("api.before_abort", 1, 3)},
    Phase.PREEMPTION: {"": ("core.after_preemption", 1, 2)},
}
"""By phase and fault ("": any other): failpoint, lowest and highest hit."""

_AGAIN: dict[Phase, dict[str, tuple[str, ...]]] = {
    Phase.LOAD: {
        "worker": ("worker.load",),
        "core": ("core.load",),
        "both": ("worker.load", "core.load"),
        "standby": ("worker.load",),
        "zygote": ("worker.load",),
        "api": ("api.load",),
        "supervisor": ("worker.load",),
    },
    Phase.RECOVERY: {
        "worker": ("worker.after_adopt",),
        "core": ("core.after_adopt",),
        "both": ("core.after_adopt",),
        "standby": ("core.after_adopt",),
        "zygote": ("core.after_adopt",),
        "api": ("api.load",),
        "supervisor": ("supervisor.after_death",),
    },
}
"""Where the second death comes. Whoever does not get there by itself is killed from outside."""


_NOT_FOR_HANGS = (Phase.LOAD, Phase.THRICE)
"""A start may take ten minutes, and three hangs take longer than ten seconds."""


def place(cell: Cell, rng: random.Random) -> Place | None:
    """The failpoint that marks a cell's phase; None where there is none."""
    by_fault = _PLACES.get(cell.phase)
    if by_fault is None:
        return None
    name, lowest, highest = by_fault.get(cell.fault.removesuffix("_hang"), by_fault[""])
    is_own = cell.fault.roles == (name.partition(".")[0],)
    return Place(name, rng.randint(lowest, highest), is_own and rng.random() < 0.5)


def places_again(cell: Cell) -> list[Place]:
    """The failpoints of the successors, for phases with a second death."""
    names = _AGAIN.get(cell.phase, {}).get(cell.fault.removesuffix("_hang"), ())
    return [Place(name, 1, name.partition(".")[0] in cell.fault.roles) for name in names]


def cells(faults: Iterable[Fault], phases: Iterable[Phase]) -> list[tuple[Fault, Phase]]:
    """The matrix, in reading order."""
    phases = tuple(phases)
    return [
        (fault, phase)
        for fault in faults
        for phase in phases
        if not (fault.hangs and phase in _NOT_FOR_HANGS)
    ]


def plan(pairs: list[tuple[Fault, Phase]], seed: int, *, is_shuffled: bool) -> Iterator[Cell]:
    """Rounds without end: the matrix again and again, each time in another order if wished."""
    rng = random.Random(f"plan-{seed}")
    number = 0
    while True:
        batch = list(pairs)
        if is_shuffled:
            rng.shuffle(batch)
        for fault, phase in batch:
            number += 1
            yield Cell(number, fault, phase, rng.randrange(2**31))

"""The fault plan: which process is killed in which phase, and how the phase is hit."""

import enum
import random
from collections.abc import Iterable, Iterator
from typing import NamedTuple


class Fault(enum.StrEnum):
    """Which processes are killed."""

    WORKER = "worker"
    CORE = "core"
    BOTH = "both"
    STANDBY = "standby"
    STANDBY_CORE = "standby_core"
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

    @staticmethod
    def holders() -> tuple[str, ...]:
        """Roles whose death may break open connections: see docs/failure.md."""
        return ("api", "supervisor")


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


class Sequel(NamedTuple):
    """Two deaths, the second of which comes while the first is being repaired."""

    first: tuple[str, ...]
    """Roles that die first, in this order; those that the engine has not are left out."""
    places: tuple[Place, ...]
    """Where the second death comes, one after the other; none: as soon as there is a successor."""


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

_PER_STREAM = ("ledger.after_accept", "api.after_accept", "api.before_flush")
"""Places that are reached the more often, the more streams there are."""
_USUAL_STREAMS = 32

_LOADING: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "worker": (("standby", "worker"), ("worker.load",)),
    "core": (("standby_core", "core"), ("core.load",)),
    "both": (("standby", "standby_core", "worker", "core"), ("worker.load", "core.load")),
    "standby": (("standby",), ("worker.load",)),
    "standby_core": (("standby_core",), ()),
    "zygote": (("zygote",), ("zygote.load",)),
    "api": (("api",), ("api.load",)),
    "supervisor": (("standby", "worker"), ("worker.load",)),
}
"""By fault: who dies first, and where the successor is when it does, or its supervisor. Where a
standby takes the place of the dead nobody starts, so that one dies before. Without a place the
successor dies as soon as it is there."""

_RECOVERING: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "worker": (("worker",), ("worker.after_adopt",)),
    "core": (("core",), ("core.after_adopt",)),
    "both": (("worker", "core"), ("core.after_adopt",)),
    "standby": (("worker",), ("supervisor.after_death",)),
    "standby_core": (("core",), ("supervisor.after_death",)),
    "zygote": (("worker",), ("supervisor.after_death",)),
    "api": (("core",), ("core.after_adopt",)),
    "supervisor": (("worker",), ("supervisor.after_death",)),
}
"""Likewise, while the successor of who died first takes over: standbys and zygote die when the
supervisor has buried a worker or a core and is about to turn to them, the API while it sends
everything to a new core. With a journal it is killed first instead, and its successor while it goes
on with what is written there."""

_RESTORED = (1, 12)
"""Requests of the journal that are sent to the core when the API's successor dies."""


_NOT_FOR_HANGS = (Phase.LOAD, Phase.THRICE)
"""A start may take ten minutes, and three hangs take longer than ten seconds."""


def place(cell: Cell, rng: random.Random, num_streams: int = _USUAL_STREAMS) -> Place | None:
    """The failpoint that marks a cell's phase; None where there is none."""
    by_fault = _PLACES.get(cell.phase)
    if by_fault is None:
        return None
    name, lowest, highest = by_fault.get(cell.fault.removesuffix("_hang"), by_fault[""])
    is_own = cell.fault.roles == (name.partition(".")[0],)
    hit = rng.randint(lowest, highest)
    if name in _PER_STREAM:
        hit = -(-hit * num_streams // _USUAL_STREAMS)
    return Place(name, hit, is_own and rng.random() < 0.5)


def sequel(cell: Cell, *, has_journal: bool = False) -> Sequel | None:
    """For phases with a second death: who dies first, and the failpoints of the second."""
    if has_journal and (cell.fault, cell.phase) == (Fault.API, Phase.RECOVERY):
        hit = random.Random(cell.seed).randint(*_RESTORED)
        return Sequel(("api",), (Place("ledger.after_accept", hit, True),))
    table = {Phase.LOAD: _LOADING, Phase.RECOVERY: _RECOVERING}.get(cell.phase)
    if table is None:
        return None
    first, names = table[cell.fault.removesuffix("_hang")]
    roles = {*cell.fault.roles, *(["worker"] if cell.fault is Fault.STANDBY else [])}
    is_alone = cell.fault is not Fault.BOTH or len(names) > 1
    places = [Place(name, 1, is_alone and name.partition(".")[0] in roles) for name in names]
    return Sequel(first, tuple(places))


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

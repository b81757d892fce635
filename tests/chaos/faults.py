"""The fault plan: which process is killed in which phase, and which failpoint marks the phase."""

import enum
import random
from collections.abc import Iterable, Iterator
from typing import NamedTuple


class Fault(enum.StrEnum):
    """The processes that are killed."""

    WORKER = "worker"
    CORE = "core"
    BOTH = "both"
    STANDBY = "standby"
    STANDBY_CORE = "standby_core"
    ZYGOTE = "zygote"
    API = "api"
    SUPERVISOR = "supervisor"
    REPLICA = "replica"
    """The supervisor of a replica, with which all processes of the replica end."""
    LOST = "lost"
    """A replica for good: its core, its workers and all that could replace them."""
    WORKER_HANG = "worker_hang"
    """SIGSTOP instead of SIGKILL: the process exists, but does nothing."""
    CORE_HANG = "core_hang"

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles in the status of the engine."""
        if self is Fault.BOTH:
            return ("worker", "core")
        return ("replica",) if self is Fault.LOST else (self.removesuffix("_hang"),)

    @property
    def hangs(self) -> bool:
        """Whether the victims are stopped instead of killed."""
        return self.endswith("_hang")

    @staticmethod
    def holders() -> tuple[str, ...]:
        """Roles whose death may break open connections: see docs/failure.md."""
        return ("api", "supervisor")


DEADLY_FAULTS = tuple(fault for fault in Fault if not fault.hangs)
"""Hangs take seconds to be detected, and are injected only on request."""


class Phase(enum.StrEnum):
    """The moment of a kill."""

    IDLE = "idle"
    """No request is open; all are sent right after the kill."""
    QUEUED = "queued"
    """Some requests run, others wait."""
    FIRST_CHUNK = "first_chunk"
    """The first step of the round is being computed."""
    MIDDLE_CHUNK = "middle_chunk"
    """A later step that computes prompts is being computed."""
    DECODE = "decode"
    """Most requests have tokens already."""
    FLUSH = "flush"
    """Tokens were computed and are on their way to the client."""
    ABORT = "abort"
    """A client has disconnected."""
    PREEMPTION = "preemption"
    """A running request was preempted."""
    LOAD = "load"
    """The successor dies while it starts."""
    RECOVERY = "recovery"
    """The successor dies while it takes over."""
    THRICE = "thrice"
    """Three deaths within ten seconds."""
    RANDOM = "random"
    """Any time."""


PARTS = {
    "prompts": (Phase.IDLE, Phase.QUEUED, Phase.FIRST_CHUNK, Phase.MIDDLE_CHUNK),
    "tokens": (Phase.DECODE, Phase.FLUSH, Phase.ABORT, Phase.PREEMPTION),
    "successors": (Phase.LOAD, Phase.RECOVERY, Phase.THRICE, Phase.RANDOM),
}
"""The phases in parts, each of which is the matrix of one test: a whole one takes too long."""


class Cell(NamedTuple):
    """One round of the plan."""

    number: int
    fault: Fault
    phase: Phase
    seed: int
    rank: int | None = None
    """The rank of the worker that is killed; None: any."""


class Place(NamedTuple):
    """A failpoint that marks a phase."""

    failpoint: str
    hit: int
    by_itself: bool
    """Whether the process kills or stops itself there. Otherwise it is paused until the victims are
    killed from outside, which leaves its descriptors in another state than a signal to itself."""


class Sequel(NamedTuple):
    """Two deaths, the second of which happens during the recovery from the first."""

    first: tuple[str, ...]
    """Roles that die first, in this order; roles that the engine does not have are skipped."""
    places: tuple[Place, ...]
    """Places of the second death, in order; none: as soon as a successor exists."""


MAX_PAUSE_MS = 1500
"""Less than the time after which a process is suspected to hang. The kill ends the pause."""

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
"""Failpoints whose number of hits grows with the number of streams."""
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
    "replica": (("replica",), ("core.load",)),
}
"""By fault: the roles that die first, and the failpoint at which the successor, or its supervisor,
dies. A standby is killed before the process that it would replace, so that a process has to start.
Without a failpoint the successor dies as soon as it exists."""

_RECOVERING: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "worker": (("worker",), ("worker.after_adopt",)),
    "core": (("core",), ("core.after_adopt",)),
    "both": (("worker", "core"), ("core.after_adopt",)),
    "standby": (("worker",), ("supervisor.after_death",)),
    "standby_core": (("core",), ("supervisor.after_death",)),
    "zygote": (("worker",), ("supervisor.after_death",)),
    "api": (("core",), ("core.after_adopt",)),
    "supervisor": (("worker",), ("supervisor.after_death",)),
    "replica": (("worker",), ("supervisor.after_death",)),
}
"""The same for a death during the takeover. Standbys and zygote die when the supervisor has reaped
a worker or a core and is about to use them, the API while it resends its requests to a new core.
With a journal the API dies first, and its successor dies while it resumes the requests of the
journal."""

_RESTORED = (1, 12)
"""Number of resumed requests after which the API's successor dies."""


_NOT_FOR_HANGS = (Phase.LOAD, Phase.THRICE)
"""A start may take ten minutes, and three hangs take longer than ten seconds."""
_NOT_FOR_LOST = (Phase.LOAD, Phase.RECOVERY, Phase.THRICE)
"""A replica that is lost for good has no successor."""


def place(cell: Cell, rng: random.Random, num_streams: int = _USUAL_STREAMS) -> Place | None:
    """Return the failpoint that marks a cell's phase; None if there is none."""
    by_fault = _PLACES.get(cell.phase)
    if by_fault is None:
        return None
    name, lowest, highest = by_fault.get(cell.fault.removesuffix("_hang"), by_fault[""])
    is_own = cell.fault.roles == (name.partition(".")[0],)
    hit = rng.randint(lowest, highest)
    if name in _PER_STREAM:
        hit = -(-hit * num_streams // _USUAL_STREAMS)
    return Place(name, hit, is_own and rng.random() < 0.5 and cell.rank is None)


def sequel(cell: Cell, *, has_journal: bool = False) -> Sequel | None:
    """Return the two deaths of a phase with a second one; None for other phases."""
    if has_journal and (cell.fault, cell.phase) == (Fault.API, Phase.RECOVERY):
        hit = random.Random(cell.seed).randint(*_RESTORED)
        return Sequel(("api",), (Place("ledger.after_accept", hit, True),))
    table = {Phase.LOAD: _LOADING, Phase.RECOVERY: _RECOVERING}.get(cell.phase)
    if table is None:
        return None
    first, names = table[cell.fault.removesuffix("_hang")]
    roles = {*cell.fault.roles, *(["worker"] if cell.fault is Fault.STANDBY else [])}
    is_alone = (cell.fault is not Fault.BOTH or len(names) > 1) and cell.rank is None
    places = [Place(name, 1, is_alone and name.partition(".")[0] in roles) for name in names]
    return Sequel(first, tuple(places))


def cells(faults: Iterable[Fault], phases: Iterable[Phase]) -> list[tuple[Fault, Phase]]:
    """Return the matrix in reading order."""
    phases = tuple(phases)
    return [
        (fault, phase)
        for fault in faults
        for phase in phases
        if not (fault.hangs and phase in _NOT_FOR_HANGS)
        and not (fault is Fault.LOST and phase in _NOT_FOR_LOST)
    ]


def plan(pairs: list[tuple[Fault, Phase]], seed: int, *, is_shuffled: bool) -> Iterator[Cell]:
    """Yield rounds without end: the matrix repeated, each time shuffled on request."""
    rng = random.Random(f"plan-{seed}")
    number = 0
    while True:
        batch = list(pairs)
        if is_shuffled:
            rng.shuffle(batch)
        for fault, phase in batch:
            number += 1
            yield Cell(number, fault, phase, rng.randrange(2**31))

"""The lifecycle link: every process and its supervisor, and the queries of other programs.

The supervisor binds; children and the status command connect. Besides, each child inherits a pipe
whose EOF means that its parent is gone (child_runtime.py).
"""

import enum
from typing import Annotated

from msgspec import Meta

from protocol.message import Decoder, Message, Record, Text

MAX_REMARKS = 16
REPEAT_S = 2.0
"""How often both ends repeat their state: a frame may be lost with its connection."""


class Role(enum.StrEnum):
    """What a process of an engine does."""

    SUPERVISOR = "supervisor"
    API = "api"
    CORE = "core"
    WORKER = "worker"
    STANDBY = "standby"
    STANDBY_CORE = "standby_core"
    ZYGOTE = "zygote"
    PLACER = "placer"
    """Keeps engines in a Ray cluster."""
    BLOCK_SERVER = "block_server"
    """Lets workers of other machines read the KV blocks that are stored here."""
    REPLICA = "replica"
    """The supervisor of one of several replicas of the engine."""


def process_name(role: Role, rank: int) -> str:
    """Return the name of a process for users: the first one of a role has no number."""
    return f"{role} {rank}" if rank else str(role)


class ProcessState(enum.StrEnum):
    """The state of a process, as its supervisor sees it."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    BACKOFF = "backoff"
    """Dead; its successor starts after a pause."""
    STOPPED = "stopped"


class DeathCause(enum.IntEnum):
    """Why a process ended, as its supervisor classifies it."""

    SIGNAL = 0
    """A signal that it caused itself: SIGSEGV, SIGABRT, SIGBUS, SIGILL and the like."""
    EXCEPTION = 1
    OOM = 2
    DEADLINE = 3
    """The process hung, and its supervisor killed it."""
    KILLED = 4
    """A signal from outside, which does not depend on what it computed."""
    ENDED = 5
    """The process exited in order, such as for a restart by an operator, or it could not be
    started."""

    def __str__(self) -> str:
        return self.name.lower()


class Hello(Message):
    """Child → supervisor: the first message. The header's epoch is the child's."""

    role: Role
    rank: Annotated[int, Meta(ge=0, lt=1024)]
    pid: Annotated[int, Meta(ge=1, lt=2**31)]


class Progress(Message):
    """Child → supervisor: a phase of the start advances, which extends the start's deadline."""

    phase: Text
    done: Annotated[int, Meta(ge=0)] = 0
    total: Annotated[int, Meta(ge=0)] = 0
    """Number of steps in all; 0: unknown."""


class Ready(Message):
    """Child → supervisor: the start is over."""

    detail: Text = ""
    num_gpu_blocks: Annotated[int, Meta(ge=0, lt=2**31)] = 0
    """KV blocks that its successors must have too; 0: they measure memory."""
    facts: Annotated[list[Text], Meta(max_length=16)] = []
    """Lines that the supervisor prints when the engine serves for the first time."""
    num_state_blocks: Annotated[int, Meta(ge=0, lt=2**31)] = 0
    """State blocks that its successors must have too; 0: they measure memory."""


class Fatal(Message):
    """Child → supervisor: the child is about to exit because of an error."""

    phase: Text
    error: Text
    hint: Text = ""
    retry: bool = True
    """False: another start would fail in the same way."""


class Drained(Message):
    """Child → supervisor: no request is open."""


class Remarks(Message):
    """Child → supervisor: lines that the status shows, until the next ones or the child's end."""

    lines: Annotated[list[Text], Meta(max_length=MAX_REMARKS)]


class Drain(Message):
    """Supervisor → child: accept no new requests, finish the open ones, send `Drained`."""

    is_replaced: bool = False
    """A successor already accepts requests from the same listening socket."""


class Stop(Message):
    """Supervisor → child: exit now."""


class Promote(Message):
    """Supervisor → standby: become the worker, or the core, under this epoch; answer `Ready`."""

    epoch: Annotated[int, Meta(ge=1, lt=2**32)]


MAX_SUSPICION_S = 86_400.0


class Suspect(Message):
    """Supervisor → core: send no steps to a process without progress, or send steps again."""

    role: Role
    rank: Annotated[int, Meta(ge=0, lt=1024)]
    epoch: Annotated[int, Meta(ge=0, lt=2**32)]
    for_s: Annotated[float, Meta(ge=0.0, le=MAX_SUSPICION_S)]
    """Seconds; 0 ends it. It has a limit because the message that ends it may be lost."""


class WorkerDied(Message):
    """Supervisor → core: a worker is dead and reaped; ranks killed with it are not reported."""

    rank: Annotated[int, Meta(ge=0, lt=1024)]
    epoch: Annotated[int, Meta(ge=0, lt=2**32)]
    cause: DeathCause
    step_id: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None
    """The step that it was computing; None: none, or unknown."""
    is_loaded_anew: bool = False
    """Whether its successor must load the model first: there is neither standby nor zygote."""


HEALTH_HOLDS_S = 5.0


class Health(Message):
    """Supervisor → API: whether there is a crash loop; repeated, valid for `HEALTH_HOLDS_S`."""

    is_degraded: bool
    retry_after_s: Annotated[float, Meta(ge=0.0)] = 0.0


class StatusQuery(Message):
    """Any program → supervisor: return the status of all processes."""


class RestartQuery(Message):
    """Any program → supervisor: replace the processes of a role without losing requests."""

    role: Role
    index: Annotated[int, Meta(ge=0, lt=1024)] | None = None
    """Index of one API process; None: all of them, one after the other."""


class RestartReply(Message):
    """Supervisor → sender of the query: whether the processes are being replaced."""

    accepted: bool
    reason: Text = ""


class ProcessStatus(Record):
    """One row of the status table."""

    role: Role
    rank: int
    pid: int | None
    epoch: int
    state: ProcessState
    rss_bytes: int
    num_restarts: int
    name: str = ""
    is_spare: bool = False
    """The second API process with its index, during a planned restart."""


class StatusReply(Message):
    """Supervisor → sender of the query: the status of the engine and of its processes."""

    processes: list[ProcessStatus]
    ready: bool
    """Whether all processes that requests need are ready: every replica and every API, too."""
    url: str | None
    """Address of the API; None: this engine has none."""
    failure: str | None = None
    cores: list[str] = []
    """Where clients find the cores."""
    remarks: list[str] = []
    """What processes report beyond their state, such as engines that get no requests."""


ToSupervisor = Hello | Progress | Ready | Fatal | Drained | Remarks | StatusQuery | RestartQuery
Command = Drain | Stop | Promote | Suspect | WorkerDied | Health
FromSupervisor = Command | StatusReply | RestartReply

decode_to_supervisor: Decoder[ToSupervisor] = Decoder(ToSupervisor)
decode_from_supervisor: Decoder[FromSupervisor] = Decoder(FromSupervisor)

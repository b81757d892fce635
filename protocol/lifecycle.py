"""The lifecycle link: every process and its supervisor, and whoever asks how they are.

The supervisor binds; children and the status command connect. Beside it each child inherits a pipe
whose EOF means that its parent is gone (protocol/child_runtime.py).
"""

import enum
from typing import Annotated

from msgspec import Meta

from protocol.message import Decoder, Message, Record, Text

REPEAT_S = 2.0
"""How often both ends of the link say again what holds: a frame may be lost with its connection."""


class Role(enum.StrEnum):
    """What a process does."""

    SUPERVISOR = "supervisor"
    API = "api"
    CORE = "core"
    WORKER = "worker"
    STANDBY = "standby"
    """A worker that has loaded everything and waits for the death of another."""
    STANDBY_CORE = "standby_core"
    """A core that has loaded everything and waits for the death of another."""
    ZYGOTE = "zygote"
    """ZygoteClient workers."""


class ProcessState(enum.StrEnum):
    """Where a process stands, as its supervisor sees it."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    BACKOFF = "backoff"
    """Dead; its successor starts after a pause."""
    STOPPED = "stopped"


class DeathCause(enum.StrEnum):
    """Why a process ended, as its supervisor classes it."""

    SIGNAL = "signal"
    """Its own doing: SIGSEGV, SIGABRT, SIGBUS, SIGILL and the like."""
    EXCEPTION = "exception"
    """It gave up by itself, after an error that it could not handle."""
    OOM = "oom"
    """The kernel killed it for want of memory."""
    DEADLINE = "deadline"
    """It hung, and its supervisor killed it."""
    KILLED = "killed"
    """A signal from outside; that says nothing about what it computed."""
    ENDED = "ended"
    """It left in order, although nobody had asked it to, or could not be started."""


class Hello(Message):
    """Child → supervisor, first on the link. The header's epoch is the child's."""

    role: Role
    rank: Annotated[int, Meta(ge=0, lt=1024)]
    pid: Annotated[int, Meta(ge=1, lt=2**31)]


class Progress(Message):
    """Child → supervisor: a phase of the start goes on. Extends the start's deadline."""

    phase: Text
    done: Annotated[int, Meta(ge=0)] = 0
    total: Annotated[int, Meta(ge=0)] = 0
    """0: unknown."""


class Ready(Message):
    """Child → supervisor: the start is over; `detail` is one line for the console."""

    detail: Text = ""
    num_gpu_blocks: Annotated[int, Meta(ge=0, lt=2**31)] = 0
    """KV blocks that its successors are to have as well; 0: they find out by themselves."""


class Fatal(Message):
    """Child → supervisor: why the child is about to exit."""

    phase: Text
    error: Text
    hint: Text = ""
    retry: bool = True
    """False: another start would fail in the same way."""


class Drained(Message):
    """Child → supervisor: nothing is running here any more."""


class Drain(Message):
    """Supervisor → child: take no new work, finish what runs, say `Drained`."""

    is_replaced: bool = False
    """A successor takes the new work already, from the same listening socket."""


class Stop(Message):
    """Supervisor → child: exit now."""


class Promote(Message):
    """Supervisor → standby: be the worker, or the core, under this epoch.

    Answered with `Ready` under it.
    """

    epoch: Annotated[int, Meta(ge=1, lt=2**32)]


MAX_SUSPICION_S = 86_400.0


class Suspect(Message):
    """Supervisor → core: a process shows no progress, so it gets no work; or it does again."""

    role: Role
    rank: Annotated[int, Meta(ge=0, lt=1024)]
    epoch: Annotated[int, Meta(ge=0, lt=2**32)]
    """The suspect's own."""
    for_s: Annotated[float, Meta(ge=0.0, le=MAX_SUSPICION_S)]
    """How long it holds; 0: it goes on. By then it is dead, or the word of its end was lost."""


class WorkerDied(Message):
    """Supervisor → core: a worker is dead and reaped. Those killed with it are not reported."""

    rank: Annotated[int, Meta(ge=0, lt=1024)]
    epoch: Annotated[int, Meta(ge=0, lt=2**32)]
    """The worker's own."""
    cause: DeathCause
    step_id: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None
    """The step that it was computing; None: none, or nobody knows."""


HEALTH_HOLDS_S = 5.0


class Health(Message):
    """Supervisor → API: whether processes of the engine die again and again.

    While they do it is said every `REPEAT_S`, and believed for `HEALTH_HOLDS_S`.
    """

    is_degraded: bool
    retry_after_s: Annotated[float, Meta(ge=0.0)] = 0.0
    """When to ask again."""


class StatusQuery(Message):
    """Anyone → supervisor: how are the processes?"""


class RestartQuery(Message):
    """Anyone → supervisor: replace the processes of a role without losing anything."""

    role: Role


class RestartReply(Message):
    """Supervisor → whoever asked."""

    accepted: bool
    reason: Text = ""
    """Why not."""


class ProcessStatus(Record):
    """One row of the status table."""

    role: Role
    rank: int
    pid: int | None
    """None while there is no process."""
    epoch: int
    state: ProcessState
    rss_bytes: int
    num_restarts: int


class StatusReply(Message):
    """Supervisor → whoever asked."""

    processes: list[ProcessStatus]
    ready: bool
    """Whether every process is."""
    url: str | None
    """Address of the HTTP server, if one runs."""
    failure: str | None = None
    """Why the engine gave up, if it did."""


ToSupervisor = Hello | Progress | Ready | Fatal | Drained | StatusQuery | RestartQuery
Command = Drain | Stop | Promote | Suspect | WorkerDied | Health
FromSupervisor = Command | StatusReply | RestartReply

decode_to_supervisor: Decoder[ToSupervisor] = Decoder(ToSupervisor)
decode_from_supervisor: Decoder[FromSupervisor] = Decoder(FromSupervisor)

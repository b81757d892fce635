"""The lifecycle link: every process and its supervisor, and whoever asks how they are.

The supervisor binds; children and the status command connect. Beside it each child inherits a pipe
whose EOF means that its parent is gone (protocol/process.py).
"""

import enum
from typing import Annotated

from msgspec import Meta

from protocol.message import Decoder, Message, Record, Text


class Role(enum.StrEnum):
    """What a process does."""

    SUPERVISOR = "supervisor"
    API = "api"
    CORE = "core"
    WORKER = "worker"


class ProcessState(enum.StrEnum):
    """Where a process stands, as its supervisor sees it."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    BACKOFF = "backoff"
    """Dead; its successor starts after a pause."""
    STOPPED = "stopped"


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


class Stop(Message):
    """Supervisor → child: exit now."""


class StatusQuery(Message):
    """Anyone → supervisor: how are the processes?"""


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


ToSupervisor = Hello | Progress | Ready | Fatal | Drained | StatusQuery
FromSupervisor = Drain | Stop | StatusReply

decode_to_supervisor: Decoder[ToSupervisor] = Decoder(ToSupervisor)
decode_from_supervisor: Decoder[FromSupervisor] = Decoder(FromSupervisor)

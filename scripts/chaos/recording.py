"""What a client saw of one stream: every event as it came, with its time."""

import enum

import msgspec


class End(enum.StrEnum):
    """How a stream ended."""

    DONE = "done"
    """`[DONE]` has come."""
    CUT = "cut"
    """The server closed the connection before that."""
    LEFT = "left"
    """The client closed it, as planned."""
    TIMEOUT = "timeout"
    """Nothing ended it in time."""
    UNREACHABLE = "unreachable"
    """No connection could be made."""
    DECLINED = "declined"
    """Another status than 200."""


class Event(msgspec.Struct, frozen=True, array_like=True):
    """One server-sent event."""

    time: float
    """Monotonic, of the arrival of its last byte."""
    data: str
    id: str = ""
    """What a client would come back with, where the server gives any."""


class Recording(msgspec.Struct):
    """One stream from connecting to its end. Times are monotonic seconds."""

    name: str
    opened_at: float
    accepted_at: float | None = None
    """When the status line said 200."""
    status: int | None = None
    events: list[Event] = []
    end: End = End.TIMEOUT
    ended_at: float = 0.0
    num_deferred: int = 0
    """Answers that asked to come again later, before it was accepted."""
    problem: str = ""
    """What was wrong, in words."""

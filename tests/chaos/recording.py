"""What a client received of one stream: every event, with its time."""

import enum

import msgspec


class End(enum.StrEnum):
    """How a stream ended."""

    DONE = "done"
    """`[DONE]` was received."""
    CUT = "cut"
    """The server closed the connection before `[DONE]`."""
    LEFT = "left"
    """The client closed it, as planned."""
    TIMEOUT = "timeout"
    """The deadline passed."""
    UNREACHABLE = "unreachable"
    """No connection could be made."""
    DECLINED = "declined"
    """Another status than 200."""
    GARBLED = "garbled"
    """The response was not valid HTTP."""


class Event(msgspec.Struct, frozen=True, array_like=True):
    """One server-sent event."""

    time: float
    """Monotonic arrival time of its last byte."""
    data: str
    id: str = ""
    """The id for `Last-Event-ID`, if the server sends one."""


class Recording(msgspec.Struct):
    """One stream from connecting to its end. Times are monotonic seconds."""

    name: str
    opened_at: float
    accepted_at: float | None = None
    """Time of the status line with 200."""
    status: int | None = None
    events: list[Event] = []
    end: End = End.TIMEOUT
    ended_at: float = 0.0
    deferrals: list[int] = []
    """Statuses of responses that deferred the request before it was accepted."""
    openings: list[float] = []
    """Start times of its connections."""
    breaks: list[float] = []
    """Times at which a connection broke and the client reconnected."""
    refusals: list[float] = []
    """Times at which a connection was refused and the client tried again."""
    problem: str = ""
    """What was wrong, in words."""

    def opening_before(self, moment: float) -> float:
        """Return the start time of the connection that was open at `moment`."""
        return max((at for at in self.openings if at <= moment), default=self.opened_at)

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
    GARBLED = "garbled"
    """What came was no HTTP."""


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
    deferrals: list[int] = []
    """Statuses of answers that asked to come again later, before it was accepted."""
    openings: list[float] = []
    """When each of its connections was begun."""
    breaks: list[float] = []
    """When a connection broke after which the client came back and read on."""
    refusals: list[float] = []
    """When no connection could be made, and the client tried again."""
    problem: str = ""
    """What was wrong, in words."""

    def opening_before(self, moment: float) -> float:
        """When the connection was begun that was there at a moment."""
        return max((at for at in self.openings if at <= moment), default=self.opened_at)

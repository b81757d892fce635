"""The ids of a message's events: where a stream continues, for a client that reconnects.

After the event `REQUEST.7` seven tokens have been sent. A step may have several events, of which
all but the last have an offset: `REQUEST.7+12` is one of the next step, and events with 12
characters in all have been sent since the seventh token. An event without text counts as one
character. `REQUEST.9u` is the end.
"""

import re
from typing import NamedTuple

from api_proc.resumption.event_ids import StreamPosition, invalid_event_id

_PATTERN = re.compile(r"(\d{1,9})(?:\+(\d{1,9}))?(u?)")


class EventPosition(NamedTuple):
    """The last event that a client has received."""

    num_tokens: int
    offset: int = 0
    """What it has of the events after these tokens."""
    is_end: bool = False

    def id_line(self, request_id: str) -> bytes:
        offset = f"+{self.offset}" if self.offset else ""
        return f"id: {request_id}.{self.num_tokens}{offset}{'u' * self.is_end}\n".encode()


def parse_position(text: str, request_id: str) -> EventPosition | None:
    name, _, position = text.rpartition(".")
    found = _PATTERN.fullmatch(position)
    if found is None or name != request_id:
        return None
    return EventPosition(int(found[1]), int(found[2] or 0), bool(found[3]))


def stream_position(text: str, request_id: str, limits: list[int]) -> StreamPosition:
    """Parse a `Last-Event-ID`; `limits` is the maximal number of tokens of the only sequence."""
    position = parse_position(text, request_id)
    if position is None or position.num_tokens > limits[0]:
        raise invalid_event_id(text, request_id)
    return StreamPosition([position.num_tokens], position.is_end)

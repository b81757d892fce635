"""The ids of a response's events: where a stream continues, for a client that reconnects.

After the event `REQUEST.7-12-31`, whose `sequence_number` is 31, seven tokens have been sent, and
events of the next step with 12 characters in all. An event without a delta counts as one character.
The last event of a step has the number of its tokens, and 0 in the second place. The number of
events cannot be derived from the tokens: it depends on the steps in which they have arrived.
"""

import re
from typing import NamedTuple

from api_proc.resumption.event_ids import StreamPosition, invalid_event_id

_PATTERN = re.compile(r"(\d{1,9})-(\d{1,9})-(\d{1,9})")


class EventPosition(NamedTuple):
    """The last event that a client has received."""

    num_tokens: int
    offset: int
    """What it has of the events after these tokens."""
    sequence_number: int

    def id_line(self, request_id: str) -> bytes:
        return b"id: %b.%d-%d-%d\n" % (request_id.encode(), *self)


START = EventPosition(0, 0, -1)


def parse_position(text: str, request_id: str) -> EventPosition | None:
    name, _, position = text.rpartition(".")
    found = _PATTERN.fullmatch(position)
    if found is None or name != request_id:
        return None
    return EventPosition(*map(int, found.groups()))


def stream_position(text: str, request_id: str, limits: list[int]) -> StreamPosition:
    """Parse a `Last-Event-ID`; `limits` is the maximal number of tokens of the only sequence."""
    position = parse_position(text, request_id)
    if position is None or position.num_tokens > limits[0]:
        raise invalid_event_id(text, request_id)
    return StreamPosition([position.num_tokens])

"""The ids of server-sent events: the position of a stream, for a client that reconnects.

`REQUEST.7` is the event after whose text seven tokens have been sent. Several sequences have one
number each, `REQUEST.7-3-`, which is empty for a sequence that has not begun. A final `u` means
that the usage has been sent too.
"""

import re
from collections.abc import Callable
from typing import NamedTuple

from api_proc.errors import ApiError

MAX_SEQUENCES = 16
"""Events of streams with more sequences have no ids, which would be longer than the events."""
_POSITION = re.compile(r"(\d{0,9}(?:-\d{0,9})*)(u?)")


class StreamPosition(NamedTuple):
    """How much of a stream has been sent."""

    num_sent: list[int | None]
    """Tokens of each sequence; None: it has not begun."""
    is_usage_sent: bool = False


ParsePosition = Callable[[str, str, list[int]], StreamPosition]
"""Parses a `Last-Event-ID`, given the request's id and the maximal tokens of its sequences."""


class EventIds:
    """Counts the tokens sent of each sequence of one stream."""

    def __init__(
        self, request_id: str, num_sent: list[int | None], *, is_resumable: bool = True
    ) -> None:
        """Without a journal there are no ids: some clients read all after `data: ` as JSON."""
        self.num_sent = num_sent
        self._prefix = b"\nid: " + request_id.encode() + b"."
        self._has_ids = is_resumable and len(num_sent) <= MAX_SEQUENCES

    def tag(self, events: list[bytes], index: int, num_tokens: int) -> list[bytes]:
        """Add ids to the events of the next `num_tokens` tokens of a sequence.

        Only the last event contains the tokens; those before it have the previous position.
        """
        if not self._has_ids:
            return events
        num_sent = self.num_sent
        before = num_sent[index] or 0
        if len(num_sent) == 1 and len(events) == 1:  # this is the common case
            num_sent[0] = count = before + num_tokens
            return [b"%b%b%d\n\n" % (events[0][:-2], self._prefix, count)]
        num_sent[index] = before
        tagged = [self._tagged(event) for event in events[:-1]]
        num_sent[index] = before + num_tokens
        return tagged + [self._tagged(event) for event in events[-1:]]

    def tag_usage(self, event: bytes) -> bytes:
        """Add the last id of the stream."""
        return self._tagged(event, b"u") if event else event

    def _tagged(self, event: bytes, mark: bytes = b"") -> bytes:
        if not self._has_ids:
            return event
        counts = ["" if count is None else str(count) for count in self.num_sent]
        return b"%b%b%b%b\n\n" % (event[:-2], self._prefix, "-".join(counts).encode(), mark)


def parse_event_id(text: str, request_id: str, limits: list[int]) -> StreamPosition:
    """Parse a `Last-Event-ID`; `limits` are the maximal numbers of tokens of the sequences."""
    name, _, position = text.rpartition(".")
    found = _POSITION.fullmatch(position)
    counts = [] if found is None else found[1].split("-")
    num_sent = [int(count) if count else None for count in counts]
    if (
        found is None
        or name != request_id
        or len(num_sent) != len(limits)
        or any((count or 0) > limit for count, limit in zip(num_sent, limits, strict=True))
    ):
        raise invalid_event_id(text, request_id)
    return StreamPosition(num_sent, bool(found[2]))


def invalid_event_id(text: str, request_id: str) -> ApiError:
    message = f"Last-Event-ID {text[:200]!r} is not the id of an event of request {request_id}"
    return _invalid(message)


def beyond_the_end(request_id: str, num_sent: int, num_tokens: int) -> ApiError:
    """Return the error of a position that the answer does not reach."""
    message = (
        f"Last-Event-ID states that {num_sent} tokens of a choice were received, and request "
        f"{request_id} has ended after {num_tokens}"
    )
    return _invalid(message)


def _invalid(message: str) -> ApiError:
    return ApiError(400, message, param="Last-Event-ID", code="invalid_last_event_id")

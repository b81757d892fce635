"""The ids of server-sent events: how far a stream has come, for a client that comes back.

`REQUEST.7` is the event after whose text seven tokens are told; with several sequences there is a
number for each, `REQUEST.7-3-`, or none for one that has not begun. `u` at the end: the usage too.
"""

import re

from api_proc.errors import ApiError

MAX_SEQUENCES = 16
"""Streams of more sequences have no ids, which would be longer than what they stand for."""
_PLACE = re.compile(r"(\d{0,9}(?:-\d{0,9})*)(u?)")


class EventIds:
    """Counts what was told of each sequence of one stream."""

    def __init__(self, request_id: str, told: list[int | None]) -> None:
        """Begin where `told` says, by sequence; None: nothing was told."""
        self.told = told
        self.is_usage_told = False
        self._prefix = b"\nid: " + request_id.encode() + b"."
        self._has_ids = len(told) <= MAX_SEQUENCES

    def tag(self, events: list[bytes], index: int, num_tokens: int) -> list[bytes]:
        """Add ids to what `num_tokens` more tokens of a sequence have brought.

        All but the last event stand for what was told before.
        """
        told = self.told
        before = told[index] or 0
        if len(told) == 1 and len(events) == 1:  # almost always
            told[0] = count = before + num_tokens
            return [b"%b%b%d\n\n" % (events[0][:-2], self._prefix, count)]
        if not events:
            told[index] = before + num_tokens
            return events
        told[index] = before
        tagged = [self._tagged(event) for event in events[:-1]]
        told[index] = before + num_tokens
        tagged.append(self._tagged(events[-1]))
        return tagged

    def tag_usage(self, event: bytes) -> bytes:
        """Add the last id."""
        return self._tagged(event, b"u") if event else event

    def _tagged(self, event: bytes, mark: bytes = b"") -> bytes:
        if not self._has_ids:
            return event
        place = "-".join(["" if count is None else str(count) for count in self.told]).encode()
        return b"%b%b%b%b\n\n" % (event[:-2], self._prefix, place, mark)


def parse_event_id(text: str, request_id: str, limits: list[int]) -> tuple[list[int | None], bool]:
    """Read the id of the last event that a client has seen.

    Args:
        text: as the client has sent it.
        request_id: of the request that it should belong to.
        limits: the most tokens of each sequence.

    Returns:
        Tokens told of each sequence, and whether the usage was.

    Raises:
        ApiError: 400 where it is no id of this request.
    """
    name, _, place = text.rpartition(".")
    found = _PLACE.fullmatch(place)
    counts = [] if found is None else found[1].split("-")
    told = [int(count) if count else None for count in counts]
    if (
        found is None
        or name != request_id
        or len(told) != len(limits)
        or any((count or 0) > limit for count, limit in zip(told, limits, strict=True))
    ):
        message = f"Last-Event-ID {text[:200]!r} is no id of an event of request {request_id}"
        raise ApiError(400, message, code="invalid_last_event_id")
    return told, bool(found[2])

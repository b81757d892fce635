"""Stored responses: GET reads them, and later requests continue them.

A response is stored with the input items of its own request only. It names the one that it
continues, so the memory for a conversation grows with its length and not with its square.
"""

from collections import OrderedDict
from collections.abc import Iterator

import msgspec

from api_proc.resumption.journaling import Journaling
from api_proc.resumption.session_log import DropRecord, KeepRecord
from protocol.message import Message

_COMMIT_TIMEOUT_S = 0.25
"""Longest wait of an answer's end for its record in the journal."""
_ENTRY_BYTES = 512
"""About the memory of an entry besides its text."""


class StoredResponse(msgspec.Struct, frozen=True, array_like=True):
    """One response and what it was an answer to."""

    response: bytes
    """JSON of the response."""
    items: bytes
    """JSON of the list of its request's input items."""
    previous_id: str | None
    """The response that its request continued."""

    @property
    def num_bytes(self) -> int:
        return len(self.response) + len(self.items)


class ResponseStore:
    """Responses by id, within bounds; those that were not used for the longest time are dropped."""

    def __init__(self, max_count: int, max_bytes: int) -> None:
        self._max_count, self._max_bytes = max_count, max_bytes
        self._values: OrderedDict[str, StoredResponse] = OrderedDict()
        self.num_bytes = 0
        self.journaling: Journaling | None = None
        """Only with a journal; without one a restart of this process loses all responses."""

    def __len__(self) -> int:
        return len(self._values)

    @property
    def is_recovered(self) -> bool:
        """Whether the responses of a predecessor are known."""
        return self.journaling is None or self.journaling.is_recovered

    def get(self, response_id: str) -> StoredResponse | None:
        stored = self._values.get(response_id)
        if stored is not None:
            self._values.move_to_end(response_id)
        return stored

    def has_room(self, num_bytes: int) -> bool:
        """Return whether a response of this size can be stored at all."""
        return self._max_count > 0 and num_bytes + _ENTRY_BYTES <= self._max_bytes

    async def put(self, response_id: str, stored: StoredResponse) -> None:
        """Store a response, and wait until the journal contains it."""
        if self._add(response_id, stored) and self.journaling is not None:
            self.journaling.write(KeepRecord(response_id, pack(stored)))
            await self.journaling.written(_COMMIT_TIMEOUT_S)

    async def delete(self, response_id: str) -> bool:
        """Remove a response; returns whether it was stored."""
        if response_id not in self._values:
            return False
        self._remove(response_id)
        if self.journaling is not None:
            await self.journaling.written(_COMMIT_TIMEOUT_S)
        return True

    def _add(self, response_id: str, stored: StoredResponse) -> bool:
        if not self.has_room(stored.num_bytes):
            return False
        self.num_bytes -= _size(self._values.pop(response_id, None))
        self._values[response_id] = stored
        self.num_bytes += _size(stored)
        while len(self._values) > self._max_count or self.num_bytes > self._max_bytes:
            self._remove(next(iter(self._values)))
        return True

    def _remove(self, response_id: str) -> None:
        self.num_bytes -= _size(self._values.pop(response_id))
        if self.journaling is not None:
            self.journaling.write(DropRecord(response_id))

    # The journal's side -------------------------------------------------------------------------

    def records(self) -> Iterator[Message]:
        for response_id in list(self._values):
            stored = self._values.get(response_id)
            if stored is not None:  # it was not dropped meanwhile
                yield KeepRecord(response_id, pack(stored))

    def restore(self, values: dict[str, bytes]) -> None:
        newer, self._values, self.num_bytes = self._values, OrderedDict(), 0
        for response_id, value in values.items():
            self._add(response_id, unpack(value))
        for response_id, stored in newer.items():
            self._add(response_id, stored)


pack = msgspec.msgpack.Encoder().encode
unpack = msgspec.msgpack.Decoder(StoredResponse).decode


def _size(stored: StoredResponse | None) -> int:
    return 0 if stored is None else stored.num_bytes + _ENTRY_BYTES

"""The HTTP requests of this process that wait for the engine: to list, to await and to end them."""

import asyncio
import re
from collections.abc import Collection
from itertools import islice
from typing import Protocol

import msgspec
from msgspec import UNSET, UnsetType

from protocol.client.errors import RequestFailed

MAX_SLOTS = 256
"""Maximum number of requests that are listed, the oldest first."""
_PREFIX = re.compile(r"[a-z]+[-_]")
"""The prefix of a request's id within the id of a response: cmpl-, chatcmpl-, embd-."""


class Slot(msgspec.Struct, kw_only=True):
    """One request that waits for the engine."""

    id: int = 0
    """A running number of its process; it does not let a client abort the request."""
    api_server: int | UnsetType = UNSET
    """Index of that process, if there are several."""
    request_id: str | UnsetType = UNSET
    """Only with admin routes."""
    path: str
    state: str
    """"waiting" for its first output, or "running"."""
    age_s: float
    num_sequences: int
    num_prompt_tokens: int
    num_output_tokens: int


class OpenResponse(Protocol):
    """A response that clients can read and cancel while it is generated."""

    id: str

    def snapshot(self) -> bytes:
        """Return its JSON so far."""

    async def cancel(self) -> bytes:
        """End it; return its JSON."""


class OpenRequest(Protocol):
    """One HTTP request with all of its sequences."""

    request_id: str

    @property
    def response(self) -> OpenResponse | None:
        """The response that it creates, if clients know that by another id."""

    def abort(self) -> bool:
        """End it with an error for its client; False: it has not been submitted yet."""

    def fail(self, error: RequestFailed) -> None:
        """End it with this error, unless the request is in a journal and continues later."""

    def slot(self) -> Slot:
        """Describe it; `id` and `request_id` are filled in here."""


class OpenRequests:
    """Open requests in order of arrival. Several may have one id, because clients choose ids."""

    def __init__(self) -> None:
        self._by_number: dict[int, OpenRequest] = {}
        self._numbers: dict[OpenRequest, int] = {}
        self._num_added = 0
        self._has_none = asyncio.Event()
        self._has_none.set()

    def __len__(self) -> int:
        return len(self._by_number)

    def add(self, request: OpenRequest) -> None:
        self._num_added += 1
        self._numbers[request] = self._num_added
        self._by_number[self._num_added] = request
        self._has_none.clear()

    def remove(self, request: OpenRequest) -> None:
        del self._by_number[self._numbers.pop(request)]
        if not self._by_number:
            self._has_none.set()

    async def wait_none(self) -> None:
        """Wait until no request is open; the caller has the deadline."""
        await self._has_none.wait()

    def fail_all(self, error: RequestFailed) -> None:
        for request in list(self._by_number.values()):
            request.fail(error)

    def abort(self, ids: Collection[str]) -> list[str]:
        """Abort requests, by their ids or by those of their responses; returns those found."""
        wanted = {_PREFIX.sub("", given, count=1): given for given in ids}
        wanted |= {given: given for given in ids}
        found = []
        for request in list(self._by_number.values()):
            name = request.request_id
            if name not in wanted and request.response is not None:
                name = request.response.id
            if name in wanted and request.abort():
                found.append(wanted[name])
        return found

    def response(self, response_id: str) -> OpenResponse | None:
        """Return the open response of this id."""
        responses = (request.response for request in self._by_number.values())
        return next((item for item in responses if item and item.id == response_id), None)

    def slots(self, *, with_ids: bool) -> list[Slot]:
        slots = []
        for number, request in islice(self._by_number.items(), MAX_SLOTS):
            slot = request.slot()
            slot.id = number
            if with_ids:
                slot.request_id = request.request_id
            slots.append(slot)
        return slots

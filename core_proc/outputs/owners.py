"""The open requests of every client, and the messages that wait for it."""

from dataclasses import dataclass

from core_proc.request import Request
from protocol.api_core import CoreToClient

Client = bytes
"""Identity of a client's connection."""


@dataclass(slots=True, eq=False)
class Owner:
    """The client of a request, and a record of what the client was sent."""

    client: Client
    request_id: int
    queue_time_s: float | None = None
    """Seconds from the request's acceptance to its first admission; None until then, and for a
    request that came with outputs."""
    sent_first: bool = False
    next_prompt_position: int = 0
    num_reported_tokens: int = 0
    """Prompt tokens whose progress was reported, for requests that ask for it."""


def owner_of(request: Request) -> Owner:
    """Return the owner of a request of a client; the quarantine's own request has none."""
    owner = request.owner
    assert isinstance(owner, Owner)
    return owner


class Owners:
    """Maps the numbers that clients give their requests to the unique ones of the engine."""

    def __init__(self) -> None:
        self._open: dict[Client, dict[int, int]] = {}
        """The engine's number of each open request, by client and by the client's number."""
        self._outgoing: list[tuple[Client, CoreToClient]] = []

    @property
    def num_open(self) -> int:
        return sum(map(len, self._open.values()))

    def has(self, client: Client, request_id: int) -> bool:
        return request_id in self._open.get(client, ())

    def waits_for(self, request: Request) -> bool:
        """Return whether this request is open, and not a later one with the same number."""
        owner = owner_of(request)
        return self._open.get(owner.client, {}).get(owner.request_id) == request.req_id

    def enter(self, client: Client, request_id: int, req_id: int) -> None:
        self._open.setdefault(client, {})[request_id] = req_id

    def remove(self, client: Client, request_id: int) -> int | None:
        """Remove a request; returns the engine's number of it, None if it is not open."""
        return self._open.get(client, {}).pop(request_id, None)

    def drop(self, client: Client) -> list[int]:
        """Remove a client and its messages; returns the engine's numbers of its open requests."""
        self._outgoing = [(peer, message) for peer, message in self._outgoing if peer != client]
        return list(self._open.pop(client, {}).values())

    def post(self, client: Client, message: CoreToClient) -> None:
        self._outgoing.append((client, message))

    def take_outgoing(self) -> list[tuple[Client, CoreToClient]]:
        outgoing, self._outgoing = self._outgoing, []
        return outgoing

"""Who asked for what: every client's open requests, and what it is to be told besides outputs."""

from core_proc.request import Request
from protocol.api_core import CoreToClient

Client = bytes
"""Identity of a client's connection."""


class Owner:
    """What is kept beside each request: whose it is and what was told already."""

    __slots__ = ("client", "next_prompt_position", "request_id", "told_cached")

    def __init__(self, client: Client, request_id: int) -> None:
        self.client = client
        self.request_id = request_id
        self.told_cached = False
        self.next_prompt_position = 0
        """Of the first prompt logprob that was not told yet."""


def owner_of(request: Request) -> Owner:
    """Return what the engine attached to a request."""
    owner = request.owner
    assert isinstance(owner, Owner)
    return owner


class Owners:
    """Clients number their requests as they like; the engine's own numbers are unique."""

    def __init__(self) -> None:
        self._open: dict[Client, dict[int, int]] = {}
        """By client and its number: the engine's."""
        self._mail: list[tuple[Client, CoreToClient]] = []

    @property
    def num_open(self) -> int:
        """Requests of all clients that have not ended."""
        return sum(map(len, self._open.values()))

    def has(self, client: Client, request_id: int) -> bool:
        """Whether a client's request is open."""
        return request_id in self._open.get(client, ())

    def waits_for(self, request: Request) -> bool:
        """Whether it is this one that is open by its client's number, and not a later one."""
        owner = owner_of(request)
        return self._open.get(owner.client, {}).get(owner.request_id) == request.req_id

    def enter(self, client: Client, request_id: int, req_id: int) -> None:
        """A client's request is open from here on; it was not."""
        self._open.setdefault(client, {})[request_id] = req_id

    def remove(self, client: Client, request_id: int) -> int | None:
        """Forget a client's request; returns the engine's number of it, None: it is not open."""
        return self._open.get(client, {}).pop(request_id, None)

    def drop(self, client: Client) -> list[int]:
        """A client is gone; returns the engine's numbers of what it had open.

        What it was to be told is dropped: it is about requests that it may send again.
        """
        self._mail = [(peer, message) for peer, message in self._mail if peer != client]
        return list(self._open.pop(client, {}).values())

    def tell(self, client: Client, message: CoreToClient) -> None:
        """Leave a message for a client."""
        self._mail.append((client, message))

    def take_mail(self) -> list[tuple[Client, CoreToClient]]:
        """Everything that was left, in order."""
        mail, self._mail = self._mail, []
        return mail

"""The open requests of every client, and the messages that wait for it."""

from core_proc.request import Request
from protocol.api_core import CoreToClient

Client = bytes
"""Identity of a client's connection."""


class Owner:
    """The client of a request, and what it was sent already."""

    __slots__ = ("client", "next_prompt_position", "request_id", "sent_cached")

    def __init__(self, client: Client, request_id: int) -> None:
        self.client = client
        self.request_id = request_id
        self.sent_cached = False
        self.next_prompt_position = 0
        """Of the first prompt logprob that was not sent yet."""


def owner_of(request: Request) -> Owner:
    owner = request.owner
    assert isinstance(owner, Owner)
    return owner


class Owners:
    """Maps the numbers that clients give their requests to the unique ones of the engine."""

    def __init__(self) -> None:
        self._open: dict[Client, dict[int, int]] = {}
        """By client and its number: the engine's."""
        self._mail: list[tuple[Client, CoreToClient]] = []

    @property
    def num_open(self) -> int:
        return sum(map(len, self._open.values()))

    def has(self, client: Client, request_id: int) -> bool:
        return request_id in self._open.get(client, ())

    def waits_for(self, request: Request) -> bool:
        """Whether this request is open, and not a later one with the same number."""
        owner = owner_of(request)
        return self._open.get(owner.client, {}).get(owner.request_id) == request.req_id

    def enter(self, client: Client, request_id: int, req_id: int) -> None:
        self._open.setdefault(client, {})[request_id] = req_id

    def remove(self, client: Client, request_id: int) -> int | None:
        """Remove a request; returns the engine's number of it, None if it is not open."""
        return self._open.get(client, {}).pop(request_id, None)

    def drop(self, client: Client) -> list[int]:
        """Remove a client that is gone; returns the engine's numbers of its open requests.

        Its messages are dropped: they are about requests that it may send again.
        """
        self._mail = [(peer, message) for peer, message in self._mail if peer != client]
        return list(self._open.pop(client, {}).values())

    def post(self, client: Client, message: CoreToClient) -> None:
        self._mail.append((client, message))

    def take_mail(self) -> list[tuple[Client, CoreToClient]]:
        mail, self._mail = self._mail, []
        return mail

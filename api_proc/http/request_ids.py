"""Ids of requests, which name the API process that owns them."""

import re
import secrets
import zlib

_DRAWN = re.compile(r"[0-9a-f]{32}-(\d{1,3})")


class RequestIds:
    """Draws ids for one of `count` API processes, and finds the owner of any id.

    With a single process ids name none.
    """

    def __init__(self, index: int = 0, count: int = 1) -> None:
        self.index = index
        self.count = count

    def draw(self) -> str:
        """Return an id that cannot be guessed."""
        return self.own(secrets.token_hex(16))

    def own(self, number: str) -> str:
        """Return an id of this process, given 32 hexadecimal digits."""
        return number if self.count == 1 else f"{number}-{self.index}"

    def owner_of(self, request_id: str) -> int:
        """Return the index of the process that owns a request, given its id without a prefix.

        An id that a client has chosen belongs to a process by its hash, so that all processes
        agree on it.
        """
        drawn = _DRAWN.fullmatch(request_id)
        number = zlib.crc32(request_id.encode()) if drawn is None else int(drawn[1])
        return number % self.count

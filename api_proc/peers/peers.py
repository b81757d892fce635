"""The other API processes of this engine: questions to all of them, and requests for one of them.

Every process serves its routes to the others over a socket in the run directory. What it answers
there concerns only itself, and is never forwarded again.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from api_proc.errors import ApiError, overloaded, unavailable
from api_proc.http.connection import Connection
from api_proc.http.request_ids import RequestIds
from api_proc.peers.directory import Directory, Peer
from api_proc.peers.exchange import Exchange
from api_proc.peers.relay import Relay

ASK_TIMEOUT_S = 0.5
"""Longest wait for an answer that is a part of a sum."""
HEAD_TIMEOUT_S = 5.0
"""Longest wait for the head of a forwarded answer that needs no computing."""
MAX_FORWARDED = 1024
MAX_ASKED = 32
"""Maximum number of questions to other processes at a time: each takes a descriptor."""
_MAX_ANSWER_BYTES = 2**22
_RETRY_S = 0.05


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of one process."""

    index: int
    status: int
    body: bytes


class Peers:
    """Reaches the other processes by their sockets; there may be none at the moment."""

    def __init__(
        self,
        directory: Directory,
        ids: RequestIds,
        owner_timeout_s: float,
        max_forwarded: int = MAX_FORWARDED,
    ) -> None:
        """`owner_timeout_s`: longest wait for the successor of a process that owns a request.

        Past `max_forwarded` requests at a time a request is rejected with 429.
        """
        self._max_forwarded = max_forwarded
        self._asking = asyncio.Semaphore(MAX_ASKED)
        self.directory = directory
        self._ids = ids
        self._owner_timeout_s = owner_timeout_s
        self._num_forwarded = 0
        self._has_none = asyncio.Event()
        self._has_none.set()

    async def wait_none(self) -> None:
        """Wait until no request is being forwarded; the caller has the deadline."""
        await self._has_none.wait()

    # All ----------------------------------------------------------------------------------------

    async def ask_all(
        self, method: str, path: str, body: bytes = b"", *, timeout_s: float = ASK_TIMEOUT_S
    ) -> list[Answer]:
        """Return the answers of all other processes that respond in time."""
        peers = self.directory.others()
        work = [self._ask(peer, method, path, body, timeout_s=timeout_s) for peer in peers]
        return [answer for answer in await asyncio.gather(*work) if answer is not None]

    async def ask_owner(self, request_id: str, path: str, max_bytes: int) -> bytes | None:
        """Return the answer to a GET of the process that owns `request_id`, or its predecessor.

        None: it is not known there. ApiError 503: another process owns it, and cannot answer now.
        """
        owner = self._ids.owner_of(request_id)
        is_unknown = owner == self._ids.index
        for peer in self.directory.of(owner):
            answer = await self._ask(
                peer, "GET", path, timeout_s=HEAD_TIMEOUT_S, max_bytes=max_bytes
            )
            if answer is not None and answer.status == 200:
                return answer.body
            is_unknown = is_unknown or (answer is not None and answer.status == 404)
        if not is_unknown:
            raise unavailable(
                f"the API process {owner}, which owns it, does not answer", "recovering"
            )
        return None

    async def _ask(
        self,
        peer: Peer,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        timeout_s: float,
        max_bytes: int = _MAX_ANSWER_BYTES,
    ) -> Answer | None:
        exchange = None
        try:
            async with asyncio.timeout(timeout_s), self._asking:
                exchange = await Exchange.open(peer.path)
                await exchange.ask(method, path.encode(), body)
                return Answer(peer.index, exchange.status, await exchange.body(max_bytes))
        except (OSError, TimeoutError):
            return None
        finally:
            if exchange is not None:
                exchange.close()

    # One ----------------------------------------------------------------------------------------

    async def forward(
        self,
        connection: Connection,
        request_id: str,
        body: bytes = b"",
        *,
        timeout_s: float | None = HEAD_TIMEOUT_S,
    ) -> bool:
        """Let the process that owns `request_id` answer this HTTP request, whose body was read.

        Returns False where this process has to answer: the id is its own, and no predecessor knows
        it, or the request came from another process. `timeout_s` bounds the wait for the head of
        the answer; None: it may wait for the engine. ApiError 503: the owner has died, and its
        successor does not answer in time.
        """
        if connection.is_forwarded:
            return False
        owner = self._ids.owner_of(request_id)
        is_own = owner == self._ids.index
        peers = self.directory.of(owner)
        if is_own and not peers:
            return False
        deadline = asyncio.get_running_loop().time() + self._owner_timeout_s
        relay = Relay(connection, body, timeout_s)
        connection.watch(relay.close)
        with self._counted():
            while not connection.disconnected:
                if await relay.try_all(peers, passes_404=not is_own):
                    return True
                if is_own:
                    return False
                if asyncio.get_running_loop().time() >= deadline:
                    raise _owner_is_silent(owner)
                await asyncio.sleep(_RETRY_S)
                peers = self.directory.of(owner)
        return True

    @contextmanager
    def _counted(self) -> Iterator[None]:
        limit = self._max_forwarded
        if self._num_forwarded >= limit:
            raise overloaded(f"{limit} requests are forwarded to other API processes")
        self._num_forwarded += 1
        self._has_none.clear()
        try:
            yield
        finally:
            self._num_forwarded -= 1
            if not self._num_forwarded:
                self._has_none.set()


def _owner_is_silent(owner: int) -> ApiError:
    text = f"the API process {owner}, which owns the request, does not answer"
    return unavailable(text, "recovering")

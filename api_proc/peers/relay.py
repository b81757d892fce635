"""Passes one HTTP request on to other API processes, until one of them has answered it."""

import asyncio
import enum
import logging
from collections.abc import Iterable

from api_proc.http.connection import Connection
from api_proc.http.origins import ORIGIN_HEADER
from api_proc.peers.directory import Peer
from api_proc.peers.exchange import Exchange, Headers

_CONNECT_TIMEOUT_S = 1.0
_NOT_FORWARDED = frozenset(
    {b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"expect"}
    | {b"host", b"content-length", b"x-request-id", b"authorization", b"x-api-key", ORIGIN_HEADER}
)
_NOT_RETURNED = frozenset(
    {b"connection", b"transfer-encoding", b"date", b"x-request-id", b"request-id"}
)

log = logging.getLogger("troika.api")


class _Outcome(enum.Enum):
    """What became of an attempt to forward a request."""

    ANSWERED = enum.auto()
    """The client has the answer, or has disconnected."""
    NOT_FOUND = enum.auto()
    UNREACHABLE = enum.auto()


class Relay:
    """One request of a client, and the connection to the process that is asked at the moment."""

    def __init__(self, connection: Connection, body: bytes, timeout_s: float | None) -> None:
        """`timeout_s` bounds the wait for the head of an answer; None: there is no bound."""
        self._connection = connection
        self._body = body
        self._timeout_s = timeout_s
        self._exchange: Exchange | None = None

    def close(self) -> None:
        """Close the connection to the process that is asked."""
        if self._exchange is not None:
            self._exchange.close()

    async def try_all(self, peers: Iterable[Peer], *, passes_404: bool) -> bool:
        """Return whether one of the processes has answered, or the client has disconnected.

        A process that does not know the request may have a predecessor that does, so a 404 is
        passed on only if no other answer can be had, and with `passes_404`.
        """
        not_found: list[Peer] = []
        for peer in peers:
            outcome = await self._ask(peer, passes_404=False)
            if outcome is _Outcome.ANSWERED:
                return True
            if outcome is _Outcome.NOT_FOUND:
                not_found.append(peer)
        if passes_404:
            for peer in not_found:
                if await self._ask(peer, passes_404=True) is _Outcome.ANSWERED:
                    return True
        return False

    async def _ask(self, peer: Peer, *, passes_404: bool) -> _Outcome:
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                exchange = await Exchange.open(peer.path)
        except (OSError, TimeoutError):
            return _Outcome.UNREACHABLE
        self._exchange, connection = exchange, self._connection
        try:
            if connection.disconnected:
                return _Outcome.ANSWERED
            return await self._pass_answer(exchange, passes_404=passes_404)
        except (OSError, TimeoutError):  # the other process has died, or is about to be killed
            if connection.response_started and not connection.disconnected:
                log.info("the owner of request %s has died", connection.request_id)
                await connection.abort()
            is_over = connection.response_started or connection.disconnected
            return _Outcome.ANSWERED if is_over else _Outcome.UNREACHABLE
        finally:
            exchange.close()

    async def _pass_answer(self, exchange: Exchange, *, passes_404: bool) -> _Outcome:
        scope = self._connection.scope
        query: bytes = scope["query_string"]
        target = scope["raw_path"] + (b"?" + query if query else b"")
        async with asyncio.timeout(self._timeout_s):
            await exchange.ask(scope["method"], target, self._body, self._headers())
        if exchange.status == 404 and not passes_404:
            return _Outcome.NOT_FOUND
        headers = [field for field in exchange.headers if field[0] not in _NOT_RETURNED]
        await self._connection.send_stream(exchange.status, headers, exchange.pieces())
        return _Outcome.ANSWERED

    def _headers(self) -> Headers:
        connection = self._connection
        headers = [one for one in connection.scope["headers"] if one[0] not in _NOT_FORWARDED]
        return [
            *headers,
            (b"x-request-id", connection.request_id.encode()),
            (ORIGIN_HEADER, connection.origin.encode()),
        ]

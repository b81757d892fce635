"""A light HTTP/1.1 client: one kept connection, one request at a time.

It must cost less than the server that the soak measures.
"""

import asyncio
from typing import NamedTuple, cast

_HEAD_END = b"\r\n\r\n"
_EVENT_END = b"\n\n"
_MAX_BYTES = 2**22


class ConnectionBroken(Exception):
    """The server has closed the connection, or has sent invalid HTTP."""

    def __init__(self, text: str, *, is_untouched: bool) -> None:
        super().__init__(text)
        self.is_untouched = is_untouched
        """Whether no byte of an answer had arrived: an idle connection may be closed at any
        time."""


class Reply(NamedTuple):
    """The response."""

    status: int
    body: bytes
    """Without chunk framing; only the beginning if the client has left."""
    has_left: bool = False
    """Whether the client has left before the end."""


class HttpConnection(asyncio.Protocol):
    """One connection, opened with `connect`."""

    def __init__(self, host: str) -> None:
        self._host = host.encode()
        self._transport: asyncio.Transport | None = None
        self._closed = asyncio.get_running_loop().create_future()
        self._reset(None)

    @classmethod
    async def connect(cls, host: str, port: int) -> "HttpConnection":
        """Connect.

        Raises:
            OSError: the connection is refused.
        """
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(lambda: cls(f"{host}:{port}"), host, port)
        return connection

    @property
    def is_open(self) -> bool:
        """Return whether another request can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    async def ask(
        self, method: str, path: str, body: bytes, *, timeout_s: float, leave_after: int = 0
    ) -> Reply:
        """Send a request and wait for its whole answer.

        Args:
            method: of HTTP.
            path: with the query.
            body: JSON.
            timeout_s: the longest wait.
            leave_after: disconnect after this number of server-sent events; 0: never.

        Raises:
            TimeoutError: no end in time; the connection is aborted.
            ConnectionBroken: the server has closed the connection.
        """
        if self._transport is None or not self.is_open:
            raise ConnectionBroken("closed before the request", is_untouched=True)
        waiter: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._reset(waiter, leave_after)
        head = (
            f"{method} {path} HTTP/1.1\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nHost: "
        )
        self._transport.write(b"".join((head.encode(), self._host, _HEAD_END, body)))
        timer = asyncio.get_running_loop().call_later(timeout_s, self._on_timeout, waiter)
        try:
            return await waiter
        finally:
            timer.cancel()
            self._reset(None)

    async def close(self) -> None:
        """Close the connection and wait until its descriptor is closed."""
        if self._transport is not None:
            self._transport.abort()
            await self._closed

    # Called by the event loop -------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's class is not a subclass

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if not self._closed.done():
            self._closed.set_result(None)
        if self._waiter is not None and not self._waiter.done():
            text = f"closed after {len(self._buffer)} bytes: {exc}"
            broken = ConnectionBroken(text, is_untouched=not self._buffer)
            self._waiter.set_exception(broken)

    def data_received(self, data: bytes) -> None:
        if self._waiter is None or self._waiter.done():
            return  # the rest of an answer after a timeout
        self._buffer += data
        try:
            reply = self._parse()
        except ValueError as error:
            self._waiter.set_exception(ConnectionBroken(str(error), is_untouched=False))
            self._abort()
            return
        if reply is not None:
            self._waiter.set_result(reply)

    def _reset(self, waiter: asyncio.Future[Reply] | None, leave_after: int = 0) -> None:
        self._waiter: asyncio.Future[Reply] | None = waiter
        self._leave_after = leave_after
        self._buffer = bytearray()
        self._at = 0
        """Position of the next chunk or of the body; 0 before the end of the head."""
        self._status = 0
        self._length: int | None = None
        """The length of the body; None: it is chunked."""
        self._body = bytearray()

    def _parse(self) -> Reply | None:
        """Return the answer if it is complete, or complete enough to leave.

        Raises:
            ValueError: it is not valid HTTP.
        """
        if self._at == 0 and not self._parse_head():
            return None
        if self._length is not None:
            end = self._at + self._length
            if len(self._buffer) < end:
                return None
            return Reply(self._status, bytes(self._buffer[self._at : end]))
        is_whole = self._parse_chunks()
        if self._leave_after and self._body.count(_EVENT_END) >= self._leave_after:
            self._abort()
            return Reply(self._status, bytes(self._body), has_left=True)
        return Reply(self._status, bytes(self._body)) if is_whole else None

    def _parse_head(self) -> bool:
        end = self._buffer.find(_HEAD_END)
        if end < 0:
            return False
        head = bytes(self._buffer[:end]).lower()
        self._at = end + len(_HEAD_END)
        self._status = int(head[9:12])
        if b"transfer-encoding: chunked" in head:
            return True
        place = head.find(b"content-length:")
        if place < 0:
            raise ValueError("an answer without a length")
        self._length = int(head[place + 15 :].split(b"\r\n", 1)[0])
        if self._length > _MAX_BYTES:
            raise ValueError("an answer too long")
        return True

    def _parse_chunks(self) -> bool:
        """Append complete chunks to the body; True after the last chunk."""
        while (line_end := self._buffer.find(b"\r\n", self._at)) >= 0:
            size = int(self._buffer[self._at : line_end], 16)
            end = line_end + 2 + size
            if len(self._buffer) < end + 2:
                break
            self._body += self._buffer[line_end + 2 : end]
            self._at = end + 2
            if size == 0:
                return True
        return False

    def _on_timeout(self, waiter: asyncio.Future[Reply]) -> None:
        if not waiter.done():
            waiter.set_exception(TimeoutError())
            self._abort()

    def _abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

"""One HTTP request to another API process, over its Unix socket."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable

import httptools

_PIECE_BYTES = 64 * 1024

Headers = list[tuple[bytes, bytes]]


class Exchange:
    """A connection that serves one request. All errors of the connection are OSErrors."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._parser = httptools.HttpResponseParser(self)
        self._pieces: list[bytes] = []
        self._has_head = False
        self._is_complete = False
        self.headers: Headers = []

    @classmethod
    async def open(cls, path: str) -> "Exchange":
        return cls(*await asyncio.open_unix_connection(path))

    @property
    def status(self) -> int:
        return int(self._parser.get_status_code())

    async def ask(
        self,
        method: str,
        target: bytes,
        body: bytes = b"",
        headers: Iterable[tuple[bytes, bytes]] = (),
    ) -> None:
        """Send the request, and wait for the head of its response."""
        fields = [
            (b"host", b"peer"),
            (b"connection", b"close"),
            (b"content-length", b"%d" % len(body)),
            *headers,
        ]
        lines = b"".join(b"%b: %b\r\n" % field for field in fields)
        self._writer.write(b"%b %b HTTP/1.1\r\n%b\r\n" % (method.encode(), target, lines))
        self._writer.write(body)
        head = asyncio.ensure_future(self._read_head())
        try:
            # The other process may reject the request before it has read all of the body.
            with contextlib.suppress(ConnectionError):
                await self._writer.drain()
            await head
        finally:
            head.cancel()
        self._is_complete = self._is_complete or method == "HEAD"

    async def _read_head(self) -> None:
        while not self._has_head:
            await self._read()

    async def pieces(self) -> AsyncIterator[bytes]:
        """Iterate over the body as it arrives."""
        while True:
            if self._pieces:
                piece = b"".join(self._pieces)
                self._pieces.clear()
                yield piece
            if self._is_complete:
                return
            await self._read()

    async def body(self, max_bytes: int) -> bytes:
        """Return the whole body."""
        parts: list[bytes] = []
        num_bytes = 0
        async for piece in self.pieces():
            parts.append(piece)
            num_bytes += len(piece)
            if num_bytes > max_bytes:
                raise OSError(f"the answer of an API process exceeds {max_bytes} bytes")
        return b"".join(parts)

    def close(self) -> None:
        """Close the connection; a read that waits fails."""
        self._writer.transport.abort()

    async def _read(self) -> None:
        data = await self._reader.read(_PIECE_BYTES)
        if not data:
            raise ConnectionResetError("the API process has closed the connection")
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise OSError(f"the answer of an API process is not valid: {error}") from error

    # Called by the parser -----------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._has_head = True

    def on_body(self, data: bytes) -> None:
        self._pieces.append(data)

    def on_message_complete(self) -> None:
        self._is_complete = True

"""A small streaming client that records: HTTP/1.1 and server-sent events by hand, on asyncio.

One connection per stream, so that a break is seen where it happens. It serves any server with
OpenAI's API.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from urllib.parse import SplitResult, urlsplit

from scripts.chaos.recording import End, Event, Recording
from scripts.chaos.workload import ChaosRequest

DONE = "[DONE]"
_LINE_LIMIT = 2**22
_DEFAULT_RETRY_S = 0.5
_LONGEST_RETRY_S = 2.0
_COME_AGAIN = (429, 503)


class Declined(Exception):
    """The server has answered something else than 200."""

    def __init__(self, status: int, retry_after_s: float, text: str) -> None:
        super().__init__(f"status {status}: {text[:200]}")
        self.status = status
        self.retry_after_s = retry_after_s


class StreamClient:
    """Opens streams at one server."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        """Take the server's root, such as http://127.0.0.1:8000."""
        self._url: SplitResult = urlsplit(url)
        self._authorization = f"Authorization: Bearer {api_key}\r\n" if api_key else ""

    async def record(
        self, request: ChaosRequest, deadline: float, *, may_leave: bool = True
    ) -> Recording:
        """Open one stream and record it to its end.

        A server that asks to come again later is asked again, up to the deadline.

        Args:
            request: what to ask for.
            deadline: monotonic time at which to stop waiting.
            may_leave: obey `disconnect_after`.
        """
        recording = Recording(request.name, time.monotonic())
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                await self._insist(request, recording, may_leave)
        except TimeoutError:
            recording.problem = "no end in time"
        except (ConnectionResetError, BrokenPipeError) as error:  # before there was an answer
            recording.end, recording.problem = End.CUT, f"{type(error).__name__}: {error}"
        except OSError as error:
            recording.end, recording.problem = End.UNREACHABLE, f"{type(error).__name__}: {error}"
        except Declined as declined:
            recording.end, recording.status = End.DECLINED, declined.status
            recording.problem = str(declined)
        recording.ended_at = time.monotonic()
        return recording

    async def record_all(
        self, requests: Sequence[ChaosRequest], deadline: float, *, may_leave: bool = True
    ) -> list[Recording]:
        """Open all streams at once."""
        return await asyncio.gather(
            *[self.record(request, deadline, may_leave=may_leave) for request in requests]
        )

    async def get(self, path: str, timeout_s: float) -> str:
        """GET a page as text.

        Raises:
            OSError: no connection, or none within the timeout.
            Declined: another status than 200.
        """
        async with asyncio.timeout(timeout_s):
            reader, writer = await self._open(f"GET {path}", "", b"")
            try:
                headers = await _read_head(reader)
                return b"".join([chunk async for chunk in _body(reader, headers)]).decode()
            finally:
                writer.close()

    async def is_reachable(self, timeout_s: float = 1.0) -> bool:
        """Whether a connection can be made."""
        try:
            async with asyncio.timeout(timeout_s):
                _, writer = await asyncio.open_connection(self._url.hostname, self._url.port)
        except OSError:
            return False
        writer.close()
        return True

    async def _insist(self, request: ChaosRequest, recording: Recording, may_leave: bool) -> None:
        while True:
            try:
                await self._stream(request, recording, may_leave)
                return
            except Declined as declined:
                if declined.status not in _COME_AGAIN:
                    raise
                recording.num_deferred += 1
                await asyncio.sleep(min(declined.retry_after_s, _LONGEST_RETRY_S))

    async def _open(
        self, what: str, headers: str, body: bytes
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(
            self._url.hostname, self._url.port, limit=_LINE_LIMIT
        )
        head = (
            f"{what} HTTP/1.1\r\nHost: {self._url.netloc}\r\nConnection: close\r\n"
            f"{self._authorization}{headers}\r\n"
        )
        writer.write(head.encode() + body)
        return reader, writer

    async def _stream(self, request: ChaosRequest, recording: Recording, may_leave: bool) -> None:
        body = json.dumps(request.body).encode()
        headers = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        reader, writer = await self._open(f"POST {request.path}", headers, body)
        try:
            response = await _read_head(reader)
            recording.accepted_at, recording.status = time.monotonic(), 200
            stop_after = request.disconnect_after if may_leave else None
            recording.end = await _read_events(_body(reader, response), recording, stop_after)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            recording.end, recording.problem = End.CUT, f"{type(error).__name__}: {error}"
        finally:
            writer.close()


async def _read_events(
    chunks: AsyncIterator[bytes], recording: Recording, stop_after: int | None
) -> End:
    buffered = b""
    async for chunk in chunks:
        now = time.monotonic()
        *blocks, buffered = (buffered + chunk).split(b"\n\n")
        for block in blocks:
            event = _read_event(block, now)
            if event is None:
                continue
            recording.events.append(event)
            if event.data == DONE:
                return End.DONE
            if stop_after is not None and len(recording.events) >= stop_after:
                return End.LEFT
    recording.problem = recording.problem or "the connection was closed"
    return End.CUT


def _read_event(block: bytes, now: float) -> Event | None:
    """None for a comment that keeps the connection."""
    fields: dict[bytes, list[bytes]] = {}
    for line in block.splitlines():
        name, _, value = line.partition(b":")
        fields.setdefault(name, []).append(value.strip())
    if b"data" not in fields:
        return None
    event_id = fields.get(b"id", [b""])[-1].decode(errors="replace")
    return Event(now, b"\n".join(fields[b"data"]).decode(errors="replace"), event_id)


async def _read_head(reader: asyncio.StreamReader) -> dict[str, str]:
    """The headers of an answer with status 200."""
    line = await reader.readline()
    words = line.split()
    if len(words) < 2 or not words[1].isdigit():
        raise ConnectionResetError("closed without an answer")
    status = int(words[1])
    headers: dict[str, str] = {}
    while (line := await reader.readline()).strip():
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.strip().lower()] = value.strip()
    if status != 200:
        text = b"".join([chunk async for chunk in _body(reader, headers)])
        retry_after = headers.get("retry-after", "")
        retry_s = float(retry_after) if retry_after.isdigit() else _DEFAULT_RETRY_S
        raise Declined(status, retry_s, text.decode(errors="replace"))
    return headers


async def _body(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    """The body in the pieces in which it came."""
    if headers.get("transfer-encoding", "").lower() != "chunked":
        remaining = int(headers.get("content-length", 2**62))
        while remaining > 0 and (piece := await reader.read(min(remaining, 2**16))):
            remaining -= len(piece)
            yield piece
        return
    while size := int((await reader.readline()).strip() or b"-1", 16):
        if size < 0:
            raise ConnectionResetError("closed within the body")
        yield (await reader.readexactly(size + 2))[:-2]

"""A small streaming client that records: HTTP/1.1 and server-sent events on asyncio streams.

It opens one connection per stream, so that a break is attributed to its stream. It works with any
server with OpenAI's API.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from urllib.parse import SplitResult, urlsplit

from tests.chaos.recording import End, Event, Recording
from tests.chaos.workload import ChaosRequest

DONE = "[DONE]"
_LINE_LIMIT = 2**22
_DEFAULT_RETRY_S = 0.5
_LONGEST_RETRY_S = 2.0
_RETRY_STATUSES = (429, 503)
_RETURN_PAUSE_S = 0.02
_REST_TIMEOUT_S = 5.0
"""The longest time from `[DONE]` to the end of the response."""


class Declined(Exception):
    """The server has sent another status than 200."""

    def __init__(self, status: int, retry_after_s: float, text: str) -> None:
        super().__init__(f"status {status}: {text[:200]}")
        self.status = status
        self.retry_after_s = retry_after_s


class Garbled(Exception):
    """The response is not valid HTTP."""


class StreamClient:
    """Opens streams at one server."""

    def __init__(self, url: str, api_key: str | None = None, *, resumes: bool = False) -> None:
        """Take the server's root.

        Args:
            url: such as http://127.0.0.1:8000.
            api_key: if the server requires one.
            resumes: reconnect after a break with the ids of the request and the last event, and
                read on; also when connections are refused for a while.
        """
        self._url: SplitResult = urlsplit(url)
        self._resumes = resumes
        self._authorization = f"Authorization: Bearer {api_key}\r\n" if api_key else ""

    async def record(
        self, request: ChaosRequest, deadline: float, *, may_leave: bool = True
    ) -> Recording:
        """Open one stream and record it to its end.

        A request that is answered with 429 or 503 is sent again, up to the deadline.

        Args:
            request: the request.
            deadline: monotonic time at which to stop waiting.
            may_leave: disconnect after as many tokens as `disconnect_after`.
        """
        recording = Recording(request.name, time.monotonic())
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                await self._retry(request, recording, may_leave)
        except TimeoutError:
            recording.problem = "no end in time"
        except (ConnectionResetError, BrokenPipeError) as error:  # before a response
            recording.end, recording.problem = End.CUT, f"{type(error).__name__}: {error}"
        except OSError as error:
            recording.end, recording.problem = End.UNREACHABLE, f"{type(error).__name__}: {error}"
        except Declined as declined:
            recording.end, recording.status = End.DECLINED, declined.status
            recording.problem = str(declined)
        except Garbled as error:
            recording.end, recording.problem = End.GARBLED, str(error)
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
            OSError: no connection, or a timeout.
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
        """Return whether a connection can be made."""
        try:
            async with asyncio.timeout(timeout_s):
                _, writer = await asyncio.open_connection(self._url.hostname, self._url.port)
        except OSError:
            return False
        writer.close()
        return True

    async def _retry(self, request: ChaosRequest, recording: Recording, may_leave: bool) -> None:
        """Send the request until its stream ends or cannot be resumed."""
        while True:
            try:
                await self._stream(request, recording, may_leave)
            except Declined as declined:
                if declined.status not in _RETRY_STATUSES:
                    raise
                recording.deferrals.append(declined.status)
                await asyncio.sleep(min(declined.retry_after_s, _LONGEST_RETRY_S))
                continue
            except (ConnectionResetError, BrokenPipeError):
                if not self._resumes:
                    raise
                recording.end = End.CUT
            except OSError:
                if not self._resumes:
                    raise
                recording.refusals.append(time.monotonic())
                await asyncio.sleep(_RETURN_PAUSE_S)
                continue
            if recording.end is not End.CUT or not self._resumes:
                return
            recording.breaks.append(time.monotonic())
            recording.end, recording.problem = End.TIMEOUT, ""
            await asyncio.sleep(_RETURN_PAUSE_S)

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
        headers += self._resume_headers(request, recording)
        recording.openings.append(time.monotonic())
        reader, writer = await self._open(f"POST {request.path}", headers, body)
        try:
            response = await _read_head(reader)
            recording.accepted_at, recording.status = time.monotonic(), 200
            stop_after = request.disconnect_after if may_leave else None
            chunks = _body(reader, response)
            if request.body.get("stream"):
                recording.end = await _read_events(chunks, recording, stop_after)
            else:
                recording.end = await _read_whole(chunks, recording)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            recording.end, recording.problem = End.CUT, f"{type(error).__name__}: {error}"
        except ValueError as error:
            raise Garbled(str(error)) from error
        finally:
            writer.close()

    def _resume_headers(self, request: ChaosRequest, recording: Recording) -> str:
        """Return the headers that identify the stream and the position in it."""
        if not self._resumes or not request.request_id:
            return ""
        last = next((event.id for event in reversed(recording.events) if event.id), None)
        resumption = "" if last is None else f"Last-Event-ID: {last}\r\n"
        return f"X-Request-Id: {request.request_id}\r\n{resumption}"


async def _read_events(
    chunks: AsyncIterator[bytes], recording: Recording, stop_after: int | None
) -> End:
    buffered = b""
    async for chunk in chunks:
        now = time.monotonic()
        *blocks, buffered = (buffered + chunk).split(b"\n\n")
        for number, block in enumerate(blocks):
            event = _read_event(block, now)
            if event is None:
                continue
            recording.events.append(event)
            if event.data == DONE:
                rest = b"".join(piece + b"\n\n" for piece in blocks[number + 1 :]) + buffered
                await _read_rest(chunks, recording, rest)
                return End.DONE
            if stop_after is not None and len(recording.events) >= stop_after:
                return End.LEFT
    recording.problem = recording.problem or "the connection was closed"
    return End.CUT


async def _read_whole(chunks: AsyncIterator[bytes], recording: Recording) -> End:
    """Record an answer in one piece as a stream of one event."""
    body = b"".join([chunk async for chunk in chunks])
    try:
        json.loads(body)
    except ValueError:
        recording.problem = "the connection was closed"
        return End.CUT
    now = time.monotonic()
    recording.events += [Event(now, body.decode()), Event(now, DONE)]
    return End.DONE


async def _read_rest(chunks: AsyncIterator[bytes], recording: Recording, rest: bytes) -> None:
    """Read to the end of the response: no event may follow `[DONE]`."""
    try:
        async with asyncio.timeout(_REST_TIMEOUT_S):
            async for chunk in chunks:
                rest += chunk
    except (asyncio.IncompleteReadError, ConnectionError, TimeoutError, ValueError) as error:
        recording.problem = f"[DONE], but no end of the answer: {type(error).__name__}"
    events = (_read_event(block, time.monotonic()) for block in rest.split(b"\n\n"))
    recording.events += [event for event in events if event is not None]


def _read_event(block: bytes, now: float) -> Event | None:
    """Parse an event; None for a comment that keeps the connection open."""
    fields: dict[bytes, list[bytes]] = {}
    for line in block.splitlines():
        name, _, value = line.partition(b":")
        fields.setdefault(name, []).append(value.strip())
    if b"data" not in fields:
        return None
    event_id = fields.get(b"id", [b""])[-1].decode(errors="replace")
    return Event(now, b"\n".join(fields[b"data"]).decode(errors="replace"), event_id)


async def _read_head(reader: asyncio.StreamReader) -> dict[str, str]:
    """Read the headers of a response with status 200."""
    words = (await _read_line(reader)).split()
    if len(words) < 2 or not words[1].isdigit():
        raise ValueError(f"no status line: {words!r}")
    status = int(words[1])
    headers: dict[str, str] = {}
    while (line := await _read_line(reader)).strip():
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.strip().lower()] = value.strip()
    if status != 200:
        text = b"".join([chunk async for chunk in _body(reader, headers)])
        retry_after = headers.get("retry-after", "")
        retry_s = float(retry_after) if retry_after.isdigit() else _DEFAULT_RETRY_S
        raise Declined(status, retry_s, text.decode(errors="replace"))
    return headers


async def _read_line(reader: asyncio.StreamReader) -> bytes:
    """Read a complete line: half of a number would be another number."""
    line = await reader.readline()
    if not line.endswith(b"\n"):
        raise ConnectionResetError("closed within a line, or before an answer")
    return line


async def _body(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    """Yield the body in the pieces in which it arrives."""
    if headers.get("transfer-encoding", "").lower() != "chunked":
        remaining = int(headers.get("content-length", 2**62))
        while remaining > 0 and (piece := await reader.read(min(remaining, 2**16))):
            remaining -= len(piece)
            yield piece
        return
    while size := int((await _read_line(reader)).strip(), 16):
        yield (await reader.readexactly(size + 2))[:-2]

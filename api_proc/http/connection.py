"""One HTTP request and its response on raw ASGI: bounded reading, disconnects, SSE."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

import msgspec
from starlette.types import Message, Receive, Scope, Send

from api_proc.errors import ApiError
from api_proc.fairness.admission import Admission
from api_proc.fairness.budget import Budget
from api_proc.http.origins import origin_of
from api_proc.http.pieces import PIECE_BYTES, divided
from api_proc.http.request_lease import RequestLease
from api_proc.http.scope import (
    ABORT_KEY,
    HAS_CLIENT_ID_KEY,
    ON_LOST_KEY,
    REQUEST_ID_KEY,
    STYLE_KEY,
    UNREAD_KEY,
    ResponseStyle,
    error_body,
)
from protocol.process.failpoints import failpoint

BODY_TIMEOUT_S = 60.0
LINGER_S = 5.0
"""Longest time in which the rest of a refused body is discarded before the connection is closed."""
LINGER_IDLE_S = 1.0
"""Longest time without any data meanwhile, before the connection is closed."""
KEEP_ALIVE_INTERVAL_S = 15.0
KEEP_ALIVE_COMMENT = b": keep-alive\n\n"

Headers = Iterable[tuple[bytes, bytes]]
JSON = b"application/json"
encode = msgspec.json.Encoder().encode
"""Encodes a response, or a part of one, as JSON."""

T = TypeVar("T")

_CLOSE = (b"connection", b"close")
_FRAMING = (b"content-length", b"transfer-encoding")
"""Headers of requests that have a body."""
_CLOSED = "the handler is closed"
"""uvloop's error for a write to a closed transport."""
_STREAM_START: Message = {
    "type": "http.response.start",
    "status": 200,
    "headers": [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),
    ],
}


class Connection:
    """Reads one body, watches for a disconnect, and sends one response."""

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        keep_alive_interval_s: float = KEEP_ALIVE_INTERVAL_S,
        *,
        budget: Budget | None = None,
        control_budget: Budget | None = None,
        admission: Admission | None = None,
        reading: Admission | None = None,
    ) -> None:
        """`budget` counts the request before its body is read; `admission` delays it afterwards.

        `control_budget` counts a request that ends or controls others instead. `reading` delays
        each part of the body but the first.
        """
        self.lease = RequestLease(budget, control_budget)
        self._admission = admission
        self._reading = reading
        self._unread: bytes | None = None
        self._has_rest = any(
            name in _FRAMING and value != b"0" for name, value in scope.get("headers", ())
        )
        """Whether parts of the body have not been received."""
        self.scope = scope
        self.headers: list[tuple[bytes, bytes]] = []
        """Further headers of the response."""
        self.disconnected = False
        self.response_started = False
        self.is_forwarded = False
        """Whether another API process has sent the request."""
        self._receive = receive
        self._send = send
        self._keep_alive_interval_s = keep_alive_interval_s
        self._tasks: list[asyncio.Task[None]] = []
        self._is_sending = False
        self._num_sent = 0
        self._is_open = True

    @property
    def request_id(self) -> str:
        return str(self.scope[REQUEST_ID_KEY])

    @property
    def has_client_id(self) -> bool:
        """Whether the client chose the request's id."""
        return bool(self.scope.get(HAS_CLIENT_ID_KEY))

    @property
    def origin(self) -> str:
        """The API key or the address that the request came from, or `UNIX_SOCKET`."""
        return origin_of(self.scope, is_forwarded=self.is_forwarded)

    async def read_body(self, max_bytes: int, *, is_control: bool = False) -> bytes:
        """Read the whole body, but at most one chunk more than `max_bytes`; raises `ApiError`.

        `is_control`: the request ends or controls others, see `RequestLease.open`.
        """
        if self._unread is not None:
            raw, self._unread = self._unread, None
            return raw
        self.lease.open(self.origin, is_control=is_control)
        headers = dict(self.scope["headers"])
        if headers.get(b"content-encoding", b"").lower() not in (b"", b"identity"):
            raise _closing(415, "compressed bodies are not supported", "unsupported_encoding")
        declared = headers.get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > max_bytes:
            raise _too_large(max_bytes)
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                raw = await self._read_chunks(max_bytes)
        except TimeoutError:
            message = f"the body was not complete within {BODY_TIMEOUT_S:.0f} s"
            raise _closing(408, message, "timeout") from None
        if self._admission is not None and not is_control:
            await self._admission.enter()
        return raw

    @property
    def has_unread_body(self) -> bool:
        """Whether the next call of `read_body` returns a body that was read before."""
        return self._unread is not None

    def unread(self, raw: bytes) -> None:
        """Let the next call of `read_body` return the body again."""
        self._unread = raw

    async def _read_chunks(self, max_bytes: int) -> bytes:
        chunks: list[bytes] = []
        num_bytes = 0
        more = True
        while more:
            message = await (self._receive_more() if chunks else self._receive())
            if message["type"] == "http.disconnect":
                self.disconnected = True
                raise _disconnected()
            chunks.append(message.get("body", b""))
            self.lease.reserve(len(chunks[-1]))
            num_bytes += len(chunks[-1])
            self._has_rest = more = message.get("more_body", False)
            if num_bytes > max_bytes:
                raise _too_large(max_bytes)
        return b"".join(chunks)

    async def _receive_more(self) -> Message:
        """Receive a further part of the body, in a turn of this client."""
        if self._reading is not None:
            await self._reading.enter()
        return await self._receive()

    async def while_connected(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of work that only this client needs; it is cancelled when that leaves.

        The body must have been read. ApiError: the client has disconnected.
        """
        task = asyncio.ensure_future(work)
        watching = asyncio.create_task(self._watch(task.cancel))
        try:
            return await task
        except asyncio.CancelledError:
            if not self.disconnected:
                raise
            raise _disconnected() from None
        finally:
            watching.cancel()

    @property
    def last_event_id(self) -> str | None:
        """The last event that a reconnecting client has received."""
        value: bytes = dict(self.scope["headers"]).get(b"last-event-id", b"")
        return value.decode("latin-1") or None

    def watch(
        self, on_disconnect: Callable[[], None], num_unread: Callable[[], int] | None = None
    ) -> None:
        """Call `on_disconnect` when the client disconnects. The body must have been read.

        The server ends a connection where `num_unread` counts too many tokens that wait to be sent.
        """
        self.scope[UNREAD_KEY] = num_unread
        listen = self.scope.get(ON_LOST_KEY)
        if listen is None:  # the server of a host lacks it
            self._tasks.append(asyncio.create_task(self._watch(on_disconnect)))
            return

        def end() -> None:
            if self._is_open:
                self._note_lost(on_disconnect)

        listen(end)

    def keep_alive(self) -> None:
        """Start the stream, and send more while it is silent, so that proxies keep it open."""
        self._tasks.append(asyncio.create_task(self._keep_alive()))

    def close(self) -> None:
        """Stop watching and release the request's budget."""
        self._is_open = False
        self.lease.close()
        for task in self._tasks:
            task.cancel()
        self._tasks.clear()
        # They refer to the request, which refers to this connection: memory would be freed late.
        self.scope[UNREAD_KEY] = self.scope[ABORT_KEY] = self.scope[ON_LOST_KEY] = None

    async def abort(self) -> None:
        """Close the connection within a response, so that its client sees that the rest is lost."""
        abort = self.scope.get(ABORT_KEY)
        if abort is not None:
            abort()
            await self._wait_disconnected()

    async def send(
        self,
        status: int,
        body: bytes,
        headers: Headers = (),
        content_type: bytes = JSON,
        *,
        more: bool = False,
    ) -> None:
        """Send a whole response; with `more` the caller ends it."""
        length = (b"content-length", str(len(body)).encode())
        fields = [length, (b"content-type", content_type), *headers, *self.headers]
        self.response_started = True
        await self._write({"type": "http.response.start", "status": status, "headers": fields})
        await self._write({"type": "http.response.body", "body": body, "more_body": more})

    async def send_json(self, value: object, *, status: int = 200, headers: Headers = ()) -> None:
        """Send a whole response, encoded as JSON."""
        await self.send(status, encode(value), headers)

    async def send_pieces(self, pieces: Sequence[bytes]) -> None:
        """Send a response as fast as the client reads, so that no copy of it is buffered."""
        num_bytes = sum(map(len, pieces))
        if num_bytes <= PIECE_BYTES:
            await self.send(200, b"".join(pieces))
            return
        length = (b"content-length", str(num_bytes).encode())
        fields = [length, (b"content-type", JSON), *self.headers]
        self.response_started = True
        await self._write({"type": "http.response.start", "status": 200, "headers": fields})
        for piece in divided(pieces):
            await self._write({"type": "http.response.body", "body": piece, "more_body": True})
        await self._write({"type": "http.response.body", "body": b""})

    async def send_stream(
        self, status: int, headers: Headers, pieces: AsyncIterator[bytes]
    ) -> None:
        """Send a response whose body arrives in pieces."""
        self.response_started = True
        fields = [*headers, *self.headers]
        await self._write({"type": "http.response.start", "status": status, "headers": fields})
        async for piece in pieces:
            await self._write({"type": "http.response.body", "body": piece, "more_body": True})
        await self._write({"type": "http.response.body", "body": b""})

    async def send_error(self, error: ApiError) -> None:
        """Send an error; before the connection is closed, the rest of the body is discarded.

        The system resets a connection that is closed with unread bytes, and a client that sends its
        whole body first would lose the answer.
        """
        body = error_body(self.scope, error)
        if not self._has_rest or not self._closes_after(error):
            await self.send(error.status, body, error.headers)
            return
        await self.send(error.status, body, error.headers, more=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                await self._discard_body()
        await self._write({"type": "http.response.body", "body": b""})

    def _closes_after(self, error: ApiError) -> bool:
        """Return whether the server closes the connection, for the error or as the client asks."""
        asked = dict(self.scope["headers"]).get(b"connection", b"").lower()
        is_old = self.scope.get("http_version") == "1.0"
        return _CLOSE in error.headers or b"close" in asked or is_old

    async def _discard_body(self) -> None:
        while self._has_rest:
            async with asyncio.timeout(LINGER_IDLE_S):
                message = await self._receive_more()
            self._has_rest = message["type"] == "http.request" and message.get("more_body", False)

    async def send_frames(self, frames: Sequence[bytes], *, more: bool = True) -> None:
        """Send parts of server-sent events; waits while the client is too slow.

        Many bytes are written in pieces, so that no copy of them is buffered.
        """
        self._is_sending = True
        if not self.response_started:
            self.response_started = True
            headers = [*_STREAM_START["headers"], *self.headers]
            await self._write({**_STREAM_START, "headers": headers})
        if sum(map(len, frames)) > PIECE_BYTES:
            for piece in divided(frames):
                await self._write({"type": "http.response.body", "body": piece, "more_body": True})
            frames = ()
        if frames or not more:
            last = frames[0] if len(frames) == 1 else b"".join(frames)
            await self._write({"type": "http.response.body", "body": last, "more_body": more})
        self._num_sent += 1
        self._is_sending = False

    async def _write(self, message: Message) -> None:
        """Send, unless the client has disconnected; uvloop may raise before uvicorn reports it."""
        try:
            await self._send(message)
        except RuntimeError as error:
            if _CLOSED not in str(error):
                raise
            await self._wait_disconnected()

    async def _watch(self, on_disconnect: Callable[[], object]) -> None:
        await self._wait_disconnected()
        self._note_lost(on_disconnect)

    def _note_lost(self, on_disconnect: Callable[[], object]) -> None:
        self.disconnected = True
        failpoint("api.before_abort")
        on_disconnect()

    async def _wait_disconnected(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.disconnected = True

    async def _keep_alive(self) -> None:
        style: ResponseStyle | None = self.scope.get(STYLE_KEY)
        frame = KEEP_ALIVE_COMMENT if style is None else style.keep_alive
        while not self.disconnected:
            num_sent = self._num_sent
            await asyncio.sleep(self._keep_alive_interval_s)
            if num_sent == self._num_sent and not self._is_sending:
                await self.send_frames([frame])


def _disconnected() -> ApiError:
    return ApiError(400, "the client closed the connection", code="disconnected")


def _too_large(max_bytes: int) -> ApiError:
    return _closing(413, f"the body may have at most {max_bytes} bytes", "body_too_large")


def _closing(status: int, message: str, code: str) -> ApiError:
    """Return an error that closes the connection, because the rest of the body stays unread."""
    return ApiError(status, message, code=code, headers=(_CLOSE,))

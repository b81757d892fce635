"""One client's connection: bounds on the size of request heads, and clocks for timeouts.

uvicorn's protocol parses requests and writes responses. This subclass keeps clients from holding
memory or a connection without use: heads and trailers are bounded, and the server can ask for how
long a client has neither sent nor read anything. Upgrades are ignored, as HTTP allows.
"""

import asyncio
from collections.abc import Callable
from http import HTTPStatus

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from api_proc.errors import ApiError
from api_proc.http.scope import ABORT_KEY, ON_LOST_KEY, UNREAD_KEY
from api_proc.http.signal import Signal

MAX_UNREAD_TOKENS = 4096
"""Bound for a stream whose client does not read: 16 KiB of token ids, rendered only when sent."""
MAX_UNSENT_BYTES = 1024
"""Bytes in a connection's buffer before its stream waits. The event loop keeps each write as an
object of several times its size. Smaller responses are written at once with their heads."""
HEAD_TIMEOUT_S = 10.0
MAX_HEAD_BYTES = 64 * 1024
"""Bound on the request line with all headers, and on trailers."""
MAX_SMALL_CHUNKS = 2048
SMALL_CHUNK_BYTES = 64
"""A body may have that many chunks, and one more for each of these bytes."""
KEEP_ALIVE_S = 75
"""Longest silence after a response."""
QUIET_TIMEOUT_S = 2.0 * KEEP_ALIVE_S
"""Longest time without a request, for a client that sends the rest of an answered request."""
IDLE_WHEN_FULL_S = 5.0
"""Longest time without a request while no further connection can be accepted."""
_FRAMING = (b"content-length", b"transfer-encoding")


class HttpProtocol(HttpToolsProtocol):
    """The parser and writer of one connection, made by uvicorn for each one."""

    last_active = 0.0
    """Time at which a part of a request was received or a response ended."""
    head_since: float | None = None
    """Time at which an incomplete head, or trailers, began."""
    num_head_bytes = 0
    """Size of that head in reads, without the first read, which may contain other parts."""
    num_field_bytes = 0
    """Size of that head as parsed so far."""
    running: RequestResponseCycle | None = None
    """The request that is being answered; `cycle` is the last one that was parsed."""
    waits_since: float | None = None
    """Time at which the client stopped reading unsent bytes."""
    unsent = 0
    has_taken = False
    """Whether the write buffer has emptied since the last check."""
    on_lost: Callable[[], None] | None = None
    is_lost = False
    _listeners: tuple[Callable[[], None], ...] = ()
    """Called when the connection of the running request is lost."""
    _num_fed = 0
    """Bytes of the present read that count for the head; 0 where the head begins in it."""
    _num_chunks = 0
    """Chunks of the present body."""
    _num_body_bytes = 0
    _is_in_body = False
    """Whether the next byte comes after the end of a head and before the end of its message."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=MAX_UNSENT_BYTES)
        self.flow._is_writable_event = Signal(is_set=True)  # type: ignore[assignment]
        self.last_active = self.loop.time()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # uvicorn leaves it after a reset, and it refers to all
        if self.running is not None and not self.running.response_complete:
            self.running.disconnected = True  # uvicorn notifies only the last that was parsed
            self.running.message_event.set()
        self.is_lost = True
        for cycle in (self.cycle, self.running):
            if cycle is not None:  # its scope refers to this object: memory would be freed late
                cycle.scope[ON_LOST_KEY] = None  # type: ignore[literal-required]
        listeners, self._listeners = self._listeners, ()
        for listener in listeners:
            self.loop.call_soon(listener)
        if self.on_lost is not None:
            self.on_lost()

    def call_when_lost(self, listener: Callable[[], None]) -> None:
        """Call a function once the running request's connection is lost, unless it is answered."""
        if self.is_lost:
            self.loop.call_soon(listener)
        else:
            self._listeners = (*self._listeners, listener)

    def data_received(self, data: bytes) -> None:
        if not self.is_idle or not self._is_in_body:
            self.last_active = self.loop.time()
        self._unset_keepalive_if_required()
        self._num_fed = len(data)
        try:
            self._feed(memoryview(data))
        except httptools.HttpParserError:
            if self.num_field_bytes <= MAX_HEAD_BYTES:
                self.refuse(400, "the request is not valid HTTP")
                return
        if self.head_since is not None:
            self.num_head_bytes += self._num_fed
        if max(self.num_head_bytes, self.num_field_bytes) > MAX_HEAD_BYTES:
            self.refuse(431, f"the head of a request may have at most {MAX_HEAD_BYTES} bytes")

    def _feed(self, data: memoryview) -> None:
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
                self._ignore_upgrade()

    def _ignore_upgrade(self) -> None:
        """Begin a new parser inside the request's body, which the old one would not parse."""
        framing = [field for field in self.headers if field[0] in _FRAMING]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        lines = b"".join(b"%b: %b\r\n" % field for field in framing)
        self.parser.feed_data(b"POST / HTTP/1.1\r\n" + lines + b"\r\n")

    def on_message_begin(self) -> None:
        if self._is_in_body:
            return  # a new parser continues with the same message
        self._begin_head()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self._is_in_body:
            self._count(len(url))
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + len(b": \r\n"))
        if not self._is_in_body:  # trailers are dropped
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if not self._is_in_body:
            self.scope[ABORT_KEY] = self.transport.abort  # type: ignore[literal-required]
            self.scope[ON_LOST_KEY] = self.call_when_lost  # type: ignore[literal-required]
            super().on_headers_complete()
            self.cycle.message_event = Signal()  # type: ignore[assignment]
            self._is_in_body = True
            self._num_chunks = self._num_body_bytes = 0
            if self.is_idle:  # else it waits in the pipeline
                self.running = self.cycle
        self._end_head()

    def on_chunk_header(self) -> None:
        """The header of the last chunk is followed by trailers, any other by data."""
        self._begin_head()
        self._num_chunks += 1
        if self._num_chunks > MAX_SMALL_CHUNKS + self._num_body_bytes // SMALL_CHUNK_BYTES:
            raise ValueError("the chunks are too small")  # each costs more than its bytes

    def on_body(self, body: bytes) -> None:
        self._end_head()
        self._num_body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # its body is still to come
        self._end_head()
        self._is_in_body = False
        super().on_message_complete()

    def _begin_head(self) -> None:
        self.head_since = self.loop.time()
        self.num_head_bytes = self.num_field_bytes = self._num_fed = 0

    def _end_head(self) -> None:
        self.head_since = None
        self.num_head_bytes = self.num_field_bytes = 0

    def _count(self, num_bytes: int) -> None:
        """Count a part of a head; an error, where it is too long, ends the parsing."""
        self.num_field_bytes += num_bytes
        if self.num_field_bytes > MAX_HEAD_BYTES:
            raise ValueError(self.num_field_bytes)

    def on_response_complete(self) -> None:
        self.last_active = self.loop.time()
        self._listeners = ()
        if self.head_since is not None:
            self.head_since = self.last_active  # the server may not have read the pipelined head
        if self.pipeline and not self.transport.is_closing():
            self.running = self.pipeline[-1][0]
        super().on_response_complete()

    def refuse(self, status: int, message: str) -> None:
        """Send an error for a request that has not begun, and close the connection."""
        body = ApiError(status, message, code=HTTPStatus(status).name.lower()).body()
        phrase = HTTPStatus(status).phrase.encode()
        head = b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\n" % (status, phrase)
        head += b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        if not self.transport.is_closing():
            if self._may_respond():
                self.transport.write(head + body)
            self.transport.close()

    def _may_respond(self) -> bool:
        """Return whether the client would match a response with the request being received."""
        if self.running is None or self.running.response_complete:
            return not self._is_in_body
        is_its_body = self._is_in_body and self.running is self.cycle
        return is_its_body and not self.running.response_started

    def resume_writing(self) -> None:
        self.has_taken = True
        super().resume_writing()

    @property
    def is_idle(self) -> bool:
        """Whether no request is being answered."""
        return self.running is None or self.running.response_complete

    def is_stuck(self, now: float, timeout_s: float) -> bool:
        """Return whether the client has not read for too long, or has too much to read."""
        unsent = self.transport.get_write_buffer_size()
        has_taken = self.has_taken or unsent < self.unsent
        is_waiting = unsent > 0 and not has_taken
        is_waiting = is_waiting and (self.flow.write_paused or unsent == self.unsent)
        self.unsent, self.has_taken = unsent, False
        if not is_waiting:
            self.waits_since = None
        elif self.waits_since is None:
            self.waits_since = now
        is_late = self.waits_since is not None and now - self.waits_since >= timeout_s
        return is_late or (unsent > 0 and self.num_unread() > MAX_UNREAD_TOKENS)

    def is_head_late(self, now: float) -> bool:
        """Return whether the client takes too long for a request's head."""
        if self.head_since is None or not self.is_idle:
            return False
        return now - self.head_since > HEAD_TIMEOUT_S

    def is_quiet(self, now: float, is_full: bool) -> bool:
        """Return whether no request has come for too long; `is_full`: other clients wait."""
        limit = IDLE_WHEN_FULL_S if is_full else QUIET_TIMEOUT_S
        return self.is_idle and now - self.last_active > limit

    def num_unread(self) -> int:
        """Return the number of tokens that wait to be sent for the running request."""
        count = None if self.running is None else self.running.scope.get(UNREAD_KEY)
        return 0 if count is None else int(count())  # type: ignore[operator]

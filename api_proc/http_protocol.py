"""One client's connection: the bounds of what it may say, and of how long it may be silent.

uvicorn's protocol turns bytes into requests and answers into bytes. What is added here keeps
clients from holding memory or a connection for nothing: heads and trailers are bounded, and it is
known how long nobody has asked or read. Upgrades are ignored, as HTTP allows.
"""

import asyncio
from collections.abc import Callable
from http import HTTPStatus

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from api_proc.connection import UNREAD_KEY
from api_proc.errors import ApiError

MAX_UNREAD_TOKENS = 4096
"""Of a stream whose client does not read: 16 KiB as they lie in memory, rendered only when sent."""
MAX_UNSENT_BYTES = 1024
"""In a connection's buffer before its stream has to wait: the event loop keeps each write there as
an object, several times its size. Smaller answers go out in one write with their heads."""
HEAD_TIMEOUT_S = 10.0
MAX_HEAD_BYTES = 64 * 1024
"""For a request's line and headers, and for its trailers: whoever takes longer, or says more, holds
a connection."""
KEEP_ALIVE_S = 75
"""After an answer, if nothing at all comes."""
QUIET_TIMEOUT_S = 2.0 * KEEP_ALIVE_S
"""Without a request, whatever else comes: the rest of one that was answered before its end."""
IDLE_WHEN_FULL_S = 5.0
"""The same, while no further connection can be had."""
_FRAMING = (b"content-length", b"transfer-encoding")


class HttpProtocol(HttpToolsProtocol):
    """One connection, which knows how long it has been quiet, and how long nobody has read."""

    last_active = 0.0
    """When something of a request came, or an answer ended."""
    head_since: float | None = None
    """Since when there is a part of a request's head, or of its trailers."""
    num_head_bytes = 0
    """Of that part, by reads; the first of them does not count, since other things stand in it."""
    num_field_bytes = 0
    """Of that part, by what has been parsed of it."""
    running: RequestResponseCycle | None = None
    """The request that is being answered, or was last; `cycle` is the last one that was parsed."""
    waits_since: float | None = None
    """Since when there is something unsent that nobody takes."""
    unsent = 0
    has_taken = False
    """Whether what was too much to be sent has become less since somebody looked."""
    on_lost: Callable[[], None] | None = None
    _num_fed = 0
    """Bytes of the present read, unless the head begins in it."""
    _is_in_body = False
    """From the end of a head to the end of its message."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=MAX_UNSENT_BYTES)
        self.last_active = self.loop.time()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self.running is not None and not self.running.response_complete:
            self.running.disconnected = True  # only the last that was parsed has been told
            self.running.message_event.set()
        if self.on_lost is not None:
            self.on_lost()

    def data_received(self, data: bytes) -> None:
        if not self.is_idle or not self._is_in_body:
            self.last_active = self.loop.time()
        self._unset_keepalive_if_required()
        self._num_fed = len(data)
        try:
            self._feed(memoryview(data))
        except httptools.HttpParserError:
            if self.num_field_bytes <= MAX_HEAD_BYTES:
                self.refuse(400, "this is no valid HTTP")
                return
        if self.head_since is not None:
            self.num_head_bytes += self._num_fed
        if max(self.num_head_bytes, self.num_field_bytes) > MAX_HEAD_BYTES:
            self.refuse(431, f"the head of a request may have {MAX_HEAD_BYTES} bytes")

    def _feed(self, data: memoryview) -> None:
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
                self._ignore_upgrade()

    def _ignore_upgrade(self) -> None:
        """Begin a new parser within the request's body, which the old one would not read."""
        framing = [field for field in self.headers if field[0] in _FRAMING]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        lines = b"".join(b"%b: %b\r\n" % field for field in framing)
        self.parser.feed_data(b"POST / HTTP/1.1\r\n" + lines + b"\r\n")

    def on_message_begin(self) -> None:
        if self._is_in_body:
            return  # the same message, to a parser that goes on with it
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
            super().on_headers_complete()
            self._is_in_body = True
            if self.is_idle:  # else it waits in the pipeline
                self.running = self.cycle
        self._end_head()

    def on_chunk_header(self) -> None:
        """After the last chunk's header come trailers, after the others data."""
        self._begin_head()

    def on_body(self, body: bytes) -> None:
        self._end_head()
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
        """Note a part of a head.

        Raises:
            ValueError: it is too long; ends the parsing.
        """
        self.num_field_bytes += num_bytes
        if self.num_field_bytes > MAX_HEAD_BYTES:
            raise ValueError(self.num_field_bytes)

    def on_response_complete(self) -> None:
        self.last_active = self.loop.time()
        if self.head_since is not None:
            self.head_since = self.last_active  # what stood behind this one may not have been read
        if self.pipeline and not self.transport.is_closing():
            self.running = self.pipeline[-1][0]  # begins now
        super().on_response_complete()

    def refuse(self, status: int, message: str) -> None:
        """Answer a request that has not begun, and close."""
        body = ApiError(status, message, code=HTTPStatus(status).name.lower()).body()
        phrase = HTTPStatus(status).phrase.encode()
        head = b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\n" % (status, phrase)
        head += b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        if not self.transport.is_closing():
            if self._may_answer():
                self.transport.write(head + body)
            self.transport.close()

    def _may_answer(self) -> bool:
        """Whether an answer written now would be taken for that of what is being read."""
        if self.running is None or self.running.response_complete:
            return not self._is_in_body
        is_its_body = self._is_in_body and self.running is self.cycle
        return is_its_body and not self.running.response_started

    def resume_writing(self) -> None:
        self.has_taken = True
        super().resume_writing()

    @property
    def is_idle(self) -> bool:
        """Whether no request is under way."""
        return self.running is None or self.running.response_complete

    def is_stuck(self, now: float, timeout_s: float) -> bool:
        """Whether its client has stopped reading for too long, or has too much to read."""
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

    def is_slow_to_ask(self, now: float) -> bool:
        """Whether its client takes too long for a request's head."""
        if self.head_since is None or not self.is_idle:
            return False
        return now - self.head_since > HEAD_TIMEOUT_S

    def is_quiet(self, now: float, is_full: bool) -> bool:
        """Whether nobody has asked anything for too long.

        Args:
            is_full: whether others wait for a connection.
        """
        limit = IDLE_WHEN_FULL_S if is_full else QUIET_TIMEOUT_S
        return self.is_idle and now - self.last_active > limit

    def num_unread(self) -> int:
        """Tokens that wait for the client of the present request."""
        count = None if self.running is None else self.running.scope.get(UNREAD_KEY)
        return 0 if count is None else int(count())  # type: ignore[operator]

"""The access log: one line per HTTP request, written by a thread, in bounded number.

A line has the request's id, status, tokens and times, and never any of its text. A log that is not
read must not delay requests: while a write is in progress, lines wait, and beyond a bound they are
dropped and counted.
"""

import asyncio
import os
import threading
import time
from typing import Any, NamedTuple

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from api_proc.http.middleware import OPEN_PATHS
from api_proc.http.scope import GENERATION_KEY, REQUEST_ID_KEY, STATUS_KEY
from protocol.config import AccessLog, LogFormat

NUM_EACH_SECOND = 50
"""Requests per second up to which all are logged."""
SAMPLE_EVERY = 100
"""Beyond that, one request in this many is logged."""
MAX_WAITING_LINES = 10_000
_FLUSH_S = 0.05
_MAX_WRITE_BYTES = 4096
"""A pipe does not mix writes of this size with those of other processes."""
_MAX_PATH = 200
_DISCONNECTED = 499
"""nginx's status for a client that left before the response."""
_PROBES = OPEN_PATHS | {"/metrics", "/debug/engine"}
"""Routes that are asked for again and again. Of those in `OPEN_PATHS` changes of the status are
logged; the others may be refused to one client and answered to another one."""


class GenerationRecord(NamedTuple):
    """What a request has generated."""

    num_prompt_tokens: int
    num_output_tokens: int
    queue_time_s: float | None
    """Seconds until the engine began with it."""
    time_to_first_token_s: float | None
    is_sent: bool
    """False: it failed, or its client has disconnected."""


class EndedRequest(NamedTuple):
    """An HTTP request that has ended, at a time of day."""

    scope: Scope
    status: int
    time: float
    duration_s: float

    @property
    def generation(self) -> GenerationRecord | None:
        """What the request has generated; None: it was not a generation."""
        record: GenerationRecord | None = self.scope.get(GENERATION_KEY)
        return record

    @property
    def is_error(self) -> bool:
        """Whether the client has received a whole answer that is an error."""
        return self.status >= 400 and self.status != _DISCONNECTED


class AccessLogger:
    """Chooses the requests that are logged, and writes their lines to a descriptor."""

    def __init__(
        self, mode: AccessLog, form: LogFormat, fd: int = 2, *, label: str = "api"
    ) -> None:
        """`label` names this process in each line."""
        self._label = label
        self._is_all = mode is AccessLog.ALL
        self._is_json = form is LogFormat.JSON
        self._fd = fd
        self._second = 0
        self._clock = ""
        self._num_in_second = self._num_skipped = self._num_dropped = 0
        self._probed: dict[str, int] = {}
        """The last status of each probe."""
        self._lines: list[str] = []
        self._timer: asyncio.TimerHandle | None = None
        self._writing = threading.Lock()

    def wants(self, path: str, status: int, now: float) -> bool:
        """Return whether the request is logged; `now` is the time of day in seconds."""
        if int(now) != self._second:
            self._begin_second(int(now))
        if self._is_all:
            return True
        if path in OPEN_PATHS:
            last = self._probed.get(path, 200)
            self._probed[path] = status
            if status == last:
                return False
        elif status == 200 and path in _PROBES:
            return False
        self._num_in_second += 1
        excess = self._num_in_second - NUM_EACH_SECOND
        if excess <= 0 or excess % SAMPLE_EVERY == 0:
            return True
        self._num_skipped += 1
        return False

    def _begin_second(self, second: int) -> None:
        if self._num_skipped:
            number, total = self._num_skipped, self._num_in_second
            text = f"{number} of the {total} requests of that second are not logged"
            self.write(self._note(text))
        self._second = second
        self._clock = time.strftime("%H:%M:%S", time.localtime(second))
        self._num_in_second = self._num_skipped = 0

    def log(self, request: EndedRequest) -> None:
        """Write the line of a request that has ended."""
        self.write(self._json(request) if self._is_json else self._text(request))

    def _text(self, request: EndedRequest) -> str:
        scope, tokens = request.scope, ""
        if (record := request.generation) is not None:
            tokens = (
                f" prompt {record.num_prompt_tokens} output {record.num_output_tokens}"
                f" queue {_shown(record.queue_time_s)}"
                f" first {_shown(record.time_to_first_token_s)}"
            )
            tokens += "" if record.is_sent or request.is_error else " unfinished"
        return (
            f"{self._clock} [{self._label}] {scope['method']} {_path(scope)}"
            f" {request.status}{tokens}"
            f" total {request.duration_s * 1000:.0f} ms {scope[REQUEST_ID_KEY]}\n"
        )

    def _json(self, request: EndedRequest) -> str:
        scope = request.scope
        fields: dict[str, Any] = {
            "time": round(request.time, 3),
            "level": "info",
            "process": self._label,
            "event": "request",
            "request_id": scope[REQUEST_ID_KEY],
            "method": scope["method"],
            "path": _path(scope),
            "status": request.status,
            "duration_s": round(request.duration_s, 4),
        }
        if (record := request.generation) is not None:
            fields["prompt_tokens"] = record.num_prompt_tokens
            fields["output_tokens"] = record.num_output_tokens
            for name in ("queue_time_s", "time_to_first_token_s"):
                seconds: float | None = getattr(record, name)
                fields[name] = None if seconds is None else round(seconds, 4)
            if record.is_sent or not request.is_error:
                fields["finished"] = record.is_sent
        return msgspec.json.encode(fields).decode() + "\n"

    def _note(self, text: str) -> str:
        if not self._is_json:
            return f"{self._clock} [{self._label}] access log: {text}\n"
        fields = {"time": self._second, "level": "info", "process": self._label, "message": text}
        return msgspec.json.encode(fields).decode() + "\n"

    def write(self, line: str) -> None:
        """Write a line soon."""
        if len(self._lines) >= MAX_WAITING_LINES:
            self._num_dropped += 1
            return
        self._lines.append(line)
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(_FLUSH_S, self._flush_in_thread, loop)

    def _flush_in_thread(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._writing.acquire(blocking=False):  # the last write has not ended
            self._timer = loop.call_later(_FLUSH_S, self._flush_in_thread, loop)
            return
        self._timer = None
        threading.Thread(target=self._write_out, args=(self._take(),), daemon=True).start()

    def flush(self) -> None:
        """Write all lines before the process ends, unless a write is stuck."""
        if self._writing.acquire(timeout=_FLUSH_S):
            self._write_out(self._take())

    def _take(self) -> list[str]:
        lines, self._lines = self._lines, []
        if self._num_dropped:
            lines.append(self._note(f"{self._num_dropped} lines were dropped: the log is too slow"))
            self._num_dropped = 0
        return lines

    def _write_out(self, lines: list[str]) -> None:
        """Write lines in pieces, and release the lock that the caller has acquired."""
        try:
            piece = b""
            for line in [*map(str.encode, lines), b""]:
                if piece and (not line or len(piece) + len(line) > _MAX_WRITE_BYTES):
                    os.write(self._fd, piece)
                    piece = b""
                piece += line
        except OSError:
            pass  # the log is gone
        finally:
            self._writing.release()


class AccessLogMiddleware:
    """Logs each request at its end."""

    def __init__(self, app: ASGIApp, logger: AccessLogger) -> None:
        self._app = app
        self._logger = logger

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        try:
            await self._app(scope, receive, send)
        finally:
            now, status = time.time(), scope.get(STATUS_KEY, _DISCONNECTED)
            if self._logger.wants(scope["path"], status, now):
                duration_s = time.perf_counter() - started
                self._logger.log(EndedRequest(scope, status, now, duration_s))


def _shown(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.0f} ms"


def _path(scope: Scope) -> str:
    """Return the path as the client has sent it, shortened, without characters that hide others."""
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    path = raw[:_MAX_PATH].decode("ascii", "backslashreplace")
    return path if path.isprintable() else ascii(path)

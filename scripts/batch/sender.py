"""Sends one line of a batch at a time to a server, until it is answered."""

import http.client
import random
import secrets
import threading
import time
from collections.abc import Callable
from urllib.parse import urlsplit

import msgspec
from msgspec import Raw

from protocol.config.field_errors import json_error_text
from scripts.batch.files import Answer, BatchError, LineError, Request, Response

URLS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"),
    *("/v1/score", "/v1/rerank"),
)
RETRIED = frozenset({408, 429, 502, 503, 504})
"""Statuses of valid requests that may be served later."""
MAX_ANSWER_BYTES = 2**28
_MIN_DELAY_S = 0.05
_MAX_DELAY_S = 5.0


class _Flags(msgspec.Struct):
    stream: bool | None = None


class Server:
    """The server that answers the lines of a batch."""

    def __init__(
        self,
        base_url: str,
        api_key: str | None,
        *,
        request_timeout_s: float,
        retry_timeout_s: float,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """`check` is called before each retry and raises an error if retries are pointless.

        Raises BatchError if `base_url` is not the URL of a server.
        """
        parts = urlsplit(base_url)
        try:
            self._port = parts.port
        except ValueError as error:
            raise BatchError(f"base_url {base_url!r}: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BatchError(f"base_url {base_url!r} must be like http://127.0.0.1:8000/v1")
        self._is_tls = parts.scheme == "https"
        self._host = parts.hostname
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"content-type": "application/json"}
        if api_key is not None:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._request_timeout_s = request_timeout_s
        self._retry_timeout_s = retry_timeout_s
        self._check = check
        self.base_url = base_url
        self.is_stopping = threading.Event()
        """When set, `Sender.answer` stops waiting and raises BatchError."""

    def connect(self) -> http.client.HTTPConnection:
        """Return a connection that is opened by its first request."""
        kind = http.client.HTTPSConnection if self._is_tls else http.client.HTTPConnection
        return kind(self._host, self._port, timeout=self._request_timeout_s)

    def headers(self, request_id: str) -> dict[str, str]:
        return self._headers | {"x-request-id": request_id}

    def path(self, url: str) -> str:
        return self._prefix + url

    def retry_at(self, began: float, delay_s: float, reason: str) -> None:
        """Wait before a retry; raise BatchError after the retry timeout or a stop."""
        self._check()
        if time.monotonic() + delay_s - began > self._retry_timeout_s:
            raise BatchError(
                f"{self.base_url} has not answered for {self._retry_timeout_s:g} s: {reason}; "
                "run the command again to continue"
            )
        if self.is_stopping.wait(delay_s):
            raise BatchError("stopped")


class Sender:
    """One connection to a server, used by one thread."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._connection = server.connect()
        self.num_retries = 0

    def close(self) -> None:
        self._connection.close()

    def answer(self, request: Request) -> Answer:
        """Return the answer to a line; raise BatchError if the server is gone.

        If the connection breaks, the request is sent again with the same id. A server with a
        journal continues it; any other server computes it again.
        """
        name = f"batch_req_{secrets.token_hex(12)}"
        error = problem_of(request)
        if error is not None:
            return Answer(name, request.custom_id, None, error)
        began = time.monotonic()
        delay_s = _MIN_DELAY_S
        while True:
            try:
                response = self._send(request, name)
                if response.status not in RETRIED:
                    return _answer(name, request, response)
                reason = f"status {response.status}"
                wait_s = response.retry_after_s or delay_s
            except (OSError, http.client.HTTPException) as failure:
                self._connection.close()
                reason = str(failure) or type(failure).__name__
                wait_s = delay_s
            self.num_retries += 1
            self._server.retry_at(began, wait_s * random.uniform(1.0, 1.5), reason)
            delay_s = min(2 * delay_s, _MAX_DELAY_S)

    def _send(self, request: Request, request_id: str) -> "_Received":
        headers = self._server.headers(request_id)
        path = self._server.path(request.url)
        self._connection.request("POST", path, bytes(request.body), headers)
        response = self._connection.getresponse()
        body = response.read(MAX_ANSWER_BYTES + 1)
        if len(body) > MAX_ANSWER_BYTES:
            self._connection.close()
        elif response.length:  # a read with a limit does not report an early end
            raise http.client.IncompleteRead(body, response.length)
        return _Received(
            response.status,
            body,
            response.headers.get("x-request-id", request_id),
            _seconds(response.headers.get("retry-after")),
        )


class _Received(msgspec.Struct):
    """A response of the server, unchecked."""

    status: int
    body: bytes
    request_id: str
    retry_after_s: float | None


def problem_of(request: Request) -> LineError | None:
    """Return the reason why a line cannot be sent, or None."""
    if request.method != "POST":
        return LineError("invalid_method", f"method {request.method!r} must be POST")
    if request.url not in URLS:
        return LineError("invalid_url", f"url {request.url!r} must be one of {', '.join(URLS)}")
    try:
        flags = msgspec.json.decode(request.body, type=_Flags)
    except msgspec.ValidationError as error:
        return LineError("invalid_body", json_error_text(error, "body"))
    if flags.stream:
        return LineError("invalid_body", "body: stream is not possible in a batch")
    return None


def _answer(name: str, request: Request, received: _Received) -> Answer:
    if len(received.body) > MAX_ANSWER_BYTES:
        text = f"the answer is longer than {MAX_ANSWER_BYTES} bytes"
        return Answer(name, request.custom_id, None, LineError("answer_too_long", text))
    try:
        msgspec.json.decode(received.body, type=Raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        start = received.body[:200].decode("utf-8", "replace")
        text = f"the answer with status {received.status} is not JSON: {start}"
        return Answer(name, request.custom_id, None, LineError("invalid_answer", text))
    # Outside of its strings JSON may contain line breaks, which end a line of the file.
    body = Raw(received.body.translate(_SPACES))
    response = Response(received.status, received.request_id, body)
    return Answer(name, request.custom_id, response, None)


_SPACES = bytes.maketrans(b"\r\n", b"  ")


def _seconds(value: str | None) -> float | None:
    """Return Retry-After if it is a number of seconds, at most 60, else None."""
    if value is None or not value.isascii() or not value.isdigit():
        return None
    return min(float(value), 60.0)

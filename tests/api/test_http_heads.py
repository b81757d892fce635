"""Heads, trailers, upgrades, silence and pipelining on a connection.

Where the division into reads matters, bytes are passed to the server's protocol directly; responses
come over the socket.
"""

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from api_proc.http import protocol as http_protocol
from api_proc.http.scope import UNREAD_KEY
from tests.api.conftest import MakeServer
from tests.api.fake_engine import FakeClient, LiveServer, wait_until

BODY = json.dumps({"prompt": "hi", "max_tokens": 9}).encode()
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
GET = b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"
H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQ\r\n"


@dataclass
class Line:
    """Both ends of a connection."""

    live: LiveServer
    client: socket.socket
    protocol: Any

    def read(self, data: bytes) -> None:
        """Let the server receive these bytes in one read, unless the connection is closed."""

        def receive() -> None:
            if not self.protocol.transport.is_closing():
                self.protocol.data_received(data)

        self.live.call(receive)

    def received(self, end: bytes | None = None, times: int = 1) -> bytes:
        """Return all bytes until `end` has come `times` times, or the connection is closed."""
        data, deadline = b"", time.monotonic() + 30.0
        while end is None or data.count(end) < times:
            assert time.monotonic() < deadline, data[-1000:]
            with contextlib.suppress(TimeoutError):
                piece = self.client.recv(65536)
                if not piece:
                    assert end is None, data[-1000:]
                    break
                data += piece
        return data


Connect = Callable[[LiveServer], Line]


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Open connections that are closed at the end."""
    with contextlib.ExitStack() as stack:

        def make(live: LiveServer) -> Line:
            address = ("127.0.0.1", live.port)
            client = stack.enter_context(socket.create_connection(address, timeout=0.1))
            wait_until(lambda: bool(protocols_of(live, client)))
            return Line(live, client, protocols_of(live, client)[0])

        yield make


def protocols_of(live: LiveServer, client: socket.socket) -> list[Any]:
    """Return the server's protocol of a connection, once it is accepted."""
    protocols: list[Any] = list(live._server.server_state.connections)
    return [item for item in protocols if item.client == client.getsockname()]


def sized(body: bytes, headers: bytes = b"") -> bytes:
    return POST + headers + b"Content-Length: %d\r\n\r\n" % len(body) + body


def chunked(body: bytes, trailers: bytes = b"") -> bytes:
    half = len(body) // 2
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(c), c) for c in (body[:half], body[half:]))
    return chunks + b"0\r\n" + trailers + b"\r\n"


def long_body() -> bytes:
    return BODY + b" " * 100_000


def test_trailers_are_bounded(connect: Connect, server: LiveServer) -> None:
    line = connect(server)
    line.read(POST + CHUNKED + b"\r\n" + chunked(BODY)[:-2] + b"x-long: ")
    for _ in range(80):
        line.read(b"x" * 1024)
    assert line.received().startswith(b"HTTP/1.1 431 ")
    many = connect(server)
    many.read(POST + CHUNKED + b"\r\n" + chunked(BODY, b"x: yz\r\n" * 12_000))
    assert many.received().startswith(b"HTTP/1.1 431 ")


def test_trailers_are_not_headers(connect: Connect, server: LiveServer) -> None:
    line = connect(server)
    line.read(POST + CHUNKED + b"\r\n" + chunked(long_body(), b"x-request-id: trailing\r\n"))
    scope = line.protocol.cycle.scope
    assert b"The quick" in line.received(b'"usage"')
    assert (b"x-request-id", b"trailing") not in scope["headers"]
    line.read(GET)
    assert line.received(b"\r\n\r\n").startswith(b"HTTP/1.1 200 ")


def test_bytes_before_a_head_do_not_count_for_it(connect: Connect, server: LiveServer) -> None:
    line = connect(server)
    line.read(sized(long_body()) + GET[:10])
    line.read(GET[10:])
    assert line.received(b"HTTP/1.1 200 ", 2).index(b"The quick") > 0
    padded = GET[:-2] + b"x-pad: " + b"x" * 200 + b"\r\n\r\n"
    pipelining = connect(server)
    pipelining.read(padded * 350 + padded[:20])
    pipelining.read(padded[20:])
    pipelining.received(b"HTTP/1.1 200 ", 351)


def test_a_whole_head_in_one_read_is_bounded(connect: Connect, server: LiveServer) -> None:
    for head in (b"x: " + b"x" * 70_000, b"\r\n".join([b"x: yz"] * 12_000)):
        line = connect(server)
        line.read(GET[:-2] + head + b"\r\n\r\n")
        assert line.received().startswith(b"HTTP/1.1 431 ")
    line = connect(server)
    line.read(b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n")
    assert line.received().startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("is_chunked", [False, True])
def test_an_upgrade_is_ignored(
    connect: Connect, server: LiveServer, is_split: bool, is_chunked: bool
) -> None:
    """Java's client sends one with its first request, whose body must be read."""
    line = connect(server)
    request = POST + H2C + CHUNKED + b"\r\n" + chunked(BODY) if is_chunked else sized(BODY, H2C)
    cut = len(request) - 20 if is_split else len(request)
    line.read(request[:cut])
    line.read(request[cut:] + GET[:9])
    assert b"The quick" in line.received(b'"usage"')
    line.read(GET[9:])
    line.received(b"HTTP/1.1 200 ")
    line.read((sized(BODY, H2C) + GET[:-2] + H2C + b"\r\n") * 50)
    received = line.received(b"HTTP/1.1 200 ", 100)
    assert received.count(b"The quick") == 50


def test_invalid_http_gets_a_json_error(connect: Connect, server: LiveServer) -> None:
    for data in (b"\x16\x03\x01 no HTTP\r\n\r\n", POST + CHUNKED + b"\r\n" + b"no number\r\n"):
        line = connect(server)
        line.read(data)
        head, body = line.received().split(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ")
        assert json.loads(body)["error"]["code"] == "bad_request"


def paused_stream(connect: Connect, make_server: MakeServer) -> Line:
    """Return a stream that has begun, with an engine that emits no further token."""
    client = FakeClient()
    client.is_paused = True
    line = connect(make_server(client, keep_alive_interval_s=0.05))
    line.read(sized(json.dumps({"prompt": "hi", "stream": True, "max_tokens": 9}).encode()))
    line.received(b"keep-alive")
    return line


def test_no_error_is_written_within_a_response(connect: Connect, make_server: MakeServer) -> None:
    line = paused_stream(connect, make_server)
    line.read(b"no HTTP at all\r\n\r\n")
    assert b"HTTP/1.1" not in line.received()
    refused = connect(line.live)
    refused.read(b"POST /nothing HTTP/1.1\r\nHost: x\r\n" + CHUNKED + b"\r\n5\r\nabc")
    assert refused.received(b"}}").startswith(b"HTTP/1.1 404 ")
    refused.read(b"de no number")
    assert refused.received() == b""


def test_a_pipelined_request_does_not_hide_the_running_one(
    connect: Connect, make_server: MakeServer
) -> None:
    line = paused_stream(connect, make_server)
    line.protocol.cycle.scope[UNREAD_KEY] = lambda: 5000
    line.read(GET)
    assert line.protocol.num_unread() == 5000
    line.live.call(line.protocol.transport.abort)
    wait_until(lambda: line.protocol not in line.live._server.server_state.connections)
    wait_until(lambda: line.live.client.cancelled == [1])


def test_silence_is_bounded(
    connect: Connect, make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds for clients that never send a request, or continue a rejected one."""
    live = make_server()
    silent, refused = connect(live), connect(live)
    refused.read(b"POST /nothing HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n")
    assert refused.received(b"}}").startswith(b"HTTP/1.1 404 ")
    monkeypatch.setattr(http_protocol, "QUIET_TIMEOUT_S", 0.2)
    deadline = time.monotonic() + 30.0
    while live._server.server_state.connections:
        assert time.monotonic() < deadline
        refused.read(b"x")
        time.sleep(0.01)
    assert silent.received() == refused.received() == b""


def test_a_response_counts_as_activity(connect: Connect, make_server: MakeServer) -> None:
    line = paused_stream(connect, make_server)
    asked = line.protocol.last_active
    line.live.client.is_paused = False
    line.received(b"[DONE]")
    wait_until(lambda: line.protocol.is_idle)
    assert line.protocol.last_active > asked

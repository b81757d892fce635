"""A disconnect is noticed at once and cancels the request."""

import asyncio
import gc
import json
import socket
import struct
from collections.abc import Callable, Iterator
from http.client import HTTPResponse
from typing import Any

import httpx
import pytest
from starlette.types import Message

from api_proc.http.connection import KEEP_ALIVE_INTERVAL_S, Connection
from api_proc.http.protocol import HttpProtocol
from protocol.api_core import AddRequest, RequestOutput
from tests.api.conftest import MakeServer
from tests.api.fake_engine import FakeClient, LiveServer, repeating, wait_until

PATHS = ("/v1/completions", "/v1/chat/completions")
AT_ONCE_S = 0.6 * KEEP_ALIVE_INTERVAL_S
"""Bound on the delay, on a busy machine."""


def ask(live: LiveServer, path: str, *, stream: bool, n: int = 1) -> socket.socket:
    messages = [{"role": "user", "content": "x"}]
    fields = {"prompt": "hi", "messages": messages, "stream": stream, "n": n, "max_tokens": 400}
    return send(live, path, **fields)


def send(live: LiveServer, path: str, **fields: Any) -> socket.socket:
    body = json.dumps(fields).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    connection = socket.create_connection(("127.0.0.1", live.port), timeout=5)
    connection.sendall(head.encode() + body)
    return connection


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def half_close(connection: socket.socket) -> None:
    connection.shutdown(socket.SHUT_WR)


def close(connection: socket.socket) -> None:
    connection.close()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("leave", [close, reset, half_close])
def test_disconnect_before_the_answer_cancels(
    make_server: MakeServer, path: str, stream: bool, leave: object
) -> None:
    client = FakeClient()
    client.is_paused = True
    live = make_server(client)
    with ask(live, path, stream=stream, n=2) as connection:
        wait_until(lambda: len(client.requests) == 2)
        leave(connection)  # type: ignore[operator]
        wait_until(lambda: client.cancelled == [1, 2], timeout_s=AT_ONCE_S)
        wait_until(lambda: len(live.state.open_requests) == 0, timeout_s=AT_ONCE_S)
    assert live.state.metrics.num_finished["abort"] == 2


def test_a_request_that_waits_has_one_task_and_no_copy_of_its_prompt(
    make_server: MakeServer,
) -> None:
    """Thousands may wait. The answer still counts the prompt's tokens, and shows it if asked to."""
    client = FakeClient()
    client.is_paused = True
    live = make_server(client)
    num_tasks = live.call(lambda: len(asyncio.all_tasks()))
    further: list[dict[str, Any]] = [{}, {"n": 2}, {"return_token_ids": True}, {"echo": True}]
    asked = [
        send(live, "/v1/completions", prompt=[*range(70, 100)], max_tokens=2, **fields)
        for fields in further
    ]
    wait_until(lambda: len(client.requests) == 5)
    num_readers = 2  # of the sequences of one request
    expected = num_tasks + len(asked) + num_readers
    wait_until(lambda: live.call(lambda: len(asyncio.all_tasks())) == expected)
    kept = [
        [len(prompt.token_ids) for prompt in request.prompts]  # type: ignore[attr-defined]
        for request in live.state.open_requests._by_number.values()
    ]
    assert sorted(kept) == [[0], [0], [30], [30]]
    client.is_paused = False
    for connection, fields in zip(asked, further, strict=True):
        with connection, HTTPResponse(connection) as response:
            response.begin()
            answer = json.loads(response.read())
        assert answer["usage"]["prompt_tokens"] == 30
        if "return_token_ids" in fields:
            assert answer["choices"][0]["prompt_token_ids"] == [*range(70, 100)]
        if "echo" in fields:
            assert len(answer["choices"][0]["text"]) == 32


@pytest.mark.parametrize("path", PATHS)
def test_disconnect_within_a_stream_cancels(make_server: MakeServer, path: str) -> None:
    def script(add: AddRequest) -> Iterator[RequestOutput]:
        for i, output in enumerate(repeating()(add)):
            client.is_paused = i >= 3
            yield output

    client = FakeClient(script=script)
    live = make_server(client)
    with ask(live, path, stream=True) as connection:
        assert b"200 OK" in connection.recv(1000)
        assert client.cancelled == []
        connection.close()
        wait_until(lambda: client.cancelled == [1], timeout_s=AT_ONCE_S)


@pytest.mark.parametrize("leave", [close, reset])
def test_a_lost_connection_that_was_idle_is_forgotten(
    make_server: MakeServer, leave: Callable[[socket.socket], None]
) -> None:
    """Its timer for idle connections would keep it for more than a minute."""
    live = make_server()
    old = {id(protocol) for protocol in protocols()}
    connection = socket.create_connection(("127.0.0.1", live.port), timeout=5)
    connection.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
    assert connection.recv(2**12)
    assert {id(protocol) for protocol in protocols()} - old
    leave(connection)
    wait_until(lambda: not {id(protocol) for protocol in protocols()} - old)


def protocols() -> list[HttpProtocol]:
    gc.collect()
    return [each for each in gc.get_objects() if isinstance(each, HttpProtocol)]


def test_a_closed_transport_is_a_disconnect() -> None:
    """The client may disconnect between the last check and the write."""

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        raise RuntimeError(
            "unable to perform operation on <TCPTransport closed=True>; the handler is closed"
        )

    connection = Connection({"type": "http"}, receive, send)
    asyncio.run(connection.send(200, b"{}"))
    assert connection.disconnected


def test_disconnect_within_the_body_submits_nothing(make_server: MakeServer) -> None:
    live = make_server()
    with socket.create_connection(("127.0.0.1", live.port), timeout=5) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{"
        )
    assert httpx.get(live.url + "/livez").status_code == 200
    assert live.client.requests == []


def test_pipelined_requests_are_answered_in_order(make_server: MakeServer) -> None:
    live = make_server()
    bodies = [json.dumps({"prompt": "x", "max_tokens": i}).encode() for i in range(1, 6)]
    with socket.create_connection(("127.0.0.1", live.port), timeout=5) as connection:
        for body in bodies:
            head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        received = b""
        while received.count(b'"finish_reason":"length"') < len(bodies):
            piece = connection.recv(2**16)
            assert piece, received
            received += piece
    counts = [received.index(b'"completion_tokens":%d,' % i) for i in range(1, 6)]
    assert counts == sorted(counts)
    assert live.client.cancelled == []


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("has_left", [True, False])
def test_a_disconnect_and_a_deadline_end_the_tokenization(
    make_server: MakeServer, path: str, has_left: bool
) -> None:
    live = make_server(FakeClient())
    events: list[str] = []

    async def encode_for_ever(*_: object, **__: object) -> None:
        events.append("begun")
        try:
            await asyncio.Event().wait()
        finally:
            events.append("ended")

    setattr(live.text, "encode" if path == PATHS[0] else "encode_chat", encode_for_ever)
    if has_left:
        with ask(live, path, stream=False) as connection:
            wait_until(lambda: events == ["begun"])
            close(connection)
    else:
        fields = {"prompt": "x", "messages": [{"role": "user", "content": "x"}], "timeout": 0.05}
        response = httpx.post(live.url + path, json=fields)
        assert (response.status_code, response.json()["error"]["code"]) == (
            504,
            "deadline_exceeded",
        )
    wait_until(lambda: events == ["begun", "ended"], timeout_s=AT_ONCE_S)
    wait_until(lambda: len(live.state.open_requests) == 0, timeout_s=AT_ONCE_S)


WORK_ON_TEXT = {
    "/v1/embeddings": ("encode", {"input": "x"}),
    "/tokenize": ("encode", {"prompt": "x"}),
    "/detokenize": ("decode", {"tokens": [5]}),
    "/apply-template": ("render", {"messages": [{"role": "user", "content": "x"}]}),
    "/v1/messages/count_tokens": (
        "encode_chat",
        {"model": "null", "messages": [{"role": "user", "content": "x"}]},
    ),
}


@pytest.mark.parametrize("path", WORK_ON_TEXT)
def test_a_disconnect_ends_the_work_on_a_text(make_server: MakeServer, path: str) -> None:
    live = make_server(FakeClient())
    events: list[str] = []

    async def work_for_ever(*_: object, **__: object) -> None:
        events.append("begun")
        try:
            await asyncio.Event().wait()
        finally:
            events.append("ended")

    method, fields = WORK_ON_TEXT[path]
    setattr(live.text, method, work_for_ever)
    with send(live, path, **fields) as connection:
        wait_until(lambda: events == ["begun"])
        close(connection)
    wait_until(lambda: events == ["begun", "ended"], timeout_s=AT_ONCE_S)
    wait_until(lambda: live.state.budget.num_requests == 0, timeout_s=AT_ONCE_S)

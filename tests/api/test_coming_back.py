"""Over HTTP: the same request twice at once, slow readers, more connections than descriptors."""

import asyncio
import contextlib
import errno
import json
import os
import re
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from api_proc.app import start_sessions
from api_proc.generation import serving
from api_proc.http import protocol as http_protocol
from api_proc.http.acceptor import Acceptor
from api_proc.http.json_body import Turn
from api_proc.resumption.sessions import Sessions
from protocol.api_core import AddRequest, RequestOutput
from tests.api.conftest import MakeServer
from tests.api.fake_engine import (
    EOS_ID,
    FakeClient,
    LiveServer,
    emitting,
    ids_of,
    repeating,
    wait_until,
)

PATHS = ("/v1/completions", "/v1/chat/completions")
BODY = {
    "prompt": "hi",
    "messages": [{"role": "user", "content": "x"}],
    "max_tokens": 40,
    "temperature": 1.0,
}


def body_for(path: str, **fields: Any) -> dict[str, Any]:
    unused = "messages" if path == PATHS[0] else "prompt"
    return {name: value for name, value in (BODY | fields).items() if name != unused}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
def test_concurrent_duplicates_run_once(
    make_server: MakeServer, tmp_path: Path, path: str, stream: bool
) -> None:
    """A client may reconnect while its prompt is still being tokenized."""
    live = make_server(journal_dir=str(tmp_path))
    live.call(start_sessions, live.state)
    name = "encode" if path == PATHS[0] else "encode_chat"
    encode, num_waiting, may_go_on = getattr(live.text, name), 0, False

    async def encode_late(*args: Any, **rest: Any) -> Any:
        nonlocal num_waiting
        num_waiting += 1
        while not may_go_on:
            await asyncio.sleep(0.001)
        return await encode(*args, **rest)

    setattr(live.text, name, encode_late)

    def ask(number: int) -> httpx.Response:
        body = body_for(path, stream=stream)
        return httpx.post(live.url + path, json=body, headers={"X-Request-Id": "r"})

    with ThreadPoolExecutor(3) as pool:
        asking = [pool.submit(ask, number) for number in range(3)]
        wait_until(lambda: num_waiting == 3)
        may_go_on = True
        answers = [item.result() for item in asking]
    assert [answer.status_code for answer in answers] == [200] * 3
    texts = {"".join(texts_of(answer, stream)) for answer in answers}
    assert len(texts) == 1
    assert len(live.client.requests) == 1
    live.call(live.state.sessions.close)  # type: ignore[union-attr]


def test_duplicates_wait_until_all_sequences_are_submitted(
    make_server: MakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sequences are submitted in slices, between which other requests are served."""
    live = make_server(journal_dir=str(tmp_path))
    live.call(start_sessions, live.state)
    submitted, num_waiting, num_pauses = Sessions.submitted, 0, 0

    async def wait(sessions: Sessions, request_id: str) -> None:
        nonlocal num_waiting
        num_waiting += 1
        await submitted(sessions, request_id)

    async def pause(_: Turn) -> None:
        nonlocal num_pauses
        num_pauses += 1
        while num_waiting < 2:
            await asyncio.sleep(0.001)

    monkeypatch.setattr(Sessions, "submitted", wait)
    monkeypatch.setattr(Turn, "pause", pause)
    monkeypatch.setattr(serving, "_SLICE_S", -1.0)

    def ask(number: int) -> httpx.Response:
        body = body_for(PATHS[0], n=8)
        return httpx.post(live.url + PATHS[0], json=body, headers={"X-Request-Id": "r"})

    with ThreadPoolExecutor(3) as pool:
        answers = [answer.json()["choices"] for answer in pool.map(ask, range(3))]
    assert num_pauses == 8
    assert len(answers[0]) == len(live.client.requests) == 8
    assert answers == [answers[0]] * 3
    live.call(live.state.sessions.close)  # type: ignore[union-attr]


def texts_of(answer: httpx.Response, stream: bool) -> list[str]:
    """Return the texts of an answer, for any division into events."""
    if not stream:
        return [answer.text]
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    choices = [json.loads(line)["choices"][0] for line in lines]
    return [choice.get("text") or choice.get("delta", {}).get("content", "") for choice in choices]


def post(live: LiveServer, body: dict[str, Any]) -> socket.socket:
    """Open a stream with a small receive buffer."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", live.port))
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


def test_only_stuck_readers_are_dropped(make_server: MakeServer) -> None:
    """A slow reader gets its whole stream; a client that reads nothing is dropped."""
    live = make_server(FakeClient(script=repeating(per_output=4)))
    live._server._slow_reader_timeout_s = 2.5
    connections = live._server.server_state.connections
    body = {"prompt": "hi", "max_tokens": 500, "n": 8, "stream": True, "logprobs": 5}
    slow, stuck = post(live, body), post(live, body)
    received = b""
    started = time.monotonic()
    while not received.endswith(b"0\r\n\r\n"):
        is_over = time.monotonic() - started > 4.5 and len(connections) == 1
        share = 65536 if is_over else 1024
        piece = slow.recv(share)
        assert piece, f"dropped after {time.monotonic() - started:.1f} s"
        received += piece
        time.sleep(0.02 if share == 1024 else 0.0)
    assert received.count(b'"finish_reason":"length"') == 8
    assert time.monotonic() - started > 4.5
    stuck.settimeout(30.0)
    with contextlib.suppress(ConnectionError):
        while stuck.recv(65536):
            pass
    slow.close()
    stuck.close()


class Exhausted(socket.socket):
    """A listening socket for which there are no descriptors."""

    is_exhausted = True
    num_calls = 0

    def accept(self) -> Any:
        self.num_calls += 1
        if self.is_exhausted:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return super().accept()


def test_without_descriptors_connections_wait_without_a_busy_loop() -> None:
    async def play() -> None:
        listening = Exhausted()
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        opened: list[asyncio.Protocol] = []

        def open_one() -> asyncio.Protocol:
            opened.append(asyncio.Protocol())
            return opened[-1]

        acceptor = Acceptor(listening, open_one, lambda: 0, 10)
        acceptor.resume()
        client = socket.create_connection(listening.getsockname())
        began = time.monotonic()
        async with asyncio.timeout(30.0):
            while listening.num_calls < 4:
                await asyncio.sleep(0.005)
            assert time.monotonic() - began > 0.2, "three pauses of a tenth of a second"
            listening.is_exhausted = False
            while not opened:
                await asyncio.sleep(0.005)
        acceptor.close()
        client.close()
        listening.close()

    asyncio.run(play())


def test_an_endless_head_is_rejected(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds a connection for a bounded time, with a bounded amount of memory."""
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_S", 1.0)
    live = make_server()
    dribbling = socket.create_connection(("127.0.0.1", live.port), timeout=0.1)
    endless = socket.create_connection(("127.0.0.1", live.port), timeout=5.0)
    patient = httpx.Client(base_url=live.url)
    assert patient.get("/livez").status_code == 200
    endless.sendall(b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * (66_000 // 6))
    assert endless.recv(1000).startswith(b"HTTP/1.1 431 ")
    wait_until(lambda: not live._server.server_state.tasks)
    dribbling.sendall(b"GET /")
    started, received = time.monotonic(), b""
    while not received:
        assert time.monotonic() - started < 30.0
        with contextlib.suppress(ConnectionError):  # closed; the response was sent before
            dribbling.sendall(b"x")
        with contextlib.suppress(TimeoutError):
            received = dribbling.recv(1000)
    assert received.startswith(b"HTTP/1.1 408 ")
    assert b'"code":"request_timeout"' in received
    assert patient.get("/livez").status_code == 200
    wait_until(lambda: len(live._server.server_state.connections) == 1)
    for connection in (dribbling, endless, patient):
        connection.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("path", PATHS)
def test_without_a_journal_the_rest_of_a_stream_is_not_found(
    make_server: MakeServer, path: str
) -> None:
    """A client would append a repeated answer to the part that it has."""
    live = make_server()
    headers = {"X-Request-Id": "r", "Last-Event-ID": "r.3"}
    answer = httpx.post(live.url + path, json=body_for(path, stream=True), headers=headers)
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "request_not_found"
    assert not live.client.requests
    headers["Last-Event-ID"] = ""
    answer = httpx.post(live.url + path, json=body_for(path, stream=True), headers=headers)
    assert answer.status_code == 200


ROUTES: dict[str, tuple[dict[str, Any], str]] = {
    PATHS[0]: ({}, "r.{}"),
    PATHS[1]: ({}, "r.{}"),
    "/v1/messages": ({"model": "null"}, "r.{}"),
    "/v1/responses": ({"input": "x"}, "r.{}-0-9"),
}
"""By path: the fields of a body that others lack, and how an event's id is written."""


def body_of(path: str) -> dict[str, Any]:
    if path in PATHS:
        return body_for(path, stream=True)
    fields = {"max_output_tokens": 40} if path == "/v1/responses" else body_for(PATHS[1])
    return {**fields, **ROUTES[path][0], "stream": True}


@pytest.mark.parametrize("path", ROUTES)
def test_a_position_past_the_end_of_the_answer_is_an_error_of_the_client(
    make_server: MakeServer, tmp_path: Path, path: str
) -> None:
    """It changes nothing: the stream can still be read from another position."""
    client = FakeClient(script=emitting([*ids_of("hello"), EOS_ID]))
    live = make_server(client, journal_dir=str(tmp_path))
    live.call(start_sessions, live.state)
    with httpx.Client(base_url=live.url, headers={"X-Request-Id": "r"}) as http:

        def come_back(event_id: str) -> httpx.Response:
            return http.post(path, json=body_of(path), headers={"Last-Event-ID": event_id})

        whole = http.post(path, json=body_of(path))
        assert whole.status_code == 200, whole.text
        for num_tokens in (7, 40):
            answer = come_back(ROUTES[path][1].format(num_tokens))
            assert answer.status_code == 400
            assert "has ended after 6" in answer.text
            assert "Last-Event-ID" in answer.text
            if path in PATHS:
                error = answer.json()["error"]
                assert (error["param"], error["code"]) == ("Last-Event-ID", "invalid_last_event_id")
        known = re.findall(r"^id: (r\.\S+)$", whole.text, re.MULTILINE)
        rest = come_back(known[0])
        assert rest.status_code == 200
        assert "Last-Event-ID" not in rest.text
    assert len(client.requests) == 1


@pytest.mark.parametrize("path", ROUTES)
def test_an_answer_that_ends_before_the_position_ends_the_stream_with_that_error(
    make_server: MakeServer, tmp_path: Path, path: str
) -> None:
    """The stream has begun while the request was running; other connections are not concerned."""

    def script(add: AddRequest) -> Iterator[RequestOutput]:
        for i, output in enumerate(emitting([*ids_of("hello"), EOS_ID])(add)):
            client.is_paused = i == 2
            yield output

    client = FakeClient(script=script)
    live = make_server(client, keep_alive_interval_s=0.02, journal_dir=str(tmp_path))
    live.call(start_sessions, live.state)
    headers = {"X-Request-Id": "r"}
    late = headers | {"Last-Event-ID": ROUTES[path][1].format(9)}
    url, body = live.url + path, body_of(path)
    with (
        httpx.stream("POST", url, json=body, headers=headers) as first,
        httpx.stream("POST", url, json=body, headers=late) as second,
    ):
        assert (first.status_code, second.status_code) == (200, 200)
        client.is_paused = False
        whole, wrong = first.read().decode(), second.read().decode()
    assert "Last-Event-ID" not in whole
    assert "Last-Event-ID states that 9 tokens" in wrong
    assert "internal" not in wrong
    if path == "/v1/responses":
        assert '"status":"completed"' in whole
        stored = httpx.get(url + "/" + json.loads(whole.splitlines()[-3][6:])["response"]["id"])
        assert stored.json()["status"] == "completed"

"""What a person sees and may rely on in the first hour: one engine on a Unix socket, with keys."""

import json
import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from api_proc.http.listener import listen_unix
from protocol.lifecycle import Role
from scripts.testing import TIMEOUT_S, Engine, EngineFactory, eventually

VARIABLE_KEY = "key-in-the-environment"
FILE_KEY = "key-in-a-file"
PROMPT = {"model": "second", "prompt": [5, 6, 7], "max_tokens": 4}


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Engine, str]]:
    """A ready engine, and the path of its socket."""
    with EngineFactory() as factory:
        file = Path(factory.base) / "keys"
        file.write_text(FILE_KEY + "\n")
        file.chmod(0o600)
        factory.environ["TROIKA_API_KEY"] = VARIABLE_KEY
        path = f"{factory.base}/socket"
        engine = factory(
            *("--uds", path, "--api-key-file", str(file), "--access-log", "all"),
            *("--served-model-name", "first", "second"),
        )
        engine.ready()
        yield engine, path


def client(path: str, key: str = FILE_KEY) -> httpx.Client:
    return httpx.Client(
        transport=httpx.HTTPTransport(uds=path),
        base_url="http://localhost",
        headers={"authorization": f"Bearer {key}"},
        timeout=TIMEOUT_S,
    )


def test_start_states_what_the_engine_can_hold(served: tuple[Engine, str]) -> None:
    engine, path = served
    eventually(lambda: "null model" in engine.log, "the start is printed")
    assert f"Troika serves first at unix:{path} (ready in " in engine.log
    line = "  context 8,192 tokens; KV cache 131,056 tokens (16.0 requests of full length)\n"
    assert line in engine.log


def test_aliases_name_the_same_model(served: tuple[Engine, str]) -> None:
    _, path = served
    with client(path) as http:
        cards = http.get("/v1/models").json()["data"]
        assert [card["id"] for card in cards] == ["first", "second"]
        assert {card["max_model_len"] for card in cards} == {8192}
        assert http.get("/v1/models/second").json()["id"] == "second"
        assert http.post("/v1/completions", json=PROMPT).json()["model"] == "first"
        wrong = http.post("/v1/completions", json={**PROMPT, "model": "third"})
        assert wrong.status_code == 404
        assert "'first', 'second'" in wrong.json()["error"]["message"]


def test_no_key_is_visible_in_any_process(served: tuple[Engine, str]) -> None:
    """No argv and no environment has one, of the supervisor or of its children."""
    engine, path = served
    for key in (VARIABLE_KEY, FILE_KEY):
        with client(path, key) as http:
            assert http.get("/v1/models").status_code == 200
    pids = {row.pid for row in engine.ready().processes if row.pid is not None}
    assert engine.process.pid in pids
    assert len(pids) >= 4
    for pid in pids:
        for name in ("cmdline", "environ"):
            content = Path(f"/proc/{pid}/{name}").read_bytes()
            assert VARIABLE_KEY.encode() not in content
            assert FILE_KEY.encode() not in content
            assert name == "cmdline" or b"PYTHONPATH" in content, "it can be read"
    assert VARIABLE_KEY not in engine.log
    assert FILE_KEY not in engine.log


def test_death_of_the_api_refuses_no_connection(served: tuple[Engine, str]) -> None:
    """Clients that connect meanwhile wait in the socket that the supervisor holds."""
    engine, path = served
    before = engine.pid(Role.API)
    os.kill(before, signal.SIGKILL)
    waiting = []
    deadline = time.monotonic() + TIMEOUT_S
    while engine.pid(Role.API) == before or len(waiting) < 20:
        assert time.monotonic() < deadline
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(TIMEOUT_S)
        connection.connect(path)
        connection.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        waiting.append(connection)
    for connection in waiting:
        with connection:
            assert connection.recv(100).startswith(b"HTTP/1.1 200 OK")


def test_a_request_is_one_line_and_links_are_not_mentioned(served: tuple[Engine, str]) -> None:
    engine, path = served
    with client(path) as http:
        http.post("/v1/completions", json=PROMPT, headers={"x-request-id": "my-request"})
    eventually(lambda: "my-request" in engine.log, "the request is logged")
    (line,) = [line for line in engine.log.splitlines() if "my-request" in line]
    tokens, times = "prompt 3 output 4", r"queue \d+ ms first \d+ ms total \d+ ms"
    shape = rf"\S+ \[api\] POST /v1/completions 200 {tokens} {times} my-"
    assert re.match(shape, line), line
    engine.kill(Role.WORKER)
    assert "epoch" not in engine.log.replace("of epoch", ""), "deaths have their epoch"
    assert "frames" not in engine.log


def test_the_socket_of_a_killed_engine_is_replaced_and_removed_at_the_end(
    start_engine: EngineFactory,
) -> None:
    path = f"{start_engine.base}/socket"
    listen_unix(path).close()  # as kill -9 leaves it
    engine = start_engine("--uds", path, "--log-format", "json")
    engine.ready()
    with client(path) as http:
        assert http.get("/livez").status_code == 200
    engine.process.terminate()
    assert engine.process.wait(TIMEOUT_S) == 0
    assert not os.path.exists(path)
    lines = [json.loads(line) for line in engine.log.splitlines()]
    assert {"time", "level", "process", "message"} == set(lines[0])
    assert any("Troika serves null" in line["message"] for line in lines)

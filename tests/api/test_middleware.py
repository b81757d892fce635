"""API key, request ids, body limits, unknown routes and methods."""

import asyncio
import contextlib
import http.client
import re
import socket
from collections.abc import Iterator

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.types import Message

from api_proc.app import _ROUTES, openai_app
from api_proc.errors import ApiError
from api_proc.fairness.budget import Budget
from api_proc.http.connection import Connection
from api_proc.http.middleware import OPEN_PATHS
from api_proc.state import ApiState
from api_proc.text.processor import TextProcessor
from protocol.config.settings import configure
from tests.api.conftest import MakeServer
from tests.api.fake_engine import FakeClient, LiveServer

KEY = "sk-ünïque"


@pytest.fixture(scope="module")
def locked() -> Iterator[LiveServer]:
    config = configure(model="null", api_key=KEY)
    with LiveServer(config, FakeClient()) as live:
        yield live


def bearer(key: str) -> dict[bytes, bytes]:
    return {b"Authorization": b"Bearer " + key.encode()}


@pytest.mark.parametrize(("method", "path"), [(method, path) for method, path, _ in _ROUTES])
def test_every_route_but_health_needs_the_key(locked: LiveServer, method: str, path: str) -> None:
    path = path.replace("{name:path}", "null")
    response = httpx.request(method, locked.url + path, content=b"{}")
    assert (response.status_code == 401) == (path not in OPEN_PATHS)
    if response.status_code == 401:
        assert response.json()["error"]["code"] == "invalid_api_key"
    response = httpx.request(method, locked.url + path, content=b"{}", headers=bearer(KEY))
    assert response.status_code in (200, 400) or "{" in path  # there is no such response


@pytest.mark.parametrize(
    "value", [b"", b"Bearer", b"Bearer sk-", b"Basic " + KEY.encode(), b"x" * 30_000]
)
def test_wrong_keys_are_rejected(locked: LiveServer, value: bytes) -> None:
    response = httpx.get(locked.url + "/v1/models", headers={b"Authorization": value})
    assert response.status_code == 401


def test_two_keys_are_rejected(locked: LiveServer) -> None:
    """Proxies and servers differ in which of them counts."""
    name, value = b"Authorization", b"Bearer " + KEY.encode()
    for headers in ([(name, value)] * 2, [(name, b"Bearer x"), (name, value)]):
        assert httpx.get(locked.url + "/v1/models", headers=headers).status_code == 401


@pytest.mark.parametrize(
    "target",
    [
        "//v1/models",
        "/v1/%6dodels",
        "/v1/../v1/models",
        "http://x/v1/models",
        "/health/../v1/models",
        "/health/",
        "/v1/models?x=/health",
        "/v1/models#/health",
    ],
)
def test_odd_spellings_of_a_path_need_the_key(locked: LiveServer, target: str) -> None:
    with socket.create_connection(("127.0.0.1", locked.port), timeout=5) as connection:
        connection.sendall(f"GET {target} HTTP/1.1\r\nHost: x/health?\r\n\r\n".encode())
        assert b" 401 " in connection.recv(200)


def test_scheme_may_be_written_in_any_case(locked: LiveServer) -> None:
    headers = {b"Authorization": b"bearer " + KEY.encode()}
    assert httpx.get(locked.url + "/v1/models", headers=headers).status_code == 200


def test_a_valid_request_id_of_the_client_is_kept(http: httpx.Client) -> None:
    response = http.get("/livez", headers={"x-request-id": "trace-1:2_3.4"})
    assert response.headers["x-request-id"] == "trace-1:2_3.4"


@pytest.mark.parametrize("value", [b"", b"a b", b"../etc", b"x" * 129, "é".encode()])
def test_other_request_ids_are_replaced(http: httpx.Client, value: bytes) -> None:
    response = http.get("/livez", headers={b"x-request-id": value})
    assert re.fullmatch(r"[0-9a-f]{32}", response.headers["x-request-id"])


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "TRACE", "PUT", "DELETE"])
def test_other_methods_are_not_allowed(http: httpx.Client, method: str) -> None:
    response = http.request(method, "/v1/completions")
    assert response.status_code == 405
    assert response.headers["allow"] == "POST"
    if method != "HEAD":
        error = response.json()["error"]
        assert error["code"] == "method_not_allowed"
        assert error["message"].endswith(f"{method} /v1/completions; its methods: POST")


@pytest.mark.parametrize(
    ("method", "path", "methods"),
    [("POST", "/v1/responses/x", "DELETE, GET, HEAD"), ("DELETE", "/ping", "GET, HEAD, POST")],
)
def test_all_methods_of_a_path_are_named(
    http: httpx.Client, method: str, path: str, methods: str
) -> None:
    response = http.request(method, path)
    assert (response.status_code, response.headers["allow"]) == (405, methods)


@pytest.mark.parametrize("path", ["/x", "/v1", "/v1/responses/x/", "/admin/drain", "/%00", "/v2/x"])
def test_unknown_routes_are_not_found(http: httpx.Client, path: str) -> None:
    response = http.post(path, content=b"{}")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found")


def test_slashes_at_the_end_of_a_path_are_left_out(http: httpx.Client) -> None:
    body = {"prompt": "x", "max_tokens": 1}
    for path in ("/v1/completions", "/v1/completions/", "/v1/completions//"):
        response = http.post(path, json=body)
        assert (response.status_code, response.json()["object"]) == (200, "text_completion")
    for path in ("/health/", "/v1/models/"):
        assert http.get(path).status_code == 200
    assert http.get("/v1/completions/").status_code == 404
    refused = http.post("/v1/messages/", json={})
    assert (refused.status_code, refused.json()["type"]) == (400, "error")


@pytest.mark.parametrize(
    ("encoding", "status"), [("gzip", 415), ("br, gzip", 415), ("", 200), ("Identity", 200)]
)
def test_compressed_bodies_are_rejected(http: httpx.Client, encoding: str, status: int) -> None:
    headers = {"content-encoding": encoding}
    body = b'{"prompt": "x", "max_tokens": 1}'
    response = http.post("/v1/completions", content=body, headers=headers)
    assert response.status_code == status


@pytest.mark.parametrize("declared", [True, False])
def test_too_large_a_body_is_not_read_to_its_end(server: LiveServer, declared: bool) -> None:
    size = f"Content-Length: {2**40}" if declared else "Transfer-Encoding: chunked"
    chunk = b"%x\r\n%b\r\n" % (50_000, b" " * 50_000)
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection:
        connection.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\n{size}\r\n\r\n".encode())
        if not declared:
            connection.sendall(chunk * 7)
        received = b""
        while b"body_too_large" not in received:
            received += connection.recv(2**16)
        assert received.startswith(b"HTTP/1.1 413 ")
        if declared:
            while connection.recv(2**16):  # until it is closed
                pass


@pytest.mark.parametrize(
    ("path", "key", "status"),
    [
        ("/v1/completions", KEY, 413),
        ("/v1/completions", "x", 401),
        ("/v1/nothing", KEY, 404),
        ("/livez", KEY, 405),
    ],
)
def test_clients_that_send_first_get_the_error(
    locked: LiveServer, path: str, key: str, status: int
) -> None:
    """A connection that is closed with unread bytes is reset, and its client loses the answer."""
    headers = {"Authorization": b"Bearer " + key.encode(), "Connection": b"close"}
    for _ in range(5):
        connection = http.client.HTTPConnection("127.0.0.1", locked.port, timeout=10)
        with contextlib.closing(connection):
            connection.request("POST", path, b" " * 2**24, headers)
            response = connection.getresponse()
            assert response.status == status
            assert response.read()
            assert response.will_close


def refuse(connection_header: bytes, received: list[Message]) -> list[Message]:
    """Refuse a body of more than one byte, or with no room for it; returns what is sent."""
    sent: list[Message] = []
    headers = [(b"transfer-encoding", b"chunked"), (b"connection", connection_header)]

    async def receive() -> Message:
        return received.pop(0)

    async def send(message: Message) -> None:
        sent.append(message)

    async def act() -> None:
        budget = Budget(0, 1) if len(received) > 1 else None
        scope = {"type": "http", "headers": headers}
        connection = Connection(scope, receive, send, budget=budget)
        with pytest.raises(ApiError) as refused:
            await connection.read_body(1)
        await connection.send_error(refused.value)

    asyncio.run(act())
    assert not sent[-1].get("more_body")
    return sent


def test_a_body_that_has_ended_has_no_rest_to_discard() -> None:
    """The connection of a body that is too large, and was received whole, is closed at once."""
    sent = refuse(b"keep-alive", [{"type": "http.request", "body": b"12"}])
    assert [message.get("status") for message in sent] == [413, None]


@pytest.mark.parametrize(("header", "num_left"), [(b"Close", 0), (b"keep-alive", 2)])
def test_the_rest_of_a_body_is_discarded_where_the_client_asks_for_the_close(
    header: bytes, num_left: int
) -> None:
    """Otherwise the parser discards it, and the connection stays open."""
    parts: list[Message] = [
        {"type": "http.request", "body": b"12", "more_body": True},
        {"type": "http.request", "body": b"34"},
    ]
    sent = refuse(header, parts)
    assert sent[0]["status"] == 429
    assert len(parts) == num_left


def test_application_can_be_mounted_below_a_path(make_server: MakeServer) -> None:
    config = configure(model="null", api_key=KEY)
    client = FakeClient()
    state = ApiState(client, config, TextProcessor.load(config.model))  # type: ignore[arg-type]
    host = Starlette(routes=[Mount("/llm", openai_app(state))])
    transport = httpx.ASGITransport(host)

    async def get(path: str, **headers: str) -> int:
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
            return (await http.get(path, headers=headers)).status_code

    assert asyncio.run(get("/llm/health")) == 200
    assert asyncio.run(get("/llm/v1/models")) == 401
    assert asyncio.run(get("/llm/v1/nothing")) == 401

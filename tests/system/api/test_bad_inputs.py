"""Bad inputs against real processes: each gets its error in a second and harms no other client.

After each one a canary request gets the tokens that it had before, from the same processes. The
bodies of `tests/api/test_bad_input.py` are sent here, too.
"""

import contextlib
import json
import math
import socket
import statistics
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest

from protocol.lifecycle import Role
from scripts.testing import Engine, EngineFactory, eventually
from tests.api.test_bad_input import RAW_ROWS, ROWS, chat, completion
from tests.paths import ROOT
from tests.system.streams import Stream
from tests.timing import within

KEY = "sk-canary"
MAX_S = 1.0
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
AUTH = f"Authorization: Bearer {KEY}\r\n".encode()
GOLDEN = json.dumps(completion(max_tokens=6, seed=3, return_token_ids=True)).encode()
ROLES = (Role.API, Role.CORE, Role.WORKER)


class Response(NamedTuple):
    status: int
    head: bytes
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        error = json.loads(self.body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
        return dict(error)


class Canary:
    """Sends raw requests to one engine, and checks that it is unharmed."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        url = urlsplit(engine.url())
        self.address = (str(url.hostname), int(url.port or 0))
        eventually(lambda: self.send(post(GOLDEN)).status == 200, "it serves")
        self._pids = [engine.pid(role) for role in ROLES]
        self._golden = self._tokens()

    def connect(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=20)

    def send(self, data: bytes) -> Response:
        """Send these bytes and return the first response."""
        with self.connect() as connection:
            with contextlib.suppress(OSError):  # the rest is rejected unread
                connection.sendall(data)
            return response_of(connection)

    def check_tokens(self) -> None:
        assert self._tokens() == self._golden

    def check(self) -> None:
        """Check the tokens of a request, and that no process has died."""
        self.check_tokens()
        assert [self._engine.pid(role) for role in ROLES] == self._pids

    def _tokens(self) -> object:
        response = self.send(post(GOLDEN))
        return json.loads(response.body)["choices"][0]["token_ids"]


def post(body: bytes, path: str = COMPLETIONS, headers: bytes = AUTH) -> bytes:
    length = b"Content-Length: %d\r\n" % len(body)
    return b"POST %b HTTP/1.1\r\nHost: x\r\n%b%b\r\n%b" % (path.encode(), length, headers, body)


def get(path: str, headers: bytes = AUTH, method: bytes = b"GET", host: bytes = b"x") -> bytes:
    return b"%b %b HTTP/1.1\r\nHost: %b\r\n%b\r\n" % (method, path.encode(), host, headers)


def response_of(connection: socket.socket) -> Response:
    """Read one response."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while b"\r\n\r\n" not in data and (piece := connection.recv(65536)):
            data += piece
        head, _, body = data.partition(b"\r\n\r\n")
        length = next(
            (int(line[15:]) for line in head.split(b"\r\n") if line[:15] == b"content-length:"), 0
        )
        while len(body) < length and (piece := connection.recv(65536)):
            body += piece
    assert data, "there is no response"
    return Response(int(head.split(b" ", 2)[1]), head, body)


@pytest.fixture(scope="module")
def canary() -> Iterator[Canary]:
    """One engine serves all tests, with the limits of `tests/api`."""
    with EngineFactory() as start:
        flags = (
            "--max-model-len",
            "512",
            "--max-body-bytes",
            "300000",
            "--num-gpu-blocks-override",
            "200",
        )
        yield Canary(start(*flags, "--api-key", KEY))


def timed(send: Callable[[], Response]) -> Response:
    """Return the response, which has come within a second in one of three attempts."""
    for _ in range(3):
        began = time.monotonic()
        response = send()
        if time.monotonic() - began <= MAX_S:
            return response
    raise AssertionError(f"there was no response within {MAX_S} s")


def test_bad_bodies_are_refused_with_the_field(canary: Canary) -> None:
    for raw, status, param, code in RAW_ROWS:
        response = timed(lambda raw=raw: canary.send(post(raw)))  # type: ignore[misc]
        assert (response.status, response.error["param"], response.error["code"]) == (
            status,
            param,
            code,
        ), raw[:100]
    canary.check()
    for path, body, param, code in ROWS:
        if "1000" in json.dumps(body):  # an id outside the vocabulary of the tests' engine
            continue
        raw = json.dumps(body).encode()
        response = timed(lambda raw=raw, path=path: canary.send(post(raw, path)))  # type: ignore[misc]
        found = (response.status, response.error["param"], response.error["code"])
        assert found == (400, param, code), (raw[:100], response.body)
        canary.check_tokens()
    canary.check()


MUTUAL = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
GRAMMARS: list[tuple[dict[str, Any], str | None]] = [
    # 22: matching takes linear time, so that these are legal.
    ({"guided_regex": "(a+)+b"}, None),
    ({"guided_regex": "(a|aa){1,9999}"}, None),
    ({"guided_regex": "a{1,100000}"}, None),
    ({"guided_regex": "((a{1,100}){1,100}){1,100}"}, None),
    ({"guided_regex": "(?<=a)b"}, "guided_regex"),
    ({"guided_regex": "(a)\\1"}, "guided_regex"),
    ({"guided_regex": "("}, "guided_regex"),
    ({"structured_outputs": {"regex": "[z-a]"}}, "structured_outputs"),
    # 23: schemas; nothing is fetched.
    ({"guided_json": {"$ref": "#"}}, "guided_json"),
    ({"guided_json": MUTUAL}, "guided_json"),
    ({"guided_json": {"$ref": "http://169.254.169.254/schema"}}, "guided_json"),
    ({"guided_json": {"$ref": "file:///etc/passwd"}}, "guided_json"),
    ({"guided_json": {"$ref": "#/$defs/nowhere"}}, "guided_json"),
    ({"guided_json": '{"items":' * 10_000 + "true" + "}" * 10_000}, "guided_json"),
    ({"guided_json": '{"items":' * 500 + "true" + "}" * 500}, "guided_json"),
    ({"guided_json": {"type": "string", "pattern": "("}}, "guided_json"),
    ({"guided_json": {"type": "foo"}}, "guided_json"),
    ({"guided_json": {"enum": []}}, "guided_json"),
    ({"guided_json": {"enum": [f"{i:050}" for i in range(5000)]}}, "guided_json"),
    ({"guided_json": {"enum": [f"{i:050}" for i in range(4000)]}}, None),
    ({"guided_json": {"type": "string", "minLength": 10**9}}, None),
    # 24
    ({"guided_grammar": ""}, "guided_grammar"),
    ({"guided_grammar": "start: start"}, "guided_grammar"),
    ({"guided_grammar": "start: nowhere"}, "guided_grammar"),
    ({"grammar": "root ::= root"}, "grammar"),
    ({"grammar": "root ::= ((("}, "grammar"),
    ({"grammar": 'root ::= root "a" | "b"'}, None),
    ({"guided_grammar": '%llguidance {}\nstart: "a"'}, None),
    ({"guided_decoding_backend": "nonsense"}, None),
]


def function(name: str = "f", **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


PLACE = "tools[0].function"
TOOLS: list[tuple[dict[str, Any], str]] = [
    ({"tools": [function(parameters="x")]}, f"{PLACE}.parameters"),
    ({"tools": [function(parameters={"type": "array"})]}, f"{PLACE}.parameters.type"),
    ({"tools": [function(parameters={"properties": 5})]}, f"{PLACE}.parameters.properties"),
    (
        {
            "tools": [function(parameters={"properties": {"a": {"type": "foo"}}})],
            "tool_choice": "required",
        },
        "tools",
    ),
    ({"tools": [function("x" * 257)]}, f"{PLACE}.name"),
    ({"tools": [function("a b")]}, f"{PLACE}.name"),
    ({"tools": [function()] * 1025}, "tools"),
    ({"tools": [function()], "tool_choice": "sometimes"}, "tool_choice"),
]


def test_bad_grammars_and_tools_are_named(canary: Canary) -> None:
    warm = json.dumps(completion(max_tokens=2, guided_regex="[ab]+")).encode()
    assert canary.send(post(warm)).status == 200, "the process that compiles grammars runs"
    rows = [(COMPLETIONS, completion(max_tokens=2, **fields), param) for fields, param in GRAMMARS]
    rows += [(CHAT, chat(max_tokens=2, **fields), param) for fields, param in TOOLS]
    for path, body, param in rows:
        raw = json.dumps(body).encode()
        response = timed(lambda raw=raw, path=path: canary.send(post(raw, path)))  # type: ignore[misc]
        if param is None:
            assert response.status == 200, (raw[:100], response.body)
        else:
            found = (response.status, response.error["param"], response.error["code"])
            assert found == (400, param, "invalid_value"), (raw[:100], response.body)
        canary.check_tokens()
    huge = json.dumps(chat(tools=[function("x" * 2**20)])).encode()
    assert timed(lambda: canary.send(post(huge, CHAT))).status == 413
    many = json.dumps(chat(tools=[function()] * 10_000)).encode()
    assert timed(lambda: canary.send(post(many, CHAT))).status == 413
    canary.check()


def test_text_of_any_kind_is_answered(canary: Canary) -> None:
    """Texts are one character, many emoji, or special tokens; a long prompt has logprobs."""
    for text in ("a" * 299_000, "".join(chr(0x1F300 + i % 700) for i in range(20_000)), "<s>" * 90):
        response = timed(
            lambda text=text: canary.send(post(json.dumps(completion(prompt=text)).encode()))  # type: ignore[misc]
        )
        assert response.status == (400 if len(text) > 1000 else 200)
        canary.check()
    long = completion(prompt=[5] * 510, prompt_logprobs=20, max_tokens=2)
    assert timed(lambda: canary.send(post(json.dumps(long).encode()))).status in (200, 400)
    canary.check()


def test_requests_that_ban_every_token_end(canary: Canary) -> None:
    """The answer is an error or an output, and nothing hangs."""
    bans = {str(i): -100.0 for i in range(3, 259)}
    for fields, status in (
        ({"logit_bias": bans}, 200),
        ({"allowed_token_ids": []}, 400),
        ({"allowed_token_ids": [5], "bad_words": ["\x02"]}, 400),
    ):
        raw = json.dumps(completion(max_tokens=2, **fields)).encode()
        assert timed(lambda raw=raw: canary.send(post(raw))).status == status  # type: ignore[misc]
        canary.check()


def test_fields_of_adapters_and_tensors_load_nothing(canary: Canary) -> None:
    """There is no such feature, whatever the field has; nothing loads a pickle."""
    for name, value in (
        ("lora_path", "../../etc/passwd"),
        ("lora", "../../etc/passwd"),
        ("prompt_embeds", "gASVAAAA"),
        ("model", "../../etc/passwd"),
    ):
        raw = json.dumps(completion(**{name: value})).encode()
        response = timed(lambda raw=raw: canary.send(post(raw)))  # type: ignore[misc]
        assert response.status == (404 if name == "model" else 400)
        assert response.error["param"] == name
    canary.check()
    sources = [*ROOT.glob("*_proc/**/*.py"), *ROOT.glob("protocol/**/*.py")]
    assert sources
    for source in sources:
        text = source.read_text()
        assert "torch.load(" not in text, source
        assert "import pickle" not in text, source


def test_bad_request_ids_are_replaced(canary: Canary) -> None:
    """Ids with other characters, or too long ones, are replaced."""
    for value in (b"../../x", b"a b", b"\x01", b"x" * 1000, "é".encode()):
        response = canary.send(post(GOLDEN, headers=AUTH + b"X-Request-Id: " + value + b"\r\n"))
        assert response.status in (200, 400)
        assert b"x-request-id: " + value + b"\r\n" not in response.head
    canary.check()


def test_heads_that_are_too_large_are_refused(canary: Canary) -> None:
    """There are too many headers, or too large ones."""
    for headers in (b"x: y\r\n" * 20_000, b"x: " + b"y" * 2**20 + b"\r\n"):
        assert timed(lambda headers=headers: canary.send(get("/livez", headers))).status == 431  # type: ignore[misc]
        canary.check()


@pytest.mark.slow  # it takes ten seconds
def test_a_head_that_dribbles_is_rejected_and_delays_no_other(canary: Canary) -> None:
    """One byte comes each second."""
    with canary.connect() as connection:
        connection.sendall(b"GET /livez HTTP/1.1\r\nHost: ")
        connection.settimeout(1.0)
        began, received = time.monotonic(), b""
        while not received:
            assert time.monotonic() - began < 20.0
            connection.sendall(b"x")
            timed(lambda: canary.send(post(GOLDEN)))
            with contextlib.suppress(TimeoutError):
                received = connection.recv(1000)
    assert received.startswith(b"HTTP/1.1 408 ")
    assert 9.0 < time.monotonic() - began < 13.0
    canary.check()


def test_damaged_and_endless_chunks_are_refused(canary: Canary) -> None:
    """Chunks are many and small, sizes overflow, two lengths differ, or there is none."""
    head = post(b"", headers=AUTH + b"Transfer-Encoding: chunked\r\n")
    head = head.replace(b"Content-Length: 0\r\n", b"")
    many = head + b"1\r\n \r\n" * 10**6
    assert timed(lambda: canary.send(many)).status == 400
    large = head + (b"%x\r\n%b\r\n" % (4096, b" " * 4096)) * 100
    assert timed(lambda: canary.send(large)).status == 413
    for body in (b"fffffffffffffffff\r\n", b"-1\r\n", b"x\r\n"):
        assert timed(lambda body=body: canary.send(head + body)).status == 400  # type: ignore[misc]
    both = head.replace(b"\r\n\r\n", b"\r\nContent-Length: 5\r\n\r\n") + b"0\r\n\r\n"
    assert timed(lambda: canary.send(both)).status == 400
    twice = get("/livez", b"Content-Length: 1\r\nContent-Length: 2\r\n")
    assert timed(lambda: canary.send(twice)).status == 400
    canary.check()


def test_no_spelling_of_a_path_or_host_avoids_the_key(canary: Canary) -> None:
    """Without the key there is nothing but 401 and 404, with any of them."""
    targets = [
        "http://x/v1/models",
        "//v1/models",
        "/v1/%6dodels",
        "/v1/./models",
        "/%2e/v1/models",
    ]
    for target in (*targets, "/v1/models?x=/livez", "/livez/../v1/models", "/v1/models#/livez"):
        for host in (b"x", b"x/livez?", b"x#", b"x/livez"):
            response = canary.send(get(target, b"", host=host))
            assert response.status in (400, 401, 404), (target, host)
            if response.status == 401:
                assert response.error["code"] == "invalid_api_key"
    old = get("/v1/models", b"").replace(b"HTTP/1.1", b"HTTP/1.0")
    assert canary.send(old).status == 401
    canary.check()


def test_wrong_keys_are_refused(canary: Canary) -> None:
    values = [b"", b"Bearer " + KEY[:-1].encode(), b"Bearer " + "é".encode(), b"Bearer \xff"]
    for value in (*values, b"Bearer " + b"x" * 60_000, b"Bearer " + KEY.encode() + b"x"):
        assert canary.send(get("/v1/models", b"Authorization: " + value + b"\r\n")).status == 401
    assert canary.send(get("/v1/models", AUTH * 2)).status == 401
    long = get("/v1/models", b"Authorization: Bearer " + b"x" * 2**20 + b"\r\n")
    assert timed(lambda: canary.send(long)).status == 431
    canary.check()


@pytest.mark.parametrize("count", [250, pytest.param(5_000, marks=pytest.mark.slow)])
def test_the_time_of_a_rejection_does_not_show_how_much_of_a_key_is_right(
    canary: Canary, count: int
) -> None:
    """One key differs in its first character, another one in its last."""
    keys = ("x" + KEY[1:], KEY[:-1] + "x")
    requests = [get("/v1/models", f"Authorization: Bearer {key}\r\n".encode()) for key in keys]

    def measure() -> dict[str, float]:
        times: list[list[float]] = [[], []]
        for number in range(2 * count):
            with canary.connect() as connection:
                began = time.perf_counter()
                connection.sendall(requests[number % 2])
                assert response_of(connection).status == 401
                times[number % 2].append(time.perf_counter() - began)
        quiet = [sorted(samples)[: count * 8 // 10] for samples in times]  # without interruptions
        means = [statistics.fmean(samples) for samples in quiet]
        variances = [statistics.variance(samples) / len(samples) for samples in quiet]
        return {"deviations": abs(means[0] - means[1]) / math.sqrt(sum(variances))}

    within(5, measure, deviations=4.0)
    canary.check()


def test_admin_routes_and_wrong_methods_are_refused(canary: Canary) -> None:
    for path in ("/pause", "/resume", "/sleep", "/wake_up", "/reset_prefix_cache", "/drain"):
        response = timed(lambda path=path: canary.send(post(b"{}", path)))  # type: ignore[misc]
        assert (response.status, response.error["code"]) == (404, "not_found")
    for method in (b"GET", b"PUT", b"OPTIONS", b"TRACE"):
        assert canary.send(get(COMPLETIONS, method=method)).status == 405
    with canary.connect() as connection:
        connection.sendall(get("/livez") * 10)
        received = b""
        while received.count(b"HTTP/1.1 200 ") < 10:
            piece = connection.recv(65536)
            assert piece
            received += piece
    canary.check()


def test_compressed_bodies_are_refused(canary: Canary) -> None:
    """They are never inflated."""
    headers = AUTH + b"Content-Encoding: gzip\r\n"
    response = timed(lambda: canary.send(post(b"\x1f\x8b" + b"\0" * 1000, headers=headers)))
    assert (response.status, response.error["code"]) == (415, "unsupported_encoding")
    canary.check()


def test_clients_that_close_at_any_moment(canary: Canary) -> None:
    """They close after the head, in the body, or around a stream's start, by FIN or RST."""
    body = json.dumps(completion(max_tokens=400, stream=True)).encode()
    request = post(body)
    head_end = request.index(b"\r\n\r\n") + 4
    for length, num_read in (
        (head_end, 0),
        (head_end + 9, 0),
        (len(request), 0),
        (len(request), 1),
    ):
        for is_reset in (False, True):
            with canary.connect() as connection:
                connection.sendall(request[:length])
                if num_read:
                    assert connection.recv(num_read)
                if is_reset:
                    linger = struct.pack("ii", 1, 0)
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    eventually(lambda: metric(canary, "troika:num_requests_running") == 0, "all are aborted")
    eventually(lambda: metric(canary, "troika:kv_cache_usage_perc") == 0, "their blocks are free")
    canary.check()


def metric(canary: Canary, name: str) -> float:
    lines = canary.send(get("/metrics")).body.decode().splitlines()
    return float(next(line for line in lines if line.startswith(name + "{")).split()[-1])


FULL = {"prompt": [5, 6, 7], "max_tokens": 8000, "ignore_eos": True, "stream": True}


@pytest.mark.parametrize("count", [1_000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_a_flood_of_requests_past_the_limit(start_engine: EngineFactory, count: int) -> None:
    """Each is refused at once, and the accepted ones go on."""
    num_connections = 8
    engine = start_engine("--null-step-ms", "20", "--max-open-requests", "2")
    url = engine.url()
    streams = [Stream(url, {**FULL, "seed": seed}) for seed in range(2)]
    assert all(stream.next() is not None for stream in streams), "both places are taken"
    pids = [engine.pid(role) for role in ROLES]
    address = urlsplit(url).hostname, urlsplit(url).port
    refused = post(GOLDEN, headers=b"")

    def flood(latencies: list[float]) -> None:
        with socket.create_connection(address, timeout=20) as connection:
            for _ in range(count // num_connections):
                began = time.monotonic()
                connection.sendall(refused)
                response = response_of(connection)
                latencies.append(time.monotonic() - began)
                assert (response.status, response.error["code"]) == (429, "overloaded")
                assert b"\r\nretry-after: " in response.head

    def measure() -> dict[str, float]:
        latencies: list[float] = []
        with ThreadPoolExecutor(num_connections) as pool:
            list(pool.map(lambda _: flood(latencies), range(num_connections)))
        assert len(latencies) == count
        return {"refusal_s": sorted(latencies)[count * 99 // 100]}

    within(5, measure, refusal_s=0.05)
    for stream in streams:
        assert stream.next() is not None
        stream.close()
    eventually(lambda: engine.get("/load")["server_load"] == 0, "both are aborted")
    assert engine.post(COMPLETIONS, **json.loads(GOLDEN))["choices"]
    assert [engine.pid(role) for role in ROLES] == pids

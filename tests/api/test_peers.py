"""Several API processes: each answers for all of them, and finds the owner of a request."""

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from api_proc.app import peer_app, start_sessions
from api_proc.http.connection import KEEP_ALIVE_INTERVAL_S, REQUEST_ID_KEY, Connection
from api_proc.http.listener import listen_unix
from api_proc.http.request_ids import RequestIds
from api_proc.http.server import HttpServer
from api_proc.metrics import Metrics
from api_proc.peers.directory import Directory, remove_all
from api_proc.peers.peers import ASK_TIMEOUT_S, Peers
from api_proc.peers.shared_counters import FILE_NAME, SharedCounters
from protocol.api_core import EngineState
from protocol.config.settings import configure
from scripts.testing import eventually
from tests.api.fake_engine import FakeClient, LiveServer

COUNT = 2


class PeerServer(LiveServer):
    """One API process of two, in a thread of this one."""

    def __init__(
        self,
        run_dir: str,
        index: int,
        epoch: int,
        *,
        keep_alive_interval_s: float = KEEP_ALIVE_INTERVAL_S,
        **settings: Any,
    ) -> None:
        self._directory = Directory(run_dir, index, epoch)
        config = configure(**({"model": "null", "api_server_count": COUNT} | settings))
        counters = SharedCounters(run_dir, index, COUNT)
        super().__init__(
            config,
            FakeClient(),
            index=index,
            counters=counters,
            keep_alive_interval_s=keep_alive_interval_s,
        )
        self._has_ended = False

    def __exit__(self, *_: object) -> None:
        if not self._has_ended:
            self._has_ended = True
            super().__exit__()

    async def _serve(self) -> None:
        await start_sessions(self.state)
        self.state.peers = Peers(self._directory, self.state.ids, owner_timeout_s=2.0)
        peer_server = HttpServer(peer_app(self.state))
        work = peer_server.serve(sockets=[self._directory.listen()])
        serving = asyncio.create_task(work)
        await super()._serve()
        peer_server.stop()
        await serving
        if self.state.sessions is not None:
            self.state.sessions.close()


class Pair:
    """Two servers in one run directory."""

    def __init__(self, stack: ExitStack, **settings: Any) -> None:
        self.run_dir = stack.enter_context(tempfile.TemporaryDirectory(prefix="troika-test-"))
        self.servers = [
            stack.enter_context(PeerServer(self.run_dir, index, epoch=10 + index, **settings))
            for index in range(COUNT)
        ]
        self.http = [
            stack.enter_context(httpx.Client(base_url=live.url, timeout=10))
            for live in self.servers
        ]

    def pause(self, *, is_paused: bool) -> None:
        for live in self.servers:
            live.client.is_paused = is_paused

    def num_submitted(self) -> list[int]:
        return [len(live.client.requests) for live in self.servers]


MakePair = Callable[..., Pair]


@pytest.fixture
def make_pair() -> Iterator[MakePair]:
    with ExitStack() as stack:
        yield lambda **settings: Pair(stack, **settings)


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    """Without a journal; tests leave it as it was."""
    with ExitStack() as stack:
        yield Pair(stack, enable_admin_routes=True)


@pytest.fixture
def journaled(make_pair: MakePair, tmp_path: Path) -> Pair:
    return make_pair(journal_dir=str(tmp_path / "journal"))


class Background:
    """A POST whose answer is read in a thread."""

    def __init__(self, http: httpx.Client, body: dict[str, Any], **headers: str) -> None:
        self.text = ""
        self.status = 0
        self.headers: dict[str, str] = {}
        self.error: Exception | None = None
        self._arguments = (http, body, {key.replace("_", "-"): v for key, v in headers.items()})
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        http, body, headers = self._arguments
        try:
            with http.stream("POST", "/v1/completions", json=body, headers=headers) as response:
                self.headers = dict(response.headers)
                self.status = response.status_code
                for text in response.iter_text():
                    self.text += text
        except httpx.HTTPError as error:
            self.error = error

    def end(self) -> str:
        self._thread.join(10)
        assert not self._thread.is_alive()
        return self.text


def body(**fields: Any) -> dict[str, Any]:
    return {"prompt": "x", "max_tokens": 20, "stream": True, "seed": 1} | fields


def id_owned_by(index: int) -> str:
    ids = RequestIds(0, COUNT)
    return next(name for name in map(str, range(99)) if ids.owner_of(f"job-{name}") == index)


def test_ids_name_their_owner() -> None:
    """A single process draws plain ids; a client's own id has one owner, too."""
    assert re.fullmatch("[0-9a-f]{32}", RequestIds().draw())
    assert re.fullmatch("[0-9a-f]{32}-2", RequestIds(2, 3).draw())
    for count in (1, 2, 5):
        for index in range(count):
            found = {
                RequestIds(asked, count).owner_of(RequestIds(index, count).draw())
                for asked in range(count)
            }
            assert found == {index}
    owners = [RequestIds(0, 4).owner_of(f"job-{number}") for number in range(400)]
    assert min(owners.count(index) for index in range(4)) > 50
    assert owners == [RequestIds(3, 4).owner_of(f"job-{number}") for number in range(400)]


def test_a_response_is_read_continued_and_deleted_at_any_of_them(pair: Pair) -> None:
    ours, theirs = pair.http
    first = ours.post("/v1/responses", json={"input": "hello", "max_output_tokens": 4}).json()
    path = f"/v1/responses/{first['id']}"
    assert first["id"].endswith("-0")
    assert theirs.get(path).json() == ours.get(path).json() == first
    assert len(theirs.get(path + "/input_items").json()["data"]) == 1
    further = {"input": "more", "max_output_tokens": 4}
    second = theirs.post("/v1/responses", json=further | {"previous_response_id": first["id"]})
    assert second.json()["id"].endswith("-1")
    third = ours.post("/v1/responses", json=further | {"previous_response_id": second.json()["id"]})
    lengths = [each["usage"]["input_tokens"] for each in (first, second.json(), third.json())]
    assert lengths == sorted(set(lengths))
    assert theirs.post(path + "/cancel").status_code == 400  # it has ended
    assert theirs.delete(path).json()["deleted"]
    lost = theirs.post("/v1/responses", json=further | {"previous_response_id": first["id"]})
    assert [http.get(path).status_code for http in pair.http] == [404, 404]
    assert lost.status_code == 404
    assert lost.json()["error"]["param"] == "previous_response_id"


# Reports ---------------------------------------------------------------------------------------


def test_any_of_them_aborts_and_lists_the_requests_of_all(pair: Pair) -> None:
    pair.pause(is_paused=True)
    try:
        streams = [Background(http, body()) for http in pair.http]
        eventually(lambda: len(pair.http[0].get("/slots").json()) == 2, "both requests have begun")
        for http in pair.http:
            slots = http.get("/slots").json()
            assert sorted(slot["api_server"] for slot in slots) == [0, 1]
            assert [slot["request_id"][-2:] for slot in slots] == [
                f"-{slot['api_server']}" for slot in slots
            ]
            assert http.get("/load").json()["server_load"] == 2
        ids = ["cmpl-" + slot["request_id"] for slot in slots]
        asked = {"request_ids": [*ids, "unknown"]}
        assert sorted(pair.http[0].post("/abort_requests", json=asked).json()["aborted"]) == sorted(
            ids
        )
    finally:
        pair.pause(is_paused=False)
    for stream in streams:
        stream.end()
        assert stream.status == 409
    assert pair.http[1].get("/slots").json() == []


def value(http: httpx.Client, name: str) -> float:
    text = http.get("/metrics").text
    found = re.search(rf"^troika[:_]{name}(?:_total)?{{[^}}]*}} ([0-9.e+-]+)$", text, re.MULTILINE)
    assert found is not None, name
    return float(found[1])


def test_metrics_are_sums_from_whichever_is_asked(pair: Pair) -> None:
    before = value(pair.http[0], "request_generation_tokens_count")
    for number in range(6):
        pair.http[number % 2].post("/v1/completions", json=body(stream=False)).raise_for_status()
    pair.pause(is_paused=True)
    streams = [Background(pair.http[1], body()) for _ in range(3)]
    try:
        for http in pair.http:
            eventually(lambda http=http: value(http, "http_requests_open") == 3, "all are open")
            assert value(http, "request_generation_tokens_count") == before + 6
            assert value(http, "api_servers") == value(http, "api_servers_answering") == 2
            assert http.get("/debug/engine").json()["num_open_requests"] == 3
    finally:
        pair.pause(is_paused=False)
    for stream in streams:
        stream.end()


def test_ready_means_all_that_answer(make_pair: MakePair) -> None:
    """One that hangs or is dead takes no connections, so it does not count."""
    pair = make_pair()
    second = pair.servers[1]
    ready = pair.http[0].get("/readyz")
    assert ready.status_code == 200
    assert (ready.json()["api_servers"], ready.json()["api_servers_ready"]) == (2, 2)
    second.client.report(EngineState.STARTING)
    ready = pair.http[0].get("/readyz")
    assert (ready.status_code, ready.json()["api_servers_ready"]) == (503, 1)
    hanging = listen_unix(f"{pair.run_dir}/api1.ff")
    try:
        second.client.report(EngineState.READY)
        began = time.monotonic()
        assert pair.http[0].get("/readyz").json()["api_servers_ready"] == 2
        assert value(pair.http[0], "api_servers_answering") == 2
        assert time.monotonic() - began < 2 * ASK_TIMEOUT_S + 1.0
    finally:
        hanging.close()
    second.__exit__()
    assert pair.http[0].get("/readyz").json()["api_servers_ready"] == 1
    assert value(pair.http[0], "api_servers_answering") == 1


def test_only_the_public_socket_asks_for_a_key(make_pair: MakePair) -> None:
    pair = make_pair(api_key="secret")
    assert pair.http[0].get("/slots").status_code == 401
    assert pair.http[0].get("/peer/gauges").status_code == 401
    headers = {"authorization": "Bearer secret"}
    assert pair.http[0].get("/slots", headers=headers).json() == []
    assert pair.http[0].get("/peer/gauges", headers=headers).status_code == 404


# Counters --------------------------------------------------------------------------------------


COUNT_ONE = """
import sys
from api_proc.metrics import Metrics
from api_proc.peers.shared_counters import SharedCounters
metrics = Metrics(SharedCounters(sys.argv[1], 1, 2).own())
metrics.count_end("stop")
print(metrics.num_finished["stop"], flush=True)
sys.stdin.read()
"""


def test_counts_survive_a_process_that_is_killed(tmp_path: Path) -> None:
    """Its successor counts on; a predecessor that still runs has a page of its own."""
    predecessor = subprocess.Popen(
        [sys.executable, "-c", COUNT_ONE, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert predecessor.stdout is not None
    assert predecessor.stdout.readline() == b"1\n"

    def total(index: int) -> int:
        counters = SharedCounters(str(tmp_path), index, COUNT)
        takes = [counters.own(), *counters.others()]
        return sum(Metrics(take).num_finished["stop"] for take in takes)

    successor = SharedCounters(str(tmp_path), 1, COUNT)
    Metrics(successor.own()).count_end("stop")
    assert total(1) == 2
    predecessor.kill()
    predecessor.communicate()
    assert total(1) == 2
    remove_all(str(tmp_path))
    assert not (tmp_path / FILE_NAME).exists()


def test_pages_of_counters_have_room_before_they_are_written(tmp_path: Path) -> None:
    """A page of a mapped file for which a full file system has no room ends its process."""
    SharedCounters(str(tmp_path), 0, COUNT)
    found = (tmp_path / FILE_NAME).stat()
    assert found.st_blocks * 512 >= found.st_size == 2 * COUNT * 4096


def test_measured_counters_continue_those_of_a_predecessor(tmp_path: Path) -> None:
    for expected in (5.0, 10.0):
        metrics = Metrics(SharedCounters(str(tmp_path), 0, COUNT).own())
        metrics.take_measured({"journal_bytes": 3})
        metrics.take_measured({"journal_bytes": 5})
        assert metrics.measured()["journal_bytes"] == expected


# Clients ---------------------------------------------------------------------------------------


def test_a_forwarded_request_keeps_its_client(make_pair: MakePair, tmp_path: Path) -> None:
    pair = make_pair(journal_dir=str(tmp_path / "journal"), api_key=("one", "two"))
    ids = RequestIds(0, COUNT)
    for key in ("one", "two"):
        names = {ids.owner_of(f"{key}-{number}"): f"{key}-{number}" for number in range(99)}
        for name in names.values():
            headers = {"authorization": f"Bearer {key}", "x-request-id": name}
            headers["x-troika-origin"] = "another"
            answer = pair.http[0].post("/v1/completions", json=body(), headers=headers)
            assert answer.text.endswith("data: [DONE]\n\n")
    expected = [pair.servers[0].state.api_keys.name_of(key) for key in (b"one", b"two")]
    for live in pair.servers:
        assert [add.origin for add in live.client.requests] == expected


# Requests in journals --------------------------------------------------------------------------


def test_a_rejection_before_the_body_was_read_is_passed_on(journaled: Pair) -> None:
    """The owner closes its connection with the rest of the body unread."""
    budget = journaled.servers[1].state.budget
    leases = [budget.open(2**40)]  # more than it may hold
    headers = {"X-Request-Id": f"job-{id_owned_by(1)}"}
    large = body(prompt="x" * 2**21)
    try:
        answers = [
            journaled.http[0].post("/v1/completions", json=large, headers=headers) for _ in range(3)
        ]
    finally:
        for lease in leases:
            lease.close()
    assert [answer.status_code for answer in answers] == [429] * 3


def test_a_request_is_resumed_at_any_of_them(journaled: Pair) -> None:
    """It runs once, and both read the same text."""
    whole = journaled.http[0].post("/v1/completions", json=body()).text
    with journaled.http[0].stream("POST", "/v1/completions", json=body()) as response:
        name = response.headers["x-request-id"]
        assert name.endswith("-0")
        lines = response.iter_lines()
        events = []
        while not (events and events[-1].startswith("id: ")):  # under load it may be the only one
            events.append(next(lines))
    last_id = events[-1].removeprefix("id: ")
    num_before = journaled.num_submitted()
    rests = []
    for http in journaled.http:
        headers = {"x-request-id": name, "last-event-id": last_id}
        answer = http.post("/v1/completions", json=body(), headers=headers)
        assert answer.status_code == 200
        assert answer.headers["x-request-id"] == name
        assert len(answer.headers.get_list("date")) == 1
        rests.append(text_of(answer.text))
    assert rests[0] == rests[1]
    assert text_of("\n".join(events)) + rests[1] == text_of(whole)
    assert journaled.num_submitted() == num_before
    wrong = {"x-request-id": name, "last-event-id": "other.3"}
    assert journaled.http[1].post("/v1/completions", json=body(), headers=wrong).status_code == 400
    gone = {"x-request-id": RequestIds(0, COUNT).draw(), "last-event-id": "x.3"}
    assert journaled.http[1].post("/v1/completions", json=body(), headers=gone).status_code == 404


def test_a_client_at_its_bound_can_read_what_another_process_owns(
    make_pair: MakePair, tmp_path: Path
) -> None:
    """The sequences count at the owner, and its connections elsewhere count apart."""
    limit = 3
    pair = make_pair(
        journal_dir=str(tmp_path / "journal"),
        max_open_requests_per_client=limit,
        keep_alive_interval_s=0.05,  # streams begin before they have a token
    )
    pair.pause(is_paused=True)
    names = [f"job-{id_owned_by(index)}" for index in range(COUNT)]
    budgets = [live.state.budget for live in pair.servers]

    def num_open() -> list[int]:
        counted = (budgets[0].clients, budgets[1].clients, budgets[0].foreign)
        return [clients._sequences.total for clients in counted]

    assert budgets[0].foreign.max_per_client == (COUNT - 1) * limit

    for http, name in zip(pair.http, names, strict=True):
        headers = {"x-request-id": name}
        with http.stream("POST", "/v1/completions", json=body(n=limit), headers=headers) as answer:
            assert answer.status_code == 200
    eventually(lambda: not sum(each.num_requests for each in budgets), "both clients have left")
    assert num_open() == [limit, limit, 0]
    resumed = Background(pair.http[0], body(n=limit), x_request_id=names[1])
    eventually(lambda: num_open() == [limit, limit, 1], "a connection counts apart")
    names = [f"new-{number}" for number in range(99)]
    new = {"x-request-id": next(n for n in names if RequestIds(0, COUNT).owner_of(n) == 1)}
    for path, fields in (("completions", body()), ("embeddings", {"input": "x"})):
        for headers in ({}, new):
            answer = pair.http[0].post(f"/v1/{path}", json=fields, headers=headers)
            assert answer.status_code == 429, "further requests count"
    pair.pause(is_paused=False)
    assert resumed.end().endswith("data: [DONE]\n\n")
    assert resumed.status == 200
    eventually(lambda: num_open() == [limit, 0, 0], "the connection has ended")


def text_of(stream: str) -> str:
    data = re.findall(r"^data: (\{.*)$", stream, re.MULTILINE)
    return "".join(json.loads(each)["choices"][0]["text"] for each in data)


@pytest.mark.parametrize("owner", [0, 1])
def test_a_request_that_its_client_has_named_runs_once(journaled: Pair, owner: int) -> None:
    """Several connections to both processes get the same answer."""
    name = f"job-{id_owned_by(owner)}"
    journaled.pause(is_paused=True)
    readers = [Background(http, body(), x_request_id=name) for http in journaled.http]
    owner_client = journaled.servers[owner].client
    eventually(lambda: owner_client.requests, "the request was accepted")
    journaled.pause(is_paused=False)
    texts = {text_of(reader.end()) for reader in readers}
    assert len(texts) == 1
    assert texts != {""}
    assert journaled.num_submitted() == [int(owner == 0), int(owner == 1)]
    assert {reader.headers["x-request-id"] for reader in readers} == {name}
    other = journaled.http[1 - owner].post(
        "/v1/completions", json=body(prompt="other"), headers={"x-request-id": name}
    )
    assert other.status_code == 200, "the first is over, so its id can be used again"


class Actor:
    """Listens as the owner of requests, and plays what is given."""

    def __init__(self, run_dir: str, index: int, epoch: int, answer: bytes) -> None:
        self._socket = listen_unix(f"{run_dir}/api{index}.{epoch:x}")
        self._answer = answer
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while True:
                connection, _ = self._socket.accept()
                with connection:
                    connection.recv(65536)
                    connection.sendall(self._answer)
        except OSError:
            pass

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(5)


HALF = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    b"6\r\ndata: \r\n"
)


def test_a_stream_breaks_with_its_owner_and_is_taken_up_by_its_successor(
    make_pair: MakePair, tmp_path: Path
) -> None:
    """Before that the client waits; where none comes, the answer is a 503."""
    pair = make_pair(journal_dir=str(tmp_path / "journal"))
    pair.servers[1].__exit__()
    name = f"job-{id_owned_by(1)}"
    actor = Actor(pair.run_dir, 1, 99, HALF)
    broken = Background(pair.http[0], body(), x_request_id=name)
    assert broken.end() in ("", "data: ")
    assert broken.error is not None
    actor.close()
    waiting = Background(pair.http[0], body(), x_request_id=name)
    with PeerServer(pair.run_dir, 1, epoch=100, journal_dir=str(tmp_path / "journal")) as successor:
        assert text_of(waiting.end())
        assert len(successor.client.requests) == 1
    late = pair.http[0].post("/v1/completions", json=body(), headers={"x-request-id": name})
    assert late.status_code == 503
    assert late.json()["error"]["code"] == "recovering"


def test_metrics_of_journals_are_sums(journaled: Pair) -> None:
    for http in journaled.http:
        http.post("/v1/completions", json=body()).raise_for_status()
    for http in journaled.http:
        assert value(http, "sessions") == 2
        assert value(http, "journal_failed") == 0
        assert value(http, "journal_bytes") > 0


def test_a_client_that_leaves_ends_the_forwarded_request(journaled: Pair) -> None:
    """The owner sees the disconnect: the request has no reader left."""
    journaled.pause(is_paused=True)
    name = f"job-{id_owned_by(1)}"
    data = json.dumps(body(stream=False)).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-request-id: {name}\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", journaled.servers[0].port)) as client:
        client.sendall(head.encode() + data)
        sessions = journaled.servers[1].state.sessions
        assert sessions is not None
        session = eventually(lambda: sessions._by_id.get(name), "the owner has accepted it")
        eventually(lambda: session.num_attached == 1, "it is read")
    eventually(lambda: session.num_attached == 0, "the reader has left")
    journaled.pause(is_paused=False)


def test_a_successor_and_its_predecessor_are_both_asked(make_pair: MakePair) -> None:
    """During a planned restart one of them may know what the other does not."""
    pair = make_pair()
    actor = Actor(
        pair.run_dir, 1, 99, b'HTTP/1.1 200 OK\r\ncontent-length: 15\r\n\r\n{"aborted":[]}\n'
    )
    try:
        pair.pause(is_paused=True)
        stream = Background(pair.http[1], body())
        eventually(lambda: pair.servers[1].client.requests, "the request was accepted")
        name = pair.servers[1].state.open_requests.slots(with_ids=True)[0].request_id
        asked = {"request_ids": [name]}
        assert pair.http[0].post("/abort_requests", json=asked).json() == {"aborted": [name]}
    finally:
        pair.pause(is_paused=False)
        actor.close()
    stream.end()


def test_what_another_process_has_sent_is_not_sent_on(make_pair: MakePair) -> None:
    """A successor and its predecessor would send it to each other without end."""
    pair = make_pair()

    def connection(*, is_forwarded: bool) -> Connection:
        async def receive() -> Any:
            await asyncio.sleep(60)

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"method": "GET", "raw_path": b"/livez", "query_string": b"", "headers": []}
        made = Connection(scope | {REQUEST_ID_KEY: "x"}, receive, send)
        made.is_forwarded = is_forwarded
        return made

    sent: list[Any] = []
    peers = pair.servers[0].state.peers
    assert peers is not None
    forward = pair.servers[0].call
    name = RequestIds(1, COUNT).draw()
    assert forward(peers.forward, connection(is_forwarded=True), name) is False
    assert sent == []
    assert forward(peers.forward, connection(is_forwarded=False), name) is True
    assert sent[0]["status"] == 200
    own = RequestIds(0, COUNT).draw()
    assert forward(peers.forward, connection(is_forwarded=False), own) is False


def test_sockets_of_the_dead_are_removed_by_their_successor(tmp_path: Path) -> None:
    stale = listen_unix(str(tmp_path / "api1.1"))
    stale.close()
    living = listen_unix(str(tmp_path / "api1.2"))
    other = listen_unix(str(tmp_path / "api0.3"))
    other.close()
    directory = Directory(str(tmp_path), 1, 4)
    own = directory.listen()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["api0.3", "api1.2", "api1.4"]
    assert [(peer.index, peer.epoch) for peer in directory.others()] == [(0, 3), (1, 2)]
    directory.leave()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["api0.3", "api1.2"]
    living.close()
    own.close()

"""Two API processes on one port: one is killed or replaced, and only its own requests notice."""

import itertools
import json
import os
import signal
import socket
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from api_proc.http.request_ids import RequestIds
from protocol.lifecycle import Role
from scripts.restart import restart
from scripts.testing import TIMEOUT_S, Engine, EngineFactory, eventually
from tests.system.resumed_streams import body, content, ids_of
from tests.system.streams import Event, Stream, metric

TWO = ("--api-server-count", "2")
Content = list[tuple[Any, ...]]
LONG = 300
"""Tokens of a stream that is still open after a kill, on a busy machine too."""


@pytest.fixture(scope="module")
def shared() -> Iterator[Engine]:
    """An engine with two API processes and journals."""
    with EngineFactory() as factory:
        flags = ("--null-step-ms", "5", "--resume-window-s", "600", "--enable-admin-routes")
        engine = factory("--journal-dir", f"{factory.base}/journal", *TWO, *flags)
        engine.ready()
        yield engine


@pytest.fixture(scope="module")
def whole(shared: Engine) -> Content:
    """The content of a stream that nothing disturbs."""
    return content(Stream(shared.url(), body(max_tokens=LONG)).events())


def streams_at_both(engine: Engine, count: int) -> list[list[Stream]]:
    """Begin streams until each of the two processes has accepted `count` or more."""
    found: list[list[Stream]] = [[], []]
    url = engine.url()
    for _ in range(100):
        stream = Stream(url, body(max_tokens=LONG))
        assert stream.read_head() == 200
        found[int(stream.headers["x-request-id"][-1])].append(stream)
        if min(map(len, found)) >= count:
            return found
    raise AssertionError(f"accepted: {[len(streams) for streams in found]}")


def take(stream: Stream, count: int) -> list[Event]:
    """Read some events, or all that are left where they are merged to fewer."""
    return [event for event in itertools.islice(iter(stream.next, None), count) if event]


def resumed(url: str, stream: Stream, events: list[Event]) -> list[Event]:
    """Reconnect, to whichever process accepts, and read the rest."""
    headers = {"X-Request-Id": stream.headers["x-request-id"], "Last-Event-ID": events[-1].id or ""}
    again = Stream(url, body(max_tokens=LONG), headers=headers)
    assert again.read_head() == 200, again.body()
    return [*events, *again.events()]


def test_both_serve_and_are_named(shared: Engine) -> None:
    """Each accepts connections from the one socket, and any of them aborts the other's requests."""
    names = [row.name for row in shared.ready().processes if row.role is Role.API]
    assert names == ["api-0", "api-1"]
    for stream in itertools.chain(*streams_at_both(shared, 2)):
        asked = [stream.headers["x-request-id"]]
        assert shared.post("/abort_requests", request_ids=asked) == {"aborted": asked}
        last = [event.data for event in stream.events()][-2:]
        assert json.loads(last[0])["error"]["code"] == "request_aborted"
    readiness = shared.readiness()
    assert (readiness["api_servers"], readiness["api_servers_ready"]) == (2, 2)


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_kill_of_one_concerns_only_its_streams(shared: Engine, whole: Content, victim: int) -> None:
    """Those of the other go on, new connections work at once, and its own are resumed at either."""
    url = shared.url()
    num_ended = metric(shared, "request_generation_tokens_count")
    streams = streams_at_both(shared, 3)
    begun = [[take(stream, 5) for stream in group] for group in streams]
    old = shared.row(Role.API, victim)
    others = [shared.row(Role.API, 1 - victim).epoch]
    assert old.pid is not None
    os.kill(old.pid, signal.SIGKILL)
    fresh = [Stream(url, body(max_tokens=LONG)) for _ in range(4)]
    for stream, events in zip(streams[1 - victim], begun[1 - victim], strict=True):
        assert content([*events, *stream.events()]) == whole
    assert [content(stream.events()) for stream in fresh] == [whole] * 4
    num_cut = 0
    for stream, events in zip(streams[victim], begun[victim], strict=True):
        seen = [*events, *stream.events()]
        if seen[-1].data != "[DONE]":
            num_cut += 1
            seen = resumed(url, stream, seen)
        assert content(seen) == whole
    assert num_cut > 0, "it was killed within a stream"
    assert shared.row(Role.API, victim).epoch > old.epoch
    rows = [row for row in shared.ready().processes if row.role is Role.API]
    assert [row.epoch for row in rows if row.rank != victim] == others, "they were not replaced"
    assert metric(shared, "api_servers_answering") == 2
    num_streams = sum(map(len, streams)) + len(fresh)
    assert metric(shared, "request_generation_tokens_count") == num_ended + num_streams


def test_kill_of_core_and_worker_loses_nothing(shared: Engine, whole: Content) -> None:
    """Each API process sends its own requests again."""
    streams = [*itertools.chain(*streams_at_both(shared, 2))]
    seen = [take(stream, 5) for stream in streams]
    for role in (Role.WORKER, Role.CORE):
        shared.kill(role)
        for stream, events in zip(streams, seen, strict=True):
            events.extend(take(stream, 5))
    for stream, events in zip(streams, seen, strict=True):
        assert content([*events, *stream.events()]) == whole


def test_a_request_named_by_its_client_runs_once(shared: Engine) -> None:
    """Each connection may reach the other process; the owner may die meanwhile."""
    for number in range(2):
        headers = {"X-Request-Id": f"named-{number}"}
        fields = body(seed=None, temperature=1.0)
        one, two = (Stream(shared.url(), fields, headers=headers) for _ in range(2))
        assert one.read_head() == two.read_head() == 200
        assert ids_of(one.events()) == ids_of(two.events())


def test_a_stopped_process_is_left_out_of_the_sums(shared: Engine) -> None:
    """The answer comes in time, and shows how many processes it is about."""
    url, pid = shared.url(), shared.pid(Role.API, 1)
    os.kill(pid, signal.SIGSTOP)
    try:
        with urllib.request.urlopen(url + "/metrics", timeout=3.0) as response:
            text = response.read().decode()
    finally:
        os.kill(pid, signal.SIGCONT)
    (line,) = (line for line in text.splitlines() if "api_servers_answering{" in line)
    assert line.endswith(" 1.0")


def status_of_new(engine: Engine) -> int:
    """Return the status of a new request, whose connection is closed."""
    stream = Stream(engine.url(), body(max_tokens=1))
    status = stream.read_head()
    stream.reset()
    return status


@pytest.mark.slow
def test_requests_count_for_their_client_while_its_processes_are_replaced() -> None:
    """It can begin no more at any moment, and can read what it has begun at any process."""
    num_begun = 2  # at each process, with two sequences each
    fields = body(n=2, max_tokens=2000)
    with EngineFactory() as factory:
        flags = ("--journal-dir", f"{factory.base}/journal", *TWO, "--null-step-ms", "5")
        engine = factory("--max-open-requests-per-client", str(2 * num_begun), *flags)
        engine.ready()
        url = engine.url()
        whole = content(Stream(url, fields).events())
        ids = RequestIds(0, 2)
        owned: list[list[str]] = [[], []]
        for number in range(99):
            owned[ids.owner_of(f"r{number}")].append(f"r{number}")
        begun: dict[str, list[Event]] = {}
        for name in [name for names in owned for name in names[:num_begun]]:
            stream = Stream(url, fields, headers={"X-Request-Id": name})
            begun[name] = take(stream, 1)
            stream.reset()
        eventually(lambda: metric(engine, "http_requests_open") == 0, "the client has left")
        with ThreadPoolExecutor(1) as executor:
            restarting = executor.submit(restart, engine._link, Role.API, TIMEOUT_S)
            statuses = []
            while not restarting.done():
                statuses.append(status_of_new(engine))
            assert restarting.result().startswith("api replaced")
        assert set(statuses) == {429}
        streams = {
            name: Stream(
                url, fields, headers={"X-Request-Id": name, "Last-Event-ID": str(seen[0].id)}
            )
            for name, seen in begun.items()
        }
        for name, stream in streams.items():
            assert content([*begun[name], *stream.events()]) == whole
        assert status_of_new(engine) == 200


# Without a journal ------------------------------------------------------------------------------


class Load(threading.Thread):
    """Sends short requests, each over a new connection, until it is ended."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(daemon=True)
        self._url = engine.url()
        self._is_ending = False
        self.num_served = 0
        self.errors: list[str] = []

    def run(self) -> None:
        while not self._is_ending:
            try:
                stream = Stream(self._url, body(max_tokens=8))
                assert stream.read_head() == 200
                assert stream.events()[-1].data == "[DONE]"
                self.num_served += 1
            except (OSError, AssertionError, ValueError) as error:
                self.errors.append(repr(error))

    def end(self) -> None:
        self._is_ending = True
        self.join(TIMEOUT_S)


def test_they_are_replaced_one_after_the_other(whole: Content, start_engine: EngineFactory) -> None:
    """No connection is refused or broken, and open streams end in their process.

    At the end of the engine each finishes its streams.
    """
    engine = start_engine(*TWO, "--null-step-ms", "5")
    engine.ready()
    streams = [*itertools.chain(*streams_at_both(engine, 1))]
    begun = [take(stream, 3) for stream in streams]
    before = [engine.pid(Role.API, index) for index in (0, 1)]
    load = Load(engine)
    load.start()
    text = restart(engine._link, Role.API, TIMEOUT_S)
    assert text.startswith("api replaced")
    after = [engine.pid(Role.API, index) for index in (0, 1)]
    assert not set(before) & set(after)
    for stream, events in zip(streams, begun, strict=True):
        assert content([*events, *stream.events()]) == whole
    eventually(
        lambda: not any(row.is_spare for row in engine.ready().processes),
        "the predecessors have ended",
    )
    os.kill(after[1], signal.SIGTERM)  # it asks to be replaced, and only it is
    eventually(lambda: engine.pid(Role.API, 1) != after[1], "api-1 is replaced")
    assert engine.pid(Role.API, 0) == after[0]
    load.end()
    assert load.errors == []
    assert load.num_served > 0
    streams = [*itertools.chain(*streams_at_both(engine, 1))]
    engine.process.terminate()
    assert [content(stream.events()) for stream in streams] == [whole] * len(streams)
    assert engine.process.wait(TIMEOUT_S) == 0


def test_both_accept_from_a_unix_socket(start_engine: EngineFactory) -> None:
    """Connections that wait in its queue while a process is killed are served by the other."""
    path = f"{start_engine.base}/api.sock"
    engine = start_engine(*TWO, "--uds", path)
    engine.ready()
    victim = engine.row(Role.API, 0)
    assert victim.pid is not None
    os.kill(victim.pid, signal.SIGSTOP)
    waiting = [socket.socket(socket.AF_UNIX) for _ in range(8)]
    for client in waiting:
        client.connect(path)
        client.sendall(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n")
    os.kill(victim.pid, signal.SIGKILL)
    for client in waiting:
        client.settimeout(TIMEOUT_S)
        assert client.recv(100).startswith(b"HTTP/1.1 200")
        client.close()
    found = {row.name for row in engine.ready().processes if row.role is Role.API}
    assert found == {"api-0", "api-1"}

"""Overload: accepted requests go on, and others are refused with 429."""

import json
import os
import random
import resource
import socket
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from api_proc.resumption.journal_segments import read_segment
from protocol.lifecycle import Role
from scripts.testing import TIMEOUT_S, Engine, EngineFactory, eventually
from tests.api.session_server import replay
from tests.system.slow_readers import flags as slow_reader_flags
from tests.system.slow_readers import measure, rss_bytes
from tests.system.streams import Stream, metric
from tests.timing import within

REFUSAL_S = 0.05
SERVICE_RETURNS_S = 2.5
"""Half a second on an idle machine; waiting for idle connections would take 5 s a time."""
LONG = {"prompt": [5, 6, 7], "max_tokens": 8000, "ignore_eos": True, "stream": True}


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def is_idle(engine: Engine) -> bool:
    """Whether no request is left anywhere."""
    names = ("ledger_requests", "http_requests_open", "num_requests_running")
    return not any(metric(engine, name) for name in (*names, "num_requests_waiting"))


def refused(url: str, body: dict[str, Any]) -> float:
    """Send a request that must be refused with 429; return the seconds until it was."""
    started = time.monotonic()
    stream = Stream(url, body)
    assert stream.read_head() == 429
    took_s = time.monotonic() - started
    assert int(stream.headers["retry-after"]) >= 1
    error = json.loads(stream.body())["error"]
    stream.close()
    assert (error["type"], error["code"]) == ("rate_limit_error", "overloaded")
    return took_s


@pytest.mark.parametrize(
    "flags",
    [
        ("--max-num-seqs", "1", "--max-num-waiting", "2"),
        ("--max-num-seqs", "1", "--max-waiting-tokens", "6"),
        ("--max-open-requests", "3"),
        ("--max-open-bytes", "1024"),
    ],
)
def test_past_every_bound_429_and_nothing_accepted_is_lost(
    start_engine: EngineFactory, flags: tuple[str, ...]
) -> None:
    """Three requests fit and end as they would alone; others are refused quickly."""
    engine = start_engine("--null-step-ms", "5", "--enable-admin-routes", *flags)
    body = {**LONG, "max_tokens": 300}
    if "--max-open-bytes" in flags:
        body["user"] = "x" * 200
    url = engine.url()
    streams = [Stream(url, {**body, "seed": 7})]
    first = streams[0].next()
    assert first is not None, "it runs"
    engine.post("/pause")  # so that it runs while the others are refused
    streams += [Stream(url, {**body, "seed": 7}) for _ in range(2)]
    eventually(lambda: metric(engine, "ledger_requests") == 3, "three are open")

    within(
        10, lambda: {"refusal_s": max(refused(url, body) for _ in range(10))}, refusal_s=REFUSAL_S
    )
    engine.post("/resume")
    received = [stream.events() for stream in streams]
    received[0].insert(0, first)
    texts = {"".join(event.text for event in events) for events in received}
    assert len(texts) == 1
    assert texts != {""}
    eventually(lambda: is_idle(engine), "nothing is left")


def check_slow_readers(engine: Engine, num_stalled: int, num_normal: int) -> float:
    """Check that stalled readers are dropped; return the slowdown of the readers beside them."""
    found = measure(engine, num_stalled, num_normal, 100)
    assert found.num_dropped == num_stalled
    assert found.bytes_per_stalled <= 64 * 1024
    assert found.kv_cache_usage == 0
    return found.ratio


def test_readers_that_stall_are_dropped(start_engine: EngineFactory) -> None:
    """Their memory is bounded, their KV blocks are freed, and no other client is dropped."""
    engine = start_engine(*slow_reader_flags(step_ms=4.0, timeout_s=2.0))
    check_slow_readers(engine, 100, 10)


@pytest.mark.slow
def test_readers_that_stall_do_not_slow_others(start_engine: EngineFactory) -> None:
    engine = start_engine(*slow_reader_flags(step_ms=20.0, timeout_s=10.0))
    within(3, lambda: {"ratio": check_slow_readers(engine, 200, 50)}, ratio=1.2)


def written(directory: Path) -> list[bytes]:
    """Return the records that a successor would read from a journal."""
    paths = sorted(directory.glob("*.journal"))
    return [record for path in paths for record in read_segment(path)[0]]


JOURNAL = ("--resume-window-s", "0.5", "--journal-dir")
VANISHED_S = 6.0
"""A second on an idle machine; requests that were not aborted would take 16 s."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("num_clients", "is_journaled"),
    [
        pytest.param(200, False, marks=pytest.mark.slow),  # as clients that close at any moment
        (200, True),
        pytest.param(2000, False, marks=pytest.mark.slow),
        pytest.param(2000, True, marks=pytest.mark.slow),
    ],
)
def test_clients_that_vanish_leave_nothing(
    start_engine: EngineFactory, tmp_path: Path, num_clients: int, is_journaled: bool
) -> None:
    """Clients leave with FIN or RST, before the answer or within it, and everything is freed."""
    directory = tmp_path / "j"
    engine = start_engine("--null-step-ms", "2", *((*JOURNAL, str(directory)) * is_journaled))
    rng = random.Random(1)
    url = engine.url()

    def visit(delay_s: float | None, how: Callable[[Stream], None]) -> None:
        stream = Stream(url, {**LONG, "stream": delay_s is None or rng.random() < 0.8})
        if delay_s is None:
            stream.next()
        else:
            time.sleep(delay_s)
        how(stream)

    with ThreadPoolExecutor(32) as pool:
        visits = []
        for _ in range(num_clients):
            delay_s = rng.choice([0.0, 0.001, rng.random() * 0.1, None])
            visits.append(pool.submit(visit, delay_s, rng.choice([Stream.reset, Stream.close])))
    for item in visits:
        item.result()

    def is_over() -> bool:
        names = ("http_requests_open", "ledger_requests", "sessions")
        return not any(metric(engine, name) for name in names)

    is_over()  # its reply comes after all connections in the socket's queue were accepted
    eventually(is_over, "the ledger is empty", VANISHED_S)
    eventually(lambda: is_idle(engine), "the core is idle, which it reports later", VANISHED_S)
    assert metric(engine, "kv_cache_usage_perc") == 0
    if is_journaled:
        eventually(lambda: replay(written(directory)) == [], "the journal, too, holds nothing")
        assert len(written(directory)) > num_clients / 2


def test_more_connections_than_descriptors_harm_no_process(start_engine: EngineFactory) -> None:
    """With 2,000 connections and 256 descriptors no process dies or spins; service returns soon."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    engine = start_engine()
    engine.ready()
    resource.prlimit(engine.process.pid, resource.RLIMIT_NOFILE, (256, 256))
    engine.kill(Role.API)  # its successor inherits what its supervisor has
    api = engine.pid(Role.API)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(8192, limits[1]), limits[1]))
    url = engine.url()
    address = ("127.0.0.1", int(url.rsplit(":", 1)[1]))
    pids = {role: engine.pid(role) for role in (Role.API, Role.CORE, Role.WORKER)}

    def measure() -> dict[str, float]:
        crowd = []
        for _ in range(2000):
            connection = socket.socket()
            connection.setblocking(False)
            connection.connect_ex(address)
            crowd.append(connection)
        time.sleep(0.5)
        started, used = time.monotonic(), cpu_s(api)
        time.sleep(2.0)
        share = (cpu_s(api) - used) / (time.monotonic() - started)
        for connection in crowd:
            connection.close()
        released = time.monotonic()
        with urllib.request.urlopen(url + "/v1/models", timeout=TIMEOUT_S) as answer:
            took_s = time.monotonic() - released
            assert answer.status == 200
        assert {role: engine.pid(role) for role in pids} == pids
        return {"cpu_share": share, "service_s": took_s}

    try:
        within(3, measure, cpu_share=0.2, service_s=SERVICE_RETURNS_S)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ten_thousand_queued_requests_survive_the_core(start_engine: EngineFactory) -> None:
    """All complete exactly; memory stays bounded; one more than the queue holds is refused."""
    num_requests, num_prompts = 10_000, 100
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (16_000, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    )
    # One client gets 8/9 of the queue.
    num_waiting = str(num_requests * 9 // 8)
    engine = start_engine("--enable-admin-routes", "--max-num-waiting", num_waiting)
    bodies = [{"prompt": [i + 5] * 128, "max_tokens": 8, "seed": i} for i in range(num_prompts)]
    expected = [engine.post("/v1/completions", **body)["choices"][0]["text"] for body in bodies]
    before = sum(rss_bytes(engine.pid(role)) for role in (Role.API, Role.CORE, Role.WORKER))
    engine.post("/pause")
    url = engine.url()
    streams = [Stream(url, bodies[i % num_prompts]) for i in range(num_requests)]
    eventually(lambda: metric(engine, "num_requests_waiting") == num_requests, "all wait", 60.0)
    engine.kill(Role.CORE)
    eventually(lambda: metric(engine, "engine_steps") == 0, "the successor reports")
    eventually(lambda: metric(engine, "num_requests_waiting") == num_requests, "all wait", 60.0)
    after = sum(rss_bytes(engine.pid(role)) for role in (Role.API, Role.CORE, Role.WORKER))
    assert after - before <= 300 * 2**20
    assert refused(url, bodies[0]) < 1.0
    engine.post("/resume")
    for i, stream in enumerate(streams):
        assert stream.read_head() == 200
        assert json.loads(stream.body())["choices"][0]["text"] == expected[i % num_prompts]
        stream.close()
    eventually(lambda: is_idle(engine), "nothing is left")

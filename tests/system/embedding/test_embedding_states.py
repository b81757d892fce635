"""A host closes its embedded engine in every state: soon, completely, without side effects."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from protocol.client import AsyncEngineClient
from protocol.client.errors import RequestFailed
from protocol.client.sync_client import EngineClient, SyncStream
from protocol.config import EngineConfig
from protocol.config.settings import configure
from protocol.lifecycle import Role
from protocol.process import failpoints
from protocol.process.launch import CLOSE_GRACE_S, EngineProcesses
from protocol.sampling import SamplingParams
from scripts.testing import eventually
from tests.chaos import processes
from tests.paths import ROOT
from tests.timing import within

CONFIG = configure(model="null", null_step_ms=2.0, log_level="error", standby_cores=0)
"""As few processes as there can be: nearly each test starts an engine."""
DEFAULT = configure(model="null", null_step_ms=2.0, log_level="error")
"""With a standby for the core."""
WITH_STANDBY = configure(model="null", null_step_ms=2.0, log_level="error", standby_workers=1)
"""With a standby, workers are forked by a zygote and not started by the supervisor."""
TIMEOUT_S = 30.0
CLOSE_LIMIT_S = 5.0
LONG = SamplingParams(max_tokens=6000)
_MARK = "_TROIKA_HOST_TEST"


@pytest.fixture(autouse=True)
def mark(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Mark all processes of a test by their environment, and assert that none is left."""
    value = f"{os.getpid()}-{time.monotonic_ns()}"
    monkeypatch.setenv(_MARK, value)
    yield value
    try:
        eventually(lambda: not processes.living_with(_MARK, value), "all processes are gone", 10.0)
    finally:
        for pid in processes.living_with(_MARK, value):
            processes.kill(pid)


def timed_close(engine: EngineProcesses | EngineClient) -> dict[str, float]:
    """Close an engine or client completely, and return the time it took."""
    began = time.monotonic()
    engine.close()
    took_s = time.monotonic() - began
    if isinstance(engine, EngineProcesses):
        assert not os.path.exists(engine.run_dir)
    return {"close_s": took_s}


def close(engine: EngineProcesses | EngineClient) -> None:
    """Close an engine or client completely, within the limit."""
    assert timed_close(engine)["close_s"] < CLOSE_LIMIT_S


def start(config: EngineConfig = CONFIG) -> EngineProcesses:
    """Start an engine and wait until it is ready."""
    return EngineProcesses.start(config, timeout_s=TIMEOUT_S)


def connect(engine: EngineProcesses) -> EngineClient:
    """Connect a client and wait until it is served."""
    client = EngineClient(engine.address)
    client.wait_ready(TIMEOUT_S)
    return client


def send(engine: EngineProcesses, number: signal.Signals, *roles: Role) -> None:
    """Send a signal to the processes of these roles."""
    reply = engine.status()
    assert reply is not None
    for row in reply.processes:
        if row.role in roles and row.pid is not None:
            os.kill(row.pid, number)


@pytest.mark.parametrize("delay_s", [0.0, pytest.param(0.05, marks=pytest.mark.slow), 0.3])
def test_an_engine_is_closed_while_it_starts(delay_s: float) -> None:
    """The supervisor has only just begun."""
    engine = EngineProcesses(CONFIG)
    time.sleep(delay_s)
    close(engine)


@pytest.mark.parametrize("name", ["core.load", "worker.load"])
def test_an_engine_is_closed_while_a_start_hangs(
    name: str, monkeypatch: pytest.MonkeyPatch, mark: str
) -> None:
    """A process is stopped in the middle of its start."""
    monkeypatch.setenv(failpoints.VARIABLE, f"{name}=stop@1")
    engine = EngineProcesses(CONFIG)
    eventually(
        lambda: any(map(is_stopped, processes.living_with(_MARK, mark))), "a process is stopped"
    )
    close(engine)


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal (state T)."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def test_an_engine_is_closed_while_a_model_is_loaded() -> None:
    """Loading a real model takes seconds."""
    with EngineProcesses(configure(model="demo", log_level="error")) as engine:

        def is_loading() -> bool:
            reply = engine.status()
            rows = [] if reply is None else reply.processes
            roles = {row.role for row in rows if row.pid is not None}
            return bool(roles - {Role.SUPERVISOR, Role.CORE})

        eventually(is_loading, "a worker loads", TIMEOUT_S)
        close(engine)


@pytest.mark.parametrize(
    "roles",
    [pytest.param((Role.WORKER, Role.CORE), marks=pytest.mark.slow), tuple(Role)],
    ids=["worker and core", "all"],
)
def test_an_engine_is_closed_while_several_processes_stand_still(roles: tuple[Role, ...]) -> None:
    """A stopped process cannot see that its parent is gone, but it ends all the same."""

    def measure() -> dict[str, float]:
        with start(WITH_STANDBY) as engine:
            send(engine, signal.SIGSTOP, *roles)
            return timed_close(engine)

    within(3, measure, close_s=CLOSE_LIMIT_S)


@pytest.mark.parametrize("config", [CONFIG, WITH_STANDBY], ids=["started", "forked"])
def test_an_engine_is_closed_after_the_supervisor_was_killed_while_workers_stood_still(
    config: EngineConfig,
) -> None:
    """The process that could kill them is gone."""

    def measure() -> dict[str, float]:
        with start(config) as engine:
            send(engine, signal.SIGSTOP, Role.WORKER, Role.STANDBY, Role.ZYGOTE)
            send(engine, signal.SIGKILL, Role.SUPERVISOR)
            return timed_close(engine)

    within(3, measure, close_s=CLOSE_LIMIT_S)


@pytest.mark.parametrize("role", [Role.WORKER, Role.CORE])
def test_an_engine_is_closed_while_it_recovers(role: Role) -> None:
    """A process was just killed, with streams open; readers get an error when the client closes."""
    engine = start(DEFAULT)
    client = connect(engine)
    stream = client.submit([5, 6, 7], LONG)
    next(stream)
    send(engine, signal.SIGKILL, role)
    close(engine)
    close(client)
    with pytest.raises(RequestFailed, match="closed"):
        list(stream)


def read_in_thread(stream: SyncStream, ends: list[str]) -> threading.Thread:
    """Read a stream in a thread, and record how it ends."""

    def read() -> None:
        try:
            list(stream)
        except RequestFailed as failure:
            ends.append(str(failure))
        else:
            ends.append("complete")

    thread = threading.Thread(target=read)
    thread.start()
    return thread


def test_an_engine_is_closed_with_streams_that_threads_wait_for() -> None:
    """Client first or engine first: every waiting thread gets an error."""
    for closing in (("client", "engine"), ("engine", "client")):
        engine = start()
        client = connect(engine)
        streams = [client.submit([5, 6, number], LONG) for number in range(4)]
        for stream in streams:
            next(stream)
        ends: list[str] = []
        threads = [read_in_thread(stream, ends) for stream in streams]
        for name in closing:
            close({"client": client, "engine": engine}[name])
        for thread in threads:
            thread.join(CLOSE_LIMIT_S)
        assert len(ends) == 4
        assert "complete" not in ends


@pytest.mark.parametrize(
    "number", [signal.SIGSTOP, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)]
)
def test_a_client_is_closed_whose_core_does_not_answer(number: signal.Signals) -> None:
    """Closing does not wait for an answer."""

    def measure() -> dict[str, float]:
        with start(DEFAULT) as engine:
            client = connect(engine)
            next(client.submit([5, 6, 7], LONG))
            send(engine, number, Role.CORE)
            figures = timed_close(client)
            return figures | {"engine_close_s": timed_close(engine)["close_s"]}

    within(3, measure, close_s=1.0, engine_close_s=CLOSE_LIMIT_S)


def test_a_client_is_closed_that_was_never_connected() -> None:
    """No process listens at its address."""
    within(3, lambda: timed_close(EngineClient("ipc:///nonexistent/core.sock")), close_s=1.0)


def test_an_engine_is_closed_twice_and_from_several_threads_at_once() -> None:
    """The first call closes; the others find it closed."""
    engine = start()
    client = connect(engine)
    for what in (client, engine):
        with ThreadPoolExecutor(4) as pool:
            for future in [pool.submit(what.close) for _ in range(4)]:
                future.result(CLOSE_LIMIT_S)
        close(what)


def test_an_engine_is_closed_within_a_running_loop() -> None:
    """The loop is blocked meanwhile, or goes on if a thread closes; no task is left in it."""

    async def main() -> None:
        for run in (direct, asyncio.to_thread):
            engine = await asyncio.to_thread(start)
            client = AsyncEngineClient(engine.address)
            await client.start()
            await client.wait_ready(TIMEOUT_S)
            stream = client.submit([5, 6, 7], LONG)
            await anext(stream)
            await run(close, engine)
            await client.close()
            with pytest.raises(RequestFailed, match="closed"):
                async for _ in stream:
                    pass
            assert asyncio.all_tasks() == {asyncio.current_task()}

    async def direct(function: Callable[[EngineProcesses], None], engine: EngineProcesses) -> None:
        function(engine)

    asyncio.run(main())


def test_an_engine_is_closed_in_time_while_it_sleeps() -> None:
    """A pause holds up neither the engine nor its client."""

    def measure() -> dict[str, float]:
        with start() as engine, connect(engine) as client:
            stream = client.submit([5, 6, 7], LONG)
            next(stream)
            assert client.sleep()
            figures = timed_close(engine)
            return figures | {"client_close_s": timed_close(client)["close_s"]}

    within(3, measure, close_s=2.0, client_close_s=CLOSE_LIMIT_S)


FORKING_HOST = """if True:
    import os, sys, time
    from protocol.process.launch import EngineProcesses
    from protocol.config.settings import configure
    engine = EngineProcesses.start(configure(model="null", log_level="error"), timeout_s=30)
    if os.fork() == 0:
        engine.close()  # it is not the fork's
        print("forked", flush=True)
        time.sleep(60)
    sys.stdin.readline()
    assert engine.status().ready
    began = time.monotonic()
    engine.close()
    print(time.monotonic() - began, flush=True)
    sys.stdin.readline()
"""


@pytest.mark.parametrize("is_killed", [False, True], ids=["closes", "is killed"])
def test_an_engine_is_closed_by_a_host_with_a_fork_that_lives_on(
    is_killed: bool, mark: str
) -> None:
    """The fork holds copies of all descriptors; it neither keeps the engine alive nor ends it."""
    with subprocess.Popen(
        [sys.executable, "-c", FORKING_HOST],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as host:
        assert host.stdin is not None
        assert host.stdout is not None
        assert host.stdout.readline() == "forked\n"
        if is_killed:
            host.kill()
        else:
            host.stdin.write("\n")
            host.stdin.flush()
            took_s = float(host.stdout.readline())
            assert took_s < CLOSE_GRACE_S, "no process had to be killed"

        def is_fork_alone() -> bool:
            return len(processes.living_with(_MARK, mark) - {host.pid}) == 1

        eventually(is_fork_alone, "the engine has left", 10.0)
        for pid in processes.living_with(_MARK, mark):
            processes.kill(pid)


def test_a_client_is_closed_whose_loop_is_held() -> None:
    """A function of the host blocks the client's loop; closing does not wait for it."""
    client = EngineClient("ipc:///nonexistent/core.sock")
    held = threading.Event()
    client.call(lambda: held.wait(TIMEOUT_S) and None)
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        client.close()
    assert time.monotonic() - began < CLOSE_LIMIT_S
    held.set()
    eventually(lambda: "engine-client" not in [t.name for t in threading.enumerate()], "it ends")


def test_streams_of_a_host_survive_a_killed_core() -> None:
    """After kill -9 of the core the stream goes on with exactly the next token."""
    params = SamplingParams(max_tokens=300)
    with start(DEFAULT) as engine, connect(engine) as client:
        undisturbed = client.submit([5, 6, 7], params).result(TIMEOUT_S)
        stream = client.submit([5, 6, 7], params)
        token_ids = list(next(stream).token_ids)
        send(engine, signal.SIGKILL, Role.CORE)
        for output in stream:
            assert output.first_index == len(token_ids)
            token_ids += output.token_ids
    assert token_ids == undisturbed.token_ids


@pytest.mark.parametrize(
    "num_cycles", [5, pytest.param(100, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
)
def test_cycles_leak_nothing_and_touch_nothing(num_cycles: int) -> None:
    """The host has its own handlers, loop, threads and logging: see embedding_cycles."""
    command = [sys.executable, "-m", "tests.system.embedding_cycles", "--cycles", str(num_cycles)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=1700, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "exception handler was called" not in done.stderr
    assert json.loads(done.stdout)["problems"] == []

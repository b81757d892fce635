"""Embedding: the processes never change the host's state and never outlive it."""

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol.client.sync_client import EngineClient
from protocol.config.settings import configure
from protocol.lifecycle import Role
from protocol.process.launch import EngineProcesses, EngineStartError
from protocol.sampling import SamplingParams
from scripts.testing import TIMEOUT_S, Engine, EngineFactory, eventually, is_alive
from tests.paths import ROOT
from tests.timing import within

CONFIG = configure(model="null", log_level="warning")


def pids(engine: EngineProcesses) -> dict[Role, int]:
    """Return the pids of all processes by role."""
    reply = engine.status()
    assert reply is not None
    return {row.role: row.pid for row in reply.processes if row.pid is not None}


@pytest.fixture
def embedded() -> Iterator[EngineProcesses]:
    """An engine that this process embeds."""
    with EngineProcesses.start(CONFIG, timeout_s=TIMEOUT_S) as engine:
        yield engine


def test_engine_answers_and_ends_with_its_context() -> None:
    """There is no HTTP server, nothing is left, and closing twice is harmless."""
    with EngineProcesses.start(CONFIG, timeout_s=TIMEOUT_S) as engine:
        living = pids(engine)
        # The core's standby starts half a second later.
        assert set(living) - {Role.STANDBY_CORE} == {Role.SUPERVISOR, Role.CORE, Role.WORKER}
        with EngineClient(engine.address) as client:
            client.wait_ready(TIMEOUT_S)
            params = SamplingParams(max_tokens=4, ignore_eos=True)
            assert len(client.submit([1, 2, 3], params).result(TIMEOUT_S).token_ids) == 4
    assert not any(map(is_alive, living.values()))
    assert not os.path.exists(engine.run_dir)
    engine.close()
    assert engine.status() is None


def test_host_stays_as_it_was() -> None:
    """Signal handlers, environment, descriptors and directory are unchanged."""

    def state() -> tuple[object, ...]:
        gc.collect()  # descriptors in cycles that earlier tests have left
        handlers = [signal.getsignal(number) for number in signal.valid_signals()]
        return handlers, dict(os.environ), len(os.listdir("/proc/self/fd")), os.getcwd()

    before = state()
    with EngineProcesses.start(CONFIG, timeout_s=TIMEOUT_S):
        pass
    assert state() == before


def test_dead_child_is_replaced(embedded: EngineProcesses) -> None:
    """An embedded engine is supervised like every other."""
    before = pids(embedded)
    os.kill(before[Role.CORE], signal.SIGKILL)

    def is_back() -> bool:
        reply = embedded.status()
        rows = [] if reply is None or not reply.ready else reply.processes
        return any(row.role is Role.CORE and row.pid != before[Role.CORE] for row in rows)

    eventually(is_back, "a new core is ready")
    assert pids(embedded)[Role.WORKER] == before[Role.WORKER]


@pytest.mark.parametrize(
    ("number", "role"),
    [
        (signal.SIGKILL, Role.SUPERVISOR),
        (signal.SIGSTOP, Role.CORE),
        # tests/system/embedding/test_embedding_states.py closes in these states, too.
        pytest.param(signal.SIGSTOP, Role.SUPERVISOR, marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, Role.WORKER, marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, Role.CORE, marks=pytest.mark.slow),
        pytest.param(signal.SIGSTOP, Role.WORKER, marks=pytest.mark.slow),
    ],
)
def test_close_is_bounded_in_any_state(role: Role, number: signal.Signals) -> None:
    """It takes at most 5 s though a process hangs or was killed; none is left 2 s later."""

    def measure() -> dict[str, float]:
        with EngineProcesses.start(CONFIG, timeout_s=TIMEOUT_S) as engine:
            living = pids(engine)
            os.kill(living[role], number)
            started = time.monotonic()
            engine.close()
            closed = time.monotonic()
        eventually(lambda: not any(map(is_alive, living.values())), "all are gone")
        assert not os.path.exists(engine.run_dir)
        return {"close_s": closed - started, "leaving_s": time.monotonic() - closed}

    within(3, measure, close_s=5.0, leaving_s=2.0)


def test_host_killed_by_sigkill_takes_its_engine_along(start_engine: EngineFactory) -> None:
    """All processes leave within 2 s, and the supervisor removes the temporary run directory."""
    script = """if True:
        import sys
        from protocol.process.launch import EngineProcesses
        from protocol.config.settings import configure
        engine = EngineProcesses.start(configure(model="null"), timeout_s=20)
        pids = [row.pid for row in engine.status().processes if row.pid is not None]
        print(engine.run_dir, *pids, flush=True)
        sys.stdin.read()
    """

    def measure() -> dict[str, float]:
        with subprocess.Popen(
            [sys.executable, "-c", script],
            cwd=ROOT,
            env=start_engine.environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as host:
            assert host.stdout is not None
            run_dir, *children = host.stdout.readline().split()
            assert len(children) >= 3
            host.kill()
        killed_at = time.monotonic()
        eventually(lambda: not any(is_alive(int(pid)) for pid in children), "all are gone")
        assert not os.path.exists(run_dir)
        return {"leaving_s": time.monotonic() - killed_at}

    within(3, measure, leaving_s=2.0)


@pytest.mark.slow  # test_dead_child_is_replaced covers the deaths that need no new engine
def test_streams_continue_at_a_new_engine_in_the_same_run_dir(start_engine: EngineFactory) -> None:
    run_dir = f"{start_engine.base}/own"
    config = configure(model="null", null_step_ms=10.0, log_level="warning", run_dir=run_dir)
    params = SamplingParams(max_tokens=100, ignore_eos=True)
    with EngineProcesses.start(config, timeout_s=TIMEOUT_S) as engine:
        client = EngineClient(engine.address)
        client.wait_ready(TIMEOUT_S)
        golden = client.submit([5, 6], params).result(TIMEOUT_S).token_ids
        stream = client.submit([5, 6], params)
        next(stream)
        supervisor = pids(engine)[Role.SUPERVISOR]
        os.kill(supervisor, signal.SIGKILL)
        eventually(lambda: not is_alive(supervisor), "the supervisor is dead")
        with pytest.raises(EngineStartError, match="the supervisor ended with status -9"):
            engine.check()
    with EngineProcesses.start(config, timeout_s=TIMEOUT_S), client:
        assert stream.result(TIMEOUT_S).token_ids == golden


def test_failed_start_raises_the_reason_and_leaves_nothing(start_engine: EngineFactory) -> None:
    """The error has the text of the process that failed."""
    started = time.monotonic()
    run_dir = f"{start_engine.base}/bad"
    with pytest.raises(EngineStartError, match="model /nonexistent does not exist"):
        EngineProcesses.start(configure(model="/nonexistent", run_dir=run_dir), timeout_s=TIMEOUT_S)
    assert time.monotonic() - started < 10.0, "before the timeout"
    assert not set(os.listdir(run_dir)) - {"epoch", "supervisor.lock"}


def test_another_engine_in_the_run_dir_is_not_taken_for_the_own(engine: Engine) -> None:
    """Its answers are ignored: the start fails with the reason, and the other engine lives on."""
    eventually(lambda: engine.row(Role.STANDBY_CORE).pid, "all processes are started")
    files = set(os.listdir(engine.run_dir))
    pid = engine.process.pid
    with pytest.raises(EngineStartError, match=f"in use by the supervisor with pid {pid}"):
        EngineProcesses.start(configure(model="null", run_dir=engine.run_dir), timeout_s=TIMEOUT_S)
    assert set(os.listdir(engine.run_dir)) == files
    assert engine.ready().ready


def test_unusable_run_dir_raises_its_problem() -> None:
    """The error comes before any process is started."""
    with pytest.raises(EngineStartError, match=r"run_dir /x+ is too long"):
        EngineProcesses.start(configure(model="null", run_dir="/" + "x" * 200))


def test_start_that_takes_too_long_raises(start_engine: EngineFactory) -> None:
    """The processes that were started are ended."""
    run_dir = f"{start_engine.base}/late"
    with pytest.raises(EngineStartError, match=r"not ready after 0\.05 s"):
        EngineProcesses.start(configure(model="null", run_dir=run_dir), timeout_s=0.05)
    assert not list(Path(run_dir).glob("*.sock"))

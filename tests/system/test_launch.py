"""Embedding: processes that belong to a host, which they never disturb and never outlive."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol.launch import EngineProcesses, EngineStartError
from protocol.lifecycle import Role
from protocol.sampling import SamplingParams
from protocol.settings import configure
from protocol.sync_client import EngineClient
from tests.system.conftest import ROOT, Engine, EngineFactory, eventually, is_alive

CONFIG = configure(model="null", log_level="warning")


def pids(engine: EngineProcesses) -> dict[Role, int]:
    """Of all processes."""
    reply = engine.status()
    assert reply is not None
    return {row.role: row.pid for row in reply.processes if row.pid is not None}


@pytest.fixture
def embedded() -> Iterator[EngineProcesses]:
    """An engine that this process embeds."""
    with EngineProcesses.start(CONFIG, timeout_s=20.0) as engine:
        yield engine


def test_engine_answers_and_ends_with_its_context() -> None:
    """No HTTP server, no leftovers; closing again is harmless."""
    with EngineProcesses.start(CONFIG, timeout_s=20.0) as engine:
        living = pids(engine)
        assert set(living) == {Role.SUPERVISOR, Role.CORE, Role.WORKER}
        with EngineClient(engine.address) as client:
            client.wait_ready(timeout_s=5.0)
            params = SamplingParams(max_tokens=4, ignore_eos=True)
            assert len(client.submit([1, 2, 3], params).result(5.0).token_ids) == 4
    assert not any(map(is_alive, living.values()))
    assert not os.path.exists(engine.run_dir)
    engine.close()
    assert engine.status() is None


def test_host_stays_as_it_was() -> None:
    """Signals, environment and file descriptors are the host's own."""

    def state() -> tuple[object, ...]:
        handlers = [signal.getsignal(number) for number in signal.valid_signals()]
        return handlers, dict(os.environ), len(os.listdir("/proc/self/fd")), os.getcwd()

    before = state()
    with EngineProcesses.start(CONFIG, timeout_s=20.0):
        pass
    assert state() == before


def test_dead_child_is_replaced(embedded: EngineProcesses) -> None:
    """An embedded engine is supervised like any other."""
    before = pids(embedded)
    os.kill(before[Role.CORE], signal.SIGKILL)

    def is_back() -> bool:
        reply = embedded.status()
        return reply is not None and reply.ready and pids(embedded) != before

    eventually(is_back, "a new core is ready")
    assert pids(embedded)[Role.WORKER] == before[Role.WORKER]


@pytest.mark.parametrize("role", [Role.SUPERVISOR, Role.CORE, Role.WORKER])
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_close_is_bounded_in_any_state(
    embedded: EngineProcesses, role: Role, number: signal.Signals
) -> None:
    """Within 5 s although a process hangs or was just killed; nobody is left."""
    living = pids(embedded)
    os.kill(living[role], number)
    started = time.monotonic()
    embedded.close()
    assert time.monotonic() - started < 5.0
    eventually(lambda: not any(map(is_alive, living.values())), "all are gone", 2.0)
    assert not os.path.exists(embedded.run_dir)


def test_host_killed_by_sigkill_takes_its_engine_along(start_engine: EngineFactory) -> None:
    """Within 2 s, and the temporary run directory is cleared by the supervisor."""
    script = """if True:
        import sys
        from protocol.launch import EngineProcesses
        from protocol.settings import configure
        engine = EngineProcesses.start(configure(model="null"), timeout_s=20)
        pids = [row.pid for row in engine.status().processes if row.pid is not None]
        print(engine.run_dir, *pids, flush=True)
        sys.stdin.read()
    """
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
    eventually(lambda: not any(is_alive(int(pid)) for pid in children), "all are gone", 2.0)
    assert not os.path.exists(run_dir)


def test_failed_start_raises_the_reason_and_leaves_nothing(start_engine: EngineFactory) -> None:
    """The text comes from the process that failed."""
    started = time.monotonic()
    run_dir = f"{start_engine.base}/bad"
    with pytest.raises(EngineStartError, match="model /nonexistent is no directory"):
        EngineProcesses.start(configure(model="/nonexistent", run_dir=run_dir), timeout_s=20.0)
    assert time.monotonic() - started < 5.0
    assert not set(os.listdir(run_dir)) - {"epoch", "supervisor.lock"}


def test_another_engine_in_the_run_dir_is_not_taken_for_the_own(engine: Engine) -> None:
    """Its answers do not count: the start fails with the own supervisor's reason, and it lives."""
    files = set(os.listdir(engine.run_dir))
    pid = engine.process.pid
    with pytest.raises(EngineStartError, match=f"in use by the supervisor with pid {pid}"):
        EngineProcesses.start(configure(model="null", run_dir=engine.run_dir), timeout_s=20.0)
    assert set(os.listdir(engine.run_dir)) == files
    assert engine.ready().ready


def test_unusable_run_dir_raises_its_problem() -> None:
    """Before any process is started."""
    with pytest.raises(EngineStartError, match=r"run_dir /x+ is too long"):
        EngineProcesses.start(configure(model="null", run_dir="/" + "x" * 200))


def test_start_that_takes_too_long_raises(start_engine: EngineFactory) -> None:
    """And what was begun is ended."""
    run_dir = f"{start_engine.base}/late"
    with pytest.raises(EngineStartError, match=r"not ready after 0\.05 s"):
        EngineProcesses.start(configure(model="null", run_dir=run_dir), timeout_s=0.05)
    assert not list(Path(run_dir).glob("*.sock"))

"""Engines of a Ray cluster that is in this process: errors, ends, and actors that start again."""

import asyncio
import contextlib
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest

from protocol.config.settings import configure
from protocol.transport.curve import make_keys
from scripts.placement.__main__ import _cluster, run_until
from scripts.supervisor.run_dirs import holder_of
from scripts.testing import eventually
from tests.scripts.fake_ray import FakeRay, RayActorError, RayTaskError

TIMEOUT_S = 20.0
END_S = 0.5
POLL_S = 0.01
SLOW_AGENT = """
import signal, sys
from scripts.supervisor.run_dirs import RunDir
signal.signal(signal.SIGTERM, lambda *_: print("asked", flush=True))
run_dir = RunDir(sys.argv[1])
print("ready", flush=True)
sys.stdin.read()
run_dir.close(is_abandoned=False)
"""


class Bench:
    """A cluster, and what has it run engines."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.ray = FakeRay()
        self.ray.install(patch)
        module = importlib.import_module("scripts.placement.cluster")
        patch.setattr(module, "ANSWER_S", 0.05)
        patch.setattr(module, "_POLL_S", POLL_S)
        self.cluster = module.Cluster("auto", "troika", [], {"CPU": 1.0}, 1, leave_s=60.0)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(monkeypatch)


def test_engines_are_started_kept_and_ended(bench: Bench) -> None:
    assert bench.cluster.reconcile(2) == [
        "engine 0 in the cluster is started",
        "engine 1 in the cluster is started",
    ]
    assert bench.ray.groups == {"troika first 1": 1, "troika 1": 1}
    assert bench.cluster.reconcile(1) == ["engine 1 in the cluster has ended"]
    assert list(bench.ray.actors) == ["troika 0"]
    assert bench.ray.groups == {"troika first 1": 1}


def test_an_engine_whose_calls_fail_is_reported_and_retried_while_others_run(
    bench: Bench,
) -> None:
    error = RayTaskError("ray::Machine.keep()\n  File machine.py\nOSError: there is no shell\n")
    bench.cluster.reconcile(2)
    failing = bench.ray.actors["troika 1"]
    failing.answer = lambda _: error
    notes = bench.cluster.reconcile(2)
    assert notes == ["engine 1 in the cluster cannot be started: OSError: there is no shell"]
    failing.answer = lambda _: RayActorError()
    assert bench.cluster.reconcile(3) == [
        "engine 1 in the cluster is placed anew",
        "engine 2 in the cluster is started",
    ]
    failing.answer = lambda _: True
    assert bench.cluster.reconcile(3) == ["engine 1 in the cluster is started"]
    failing.answer = lambda _: error
    notes = bench.cluster.reconcile(1)
    assert notes == [
        "engine 1 in the cluster cannot be asked to end: OSError: there is no shell",
        "engine 2 in the cluster has ended",
    ]
    failing.answer = lambda _: True
    assert bench.cluster.reconcile(1) == ["engine 1 in the cluster has ended"]
    assert failing.calls == ["keep"] * 4 + ["end"] * 2


def test_nothing_is_started_once_all_engines_end(bench: Bench) -> None:
    """The end comes while another thread has listed what there is."""
    is_listed, goes_on = threading.Event(), threading.Event()

    def wait() -> None:
        if not is_listed.is_set():
            is_listed.set()
            assert goes_on.wait(TIMEOUT_S)

    bench.cluster.reconcile(1)
    bench.ray.on_list = wait
    keeping = threading.Thread(target=bench.cluster.reconcile, args=[3])
    keeping.start()
    assert is_listed.wait(TIMEOUT_S)
    ending = threading.Thread(target=bench.cluster.end_all, args=[TIMEOUT_S])
    ending.start()
    ending.join(0.2)
    assert ending.is_alive(), "it waits for the other call"
    goes_on.set()
    for thread in (keeping, ending):
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()
    assert (bench.ray.actors, bench.ray.groups) == ({}, {})
    assert bench.cluster.reconcile(3) == []
    assert bench.ray.actors == {}


def test_the_end_does_not_wait_for_a_call_that_hangs(bench: Bench) -> None:
    goes_on = threading.Event()

    def hang() -> None:
        assert goes_on.wait(TIMEOUT_S)

    bench.ray.on_list = hang
    keeping = threading.Thread(target=bench.cluster.reconcile, args=[1])
    keeping.start()
    try:
        with pytest.raises(TimeoutError):
            bench.cluster.end_all(0.1)
    finally:
        goes_on.set()
        keeping.join(TIMEOUT_S)
    assert bench.ray.actors == {}


def test_the_end_is_bounded_and_asks_now_and_then(bench: Bench) -> None:
    bench.cluster.reconcile(1)
    actor = bench.ray.actors["troika 0"]
    actor.answer = lambda _: False
    bench.cluster.end_all(END_S)
    assert bench.ray.actors == {}
    assert actor.calls.count("end") <= END_S / POLL_S + 1


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys", ["api"])
    return tmp_path / "keys"


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory of run directories, whose name is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="troika-", ignore_cleanup_errors=True) as path:
        monkeypatch.setattr(tempfile, "tempdir", path)
        yield Path(path)


def test_an_actor_that_starts_again_finds_an_agent_that_has_no_settings_yet(
    keys: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine that the agent joins is not there, so that it answers no query."""
    FakeRay().install(monkeypatch)
    make = importlib.import_module("scripts.placement.machine").Machine
    arguments = ["--join", "127.0.0.1:9", "--curve-keys", str(keys), "--listen", "127.0.0.1"]
    first = make("one", arguments)
    assert first.keep()
    [run_dir] = eventually(lambda: list(directory.glob("troika-ray-*")), "it has a directory")
    pid = eventually(lambda: holder_of(str(run_dir)), "it holds that")
    try:
        successor = make("one", arguments)
        assert not successor.keep()
        assert not successor.end()
        eventually(successor.end, "it has ended")
        assert holder_of(str(run_dir)) is None
        assert make("one", arguments).end(), "there is none"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_an_agent_is_asked_to_end_once_also_by_an_actor_that_starts_again(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second signal would end its engine at once."""
    FakeRay().install(monkeypatch)
    module = importlib.import_module("scripts.placement.machine")
    command = [sys.executable, "-c", SLOW_AGENT, str(module.run_dir_of("one", "node"))]
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True) as agent:
        assert agent.stdin is not None
        assert agent.stdout is not None
        assert agent.stdout.readline() == "ready\n"
        assert not module.Machine("one", []).end()
        assert agent.stdout.readline() == "asked\n"
        successor = module.Machine("one", [])
        assert not successor.end()
        assert not successor.end()
        agent.stdin.close()
        assert agent.stdout.read() == ""
    assert successor.end()


def test_agents_get_a_path_of_the_keys_that_does_not_depend_on_their_directory(
    keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(keys.parent)
    config = configure(
        model="null", ray="auto", agents_listen="10.0.0.1:7100", curve_keys=keys.name
    )
    made: Any = _cluster(config, lambda *values, leave_s: (values, leave_s))  # type: ignore[arg-type, return-value]
    values, leave_s = made
    assert str(keys) in values[2]
    assert leave_s > config.recovery.shutdown_timeout_s


def test_the_error_of_a_job_is_raised_and_the_others_end_with_the_event() -> None:
    """Then the process ends, and its successor begins anew."""

    async def fail() -> None:
        raise ZeroDivisionError

    async def play() -> None:
        stops = asyncio.Event()
        forever = asyncio.Event()
        ended: list[str] = []

        async def wait(name: str) -> None:
            try:
                await forever.wait()
            finally:
                ended.append(name)

        with pytest.raises(ZeroDivisionError):
            await run_until(stops, wait("one"), fail())
        asyncio.get_running_loop().call_soon(stops.set)
        await run_until(stops, wait("other"))
        await asyncio.sleep(0)
        assert ended == ["one", "other"]

    asyncio.run(asyncio.wait_for(play(), TIMEOUT_S))

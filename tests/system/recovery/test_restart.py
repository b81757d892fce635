"""Planned restarts under load: no errors, no lost tokens, and short pauses."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from protocol import message
from protocol.lifecycle import ProcessState, Role
from protocol.process.status import StatusLink
from scripts import restart, status
from scripts.testing import TIMEOUT_S, Engine, EngineFactory, eventually, is_alive
from tests.paths import ROOT
from tests.system.null_load import Stream, loaded, null_tokens
from tests.system.shared_engines import EnginePool

NUM_RESTARTS = {Role.WORKER: 2, Role.CORE: 2, Role.API: 1}
"""Restarts in a row; an API takes time to leave."""
WAYS = ("command", "SIGTERM")
FLAGS = ("--null-step-ms", "5")
NUM_TOKENS = 400


class Trickle:
    """Short requests on new connections, one after the other."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._is_over = threading.Event()
        self.errors: list[str] = []
        self.num_answers = 0
        self.longest_s = 0.0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        expected = null_tokens([9, 9], 3)
        while not self._is_over.is_set():
            began = time.monotonic()
            stream = Stream(self._url, model="null", prompt=[9, 9], max_tokens=3).join()
            self.longest_s = max(self.longest_s, time.monotonic() - began)
            if stream.error is not None or stream.token_ids != expected:
                self.errors.append(f"{stream.error} {stream.token_ids}")
            self.num_answers += 1

    def end(self) -> None:
        """Stop sending, and assert that all requests were answered."""
        self._is_over.set()
        self._thread.join(20.0)
        assert not self.errors
        assert self.num_answers > 0


@contextmanager
def under_load(engine: Engine) -> Iterator[None]:
    """Run long streams and new requests, and check all of them at the end."""
    load = loaded(engine, NUM_TOKENS)
    trickle = Trickle(engine.url())
    yield
    load.check()
    trickle.end()


def command(engine: Engine, role: str) -> subprocess.CompletedProcess[str]:
    """Run the restart command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "scripts.restart", role, "--run-dir", engine.run_dir],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30.0,
        check=False,
    )


def ask(engine: Engine, role: Role) -> None:
    """Ask for a restart as the command does, without waiting for its end."""
    link = StatusLink(engine.run_dir)
    try:
        reply = link.restart(role, 5.0)
    finally:
        link.close()
    assert reply is not None
    assert reply.accepted, reply.reason


def replace(engine: Engine, role: Role, way: str) -> None:
    """Ask for a restart in one of two ways, and wait for it."""
    before = engine.row(role)
    if way == "command":
        done = command(engine, role)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(f"{role} replaced in ")
        assert f"pid {before.pid} by {engine.pid(role)}" in done.stdout
    else:
        os.kill(engine.pid(role), signal.SIGTERM)
        eventually(lambda: engine.row(role).epoch > before.epoch, f"{role} is replaced")
    assert engine.row(role).epoch > before.epoch


@pytest.mark.parametrize(
    ("standby", "role", "way"),
    [("1", Role.WORKER, way) for way in WAYS]
    + [("0", role, way) for role in (Role.CORE, Role.API) for way in WAYS]
    + [("0", Role.WORKER, "command")],
)
def test_clients_do_not_notice_a_planned_restart(
    shared_engine: EnginePool, standby: str, role: Role, way: str
) -> None:
    """Each role is restarted under streams and new requests; the old process ends with status 0."""
    engine = shared_engine(*FLAGS, "--standby-workers", standby)
    with under_load(engine):
        for _ in range(NUM_RESTARTS[role]):
            replace(engine, role, way)
    ends = f"{role}( spare)? ended with status 0"
    eventually(lambda: len(re.findall(ends, engine.log)) == NUM_RESTARTS[role], "the old are gone")
    assert "died of" not in engine.log
    assert "Traceback" not in engine.log


def test_leaving_api_finishes_its_streams_while_its_successor_serves(
    shared_engine: EnginePool,
) -> None:
    """Two API processes live for a while; then the old one is gone."""
    engine = shared_engine(*FLAGS, "--standby-workers", "0")
    load = loaded(engine, 1500, num_streams=2)
    old = engine.row(Role.API)
    ask(engine, Role.API)
    eventually(lambda: engine.row(Role.API).epoch > old.epoch, "the successor serves")
    leaving = engine.row(Role.API, 1)
    assert (leaving.pid, leaving.state) == (old.pid, ProcessState.DRAINING)
    assert all(stream.is_open for stream in load.streams)
    assert Stream(engine.url(), model="null", prompt=[4], max_tokens=2).join().error is None
    load.check()
    eventually(lambda: not is_alive(old.pid or 0), "the old one is gone")
    eventually(lambda: "api spare ended with status 0" in engine.log, "it ended in order")
    eventually(lambda: all(row.rank == 0 for row in engine.ready().processes), "its row, too")


def test_restart_that_is_not_possible_is_refused(start_engine: EngineFactory) -> None:
    """The refusal has the reason: no such process, replaced already, about to end."""
    engine = start_engine("--no-api", "--null-step-ms", "5")
    engine.ready()
    assert "this engine has no api" in command(engine, "api").stderr
    link = StatusLink(engine.run_dir)
    try:
        reply = link.restart(Role.ZYGOTE, 2.0)
        assert reply is not None
        assert not reply.accepted
        os.kill(engine.pid(Role.WORKER), signal.SIGSTOP)
        first, second = link.restart(Role.WORKER, 2.0), link.restart(Role.WORKER, 2.0)
        assert first is not None
        assert first.accepted
        assert second is not None
        assert second.reason == "the worker is being replaced already"
        engine.row(Role.WORKER)
    finally:
        link.close()


def test_commands_and_the_log_name_another_version(
    start_engine: EngineFactory,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """After an upgrade of the installed files, an engine that still runs needs a new start."""
    engine = start_engine("--no-api")
    engine.ready()
    own, of_engine = message.PROTOCOL_VERSION + 1, message.PROTOCOL_VERSION
    monkeypatch.setattr(message, "PROTOCOL_VERSION", own)
    monkeypatch.setattr(restart, "_ANSWER_TIMEOUT_S", 0.5)  # no answer can be read
    reason = f"peer has protocol {of_engine}, this program {own}"
    for command_of, arguments in ((status.main, []), (restart.main, ["core"])):
        began = time.monotonic()
        assert command_of([*arguments, "--run-dir", engine.run_dir]) == 1
        assert time.monotonic() - began < TIMEOUT_S
        assert f"cannot be read: {reason}" in capsys.readouterr().err
    monkeypatch.undo()
    assert engine.ready()
    reason = f"peer has protocol {own}, this program {of_engine}; if installed files were"
    lines = [line for line in engine.log.splitlines() if "cannot be read" in line]
    assert [reason in line for line in lines] == [True], "one line in a minute"


def test_worker_that_does_not_leave_is_killed(start_engine: EngineFactory) -> None:
    """The worker hangs; its time to leave is bounded."""
    engine = start_engine("--no-api")
    worker = engine.row(Role.WORKER)
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGSTOP)
    done = command(engine, "worker")
    assert done.returncode == 0, done.stderr
    assert engine.row(Role.WORKER).epoch > worker.epoch


def test_ranks_are_replaced_together(start_engine: EngineFactory) -> None:
    """Both ranks are, after a restart and after the death of one of them; the core stays."""
    engine = start_engine("--no-api", "--tensor-parallel-size", "2")
    core = engine.pid(Role.CORE)

    def check(replace: Callable[[], object]) -> None:
        before = {engine.pid(Role.WORKER, rank) for rank in range(2)}
        replace()
        assert not before & {engine.pid(Role.WORKER, rank) for rank in range(2)}
        assert engine.pid(Role.CORE) == core

    def restart() -> None:
        done = command(engine, "worker")
        assert done.returncode == 0, done.stderr

    check(restart)
    check(lambda: engine.kill(Role.WORKER, 1))


def test_engine_can_end_while_an_api_leaves(start_engine: EngineFactory) -> None:
    """No process is left behind."""
    engine = start_engine("--null-step-ms", "20", "--shutdown-timeout-s", "1")
    loaded(engine, NUM_TOKENS, num_streams=2)
    old = engine.row(Role.API)
    ask(engine, Role.API)
    eventually(lambda: engine.row(Role.API).epoch > old.epoch, "the successor serves")
    engine.process.terminate()
    assert engine.process.wait(TIMEOUT_S) == 0, engine.log
    assert not any(map(is_alive, engine.all_pids))

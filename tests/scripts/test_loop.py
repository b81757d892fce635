"""The supervisor without processes, and with real ones under faults."""

import contextlib
import io
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest

from protocol.config import EngineConfig, ParallelConfig
from protocol.config.settings import configure
from protocol.lifecycle import Role
from protocol.process.child_handle import Child
from scripts.supervisor import roles
from scripts.supervisor.console import Console
from scripts.supervisor.invocation import Invocation
from scripts.supervisor.loop import Supervisor
from scripts.supervisor.policy import CRASH_LOOP_DEATHS
from scripts.supervisor.run_dirs import RunDir
from scripts.supervisor.system import System
from scripts.testing import eventually

CONFIG = configure(model="null", tensor_parallel_size=2)


@pytest.fixture
def run_dir() -> Iterator[RunDir]:
    """A directory whose name is short enough for sockets."""
    path = tempfile.mkdtemp(prefix="troika-")
    held = RunDir(path)
    yield held
    held.close(is_abandoned=False)
    shutil.rmtree(path)


def invocation(console: Console, signal_fd: int) -> Invocation:
    return Invocation(console, signal_fd, time.monotonic(), has_api=False, has_bars=False)


def test_processes_that_cannot_be_started_end_the_start_with_the_reason(
    run_dir: RunDir,
) -> None:
    """A rank that fails to start kills the other, which has no process either."""
    tries: list[str] = []

    def refuse(module: str, *_: object, **__: object) -> None:
        tries.append(module)
        raise OSError(11, "Resource temporarily unavailable")

    config: EngineConfig = msgspec.structs.replace(
        CONFIG, run=msgspec.structs.replace(CONFIG.run, run_dir=run_dir.path)
    )
    stream = io.StringIO()
    read_fd, write_fd = os.pipe()
    starting = Supervisor(
        config,
        run_dir,
        invocation(Console(stream, is_terminal=True), read_fd),
        listener=None,
        system=System(start_child=refuse),
    )
    assert starting.run() == 1
    os.close(read_fd)
    os.close(write_fd)
    failure = starting.policy.failure
    assert failure is not None
    assert "failed (start): [Errno 11] Resource temporarily unavailable" in failure
    assert max(map(tries.count, ("worker_proc", "core_proc"))) >= CRASH_LOOP_DEATHS


class MournedChild(Child):
    """Asserts that predecessors are dead and reaped before a start."""

    predecessors: ClassVar[dict[str, list[Child]]] = {}

    def __init__(self, module: str, *arguments: Any, **keywords: Any) -> None:
        for other in self.predecessors.setdefault(module, []):
            assert other._status is not None, "waitid has not reported it"
            assert not Path(f"/proc/{other.pid}").exists()
            assert other.epoch < keywords["epoch"]
        super().__init__(module, *arguments, **keywords)
        self.predecessors[module].append(self)


def test_successor_is_started_when_its_predecessor_is_reaped(
    run_dir: RunDir, capfd: pytest.CaptureFixture[str]
) -> None:
    """Killed, stopped or hanging: a process that is not reaped could still send messages."""
    MournedChild.predecessors.clear()
    recovery = msgspec.structs.replace(CONFIG.recovery, hang_timeout_s=1.0, standby_cores=0)
    config: EngineConfig = msgspec.structs.replace(
        CONFIG,
        run=msgspec.structs.replace(CONFIG.run, run_dir=run_dir.path),
        recovery=recovery,
        parallel=ParallelConfig(),
    )
    read_fd, write_fd = os.pipe()
    running = Supervisor(
        config,
        run_dir,
        invocation(Console(io.StringIO(), is_terminal=False), read_fd),
        listener=None,
        system=System(start_child=MournedChild),
    )
    harm = threading.Thread(target=_harm, args=(running, write_fd))
    harm.start()
    status = running.run()
    harm.join()
    os.close(read_fd)
    os.close(write_fd)
    assert status == 0
    for module in ("worker_proc", "core_proc"):
        assert len(MournedChild.predecessors[module]) >= 3, capfd.readouterr().err


def _harm(running: Supervisor, write_fd: int) -> None:
    """Kill each process, then stop each, then end the engine."""
    try:
        for number in (signal.SIGKILL, signal.SIGSTOP):
            for role in (Role.WORKER, Role.CORE):
                eventually(lambda: running.policy.is_ready, "all are ready")
                heirs = MournedChild.predecessors[roles.MODULES[role]]
                old = heirs[-1]
                with contextlib.suppress(ProcessLookupError):  # it was killed as hanging
                    os.kill(old.pid, number)
                eventually(lambda heirs=heirs, old=old: heirs[-1] is not old, "it has an heir")
        eventually(lambda: running.policy.is_ready, "all are ready")
    finally:
        os.write(write_fd, b"..")

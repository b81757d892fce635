"""The supervisor without any process: none can be started."""

import io
import os
import shutil
import tempfile
import time
from collections.abc import Iterator

import msgspec
import pytest

from protocol.config import EngineConfig
from protocol.settings import configure
from scripts import supervisor
from scripts.console import Console
from scripts.run_dirs import RunDir
from scripts.supervision import CRASH_LOOP_DEATHS
from scripts.supervisor import Supervisor

CONFIG = configure(model="null", tensor_parallel_size=2)


@pytest.fixture
def run_dir() -> Iterator[RunDir]:
    """A directory short enough for sockets."""
    path = tempfile.mkdtemp(prefix="troika-")
    held = RunDir(path)
    yield held
    held.close(is_abandoned=False)
    shutil.rmtree(path)


def test_processes_that_cannot_be_started_end_the_start_with_the_reason(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank's failure is to kill the other, which has no process either; tries are counted."""
    tries: list[str] = []

    def refuse(module: str, *_: object, **__: object) -> None:
        tries.append(module)
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(supervisor, "Child", refuse)
    config: EngineConfig = msgspec.structs.replace(
        CONFIG, run=msgspec.structs.replace(CONFIG.run, run_dir=run_dir.path)
    )
    stream = io.StringIO()
    starting = Supervisor(
        config,
        run_dir,
        Console(stream, is_terminal=True),
        listener=None,
        parent_fd=None,
        started_at=time.monotonic(),
    )
    read_fd, write_fd = os.pipe()
    assert starting.run(read_fd) == 1
    os.close(read_fd)
    os.close(write_fd)
    failure = starting.supervision.failure
    assert failure is not None
    assert "failed (start): [Errno 11] Resource temporarily unavailable" in failure
    assert max(map(tries.count, ("worker_proc", "core_proc"))) >= CRASH_LOOP_DEATHS

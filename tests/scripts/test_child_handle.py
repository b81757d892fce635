"""A failed start leaves nothing behind, and a process that does not end blocks no caller."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol.config.settings import configure
from protocol.process import child_handle
from protocol.process.child_handle import Child
from scripts.testing import eventually, is_alive

CONFIG = configure(model="null")


def open_fds() -> set[str]:
    """Return the descriptors of this process, with their targets."""
    found = set()
    for fd in Path("/proc/self/fd").iterdir():
        try:
            found.add(f"{fd.name} {os.readlink(fd)}")
        except FileNotFoundError:
            continue
    return found


@pytest.fixture(autouse=True)
def no_descriptors_left() -> Iterator[None]:
    """Assert that every test closes the descriptors that it opens."""
    before = open_fds()
    yield
    assert not open_fds() - before, "descriptors are left open"


@pytest.fixture
def sleeper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A module that ignores everything but SIGKILL."""
    monkeypatch.setattr(child_handle, "_DEATH_TIMEOUT_S", 30.0)
    (tmp_path / "sleeper.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "sleeper"


def refuse(*_: object, **__: object) -> int:
    raise OSError(24, "Too many open files")


def test_a_child_runs_the_packages_of_its_parent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = tmp_path / "found"
    source = (
        f"import core_proc, pathlib\npathlib.Path({str(found)!r}).write_text(core_proc.__file__)"
    )
    (tmp_path / "witness.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    child = Child("witness", CONFIG, epoch=1)
    try:
        assert child.wait(30.0) == 0
    finally:
        child.stop(0.0)
    assert Path(found.read_text()).parents[1] == Path(child_handle.__file__).parents[2]


@pytest.mark.parametrize("step", ["pipe", "write", "Popen"])
def test_failed_start_closes_its_descriptors(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """Nothing is left, whichever step fails."""
    monkeypatch.setattr(subprocess if step == "Popen" else os, step, refuse)
    with pytest.raises(OSError, match="Too many open files"):
        Child("sleeper", CONFIG, epoch=1)


def test_second_pipe_that_fails_closes_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first pipe is that of the configuration."""
    pipe, calls = os.pipe, []

    def second_fails() -> tuple[int, int]:
        calls.append(1)
        return pipe() if len(calls) == 1 else (refuse(), 0)

    monkeypatch.setattr(os, "pipe", second_fails)
    with pytest.raises(OSError, match="Too many open files"):
        Child("sleeper", CONFIG, epoch=1)


def test_process_that_cannot_be_watched_is_ended(
    monkeypatch: pytest.MonkeyPatch, sleeper: str
) -> None:
    """Without a pidfd its death would not be noticed."""
    started: list[int] = []

    def no_pidfd(pid: int) -> int:
        started.append(pid)
        return refuse()

    monkeypatch.setattr(os, "pidfd_open", no_pidfd)
    with pytest.raises(OSError, match="Too many open files"):
        Child(sleeper, CONFIG, epoch=1)
    assert not Path(f"/proc/{started[0]}").exists(), "ended and reaped"


def test_stop_kills_what_does_not_leave(sleeper: str) -> None:
    """This process ignores EOF of the parent pipe."""
    process = Child(sleeper, CONFIG, epoch=1)
    assert process.stop(grace_s=0.0) == -signal.SIGKILL
    assert not is_alive(process.pid)


def test_stop_returns_although_the_process_cannot_be_killed(
    monkeypatch: pytest.MonkeyPatch, sleeper: str
) -> None:
    """It is as in uninterruptible sleep, and every wait has a deadline."""
    process = Child(sleeper, CONFIG, epoch=1)
    monkeypatch.setattr(process, "kill", lambda: None)
    monkeypatch.setattr(child_handle, "_DEATH_TIMEOUT_S", 0.05)
    started = time.monotonic()
    assert process.stop(grace_s=0.0) is None
    assert time.monotonic() - started < 30.0, "it would sleep for a minute"
    os.kill(process.pid, signal.SIGKILL)
    eventually(lambda: process.poll() is not None, "it is reaped")


def test_configuration_arrives_although_the_child_reads_it_late(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It stays in the pipe although every writing end is closed."""
    (tmp_path / "late.py").write_text(
        "import os, sys\n"
        "fd = int(sys.argv[sys.argv.index('--config-fd') + 1])\n"
        "sys.exit(len(os.fdopen(fd, 'rb').read()) % 251)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    process = Child("late", CONFIG, epoch=1)
    status = process.wait(60.0)
    process.close()
    assert status is not None
    assert status > 0

"""Run directories: the lock shows which are live, and the register tolerates any content."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol.config import ConfigError
from protocol.config.setting_fields import flag_of
from protocol.process.run_dir import exchange_prefix, lifecycle_address
from protocol.stores.tiers import SHARED_MEMORY
from scripts.supervisor import run_dirs
from scripts.supervisor.run_dirs import (
    RunDir,
    RunDirBusyError,
    live_run_dirs,
    wait_for_epoch_by_clock,
)
from scripts.supervisor.serving import open_run_dir
from tests.paths import ROOT
from worker_proc.parallel.adoption import Adoption


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary place for the register, with a name short enough for sockets."""
    path = tempfile.mkdtemp(prefix="troika-")
    monkeypatch.setenv("XDG_RUNTIME_DIR", path)
    yield Path(path)
    shutil.rmtree(path)


def register_dir(base: Path) -> Path:
    return base / f"troika-{os.getuid()}"


def test_directory_that_is_locked_is_live_without_an_answer(base: Path) -> None:
    """A supervisor with a full backlog, or none: it is listed and not removed."""
    held = RunDir(None)
    held.register()
    assert not Path(lifecycle_address(held.path).removeprefix("ipc://")).exists()
    assert live_run_dirs() == [held.path]
    other = RunDir(str(base / "other"))
    other.register()
    assert live_run_dirs() == sorted([held.path, other.path])
    other.close(is_abandoned=False)
    held.close(is_abandoned=False)
    assert live_run_dirs() == []
    assert not os.path.exists(held.path)


def leave_shared_files(run_dir: str) -> list[Path]:
    """Leave what ranks leave that die before all have joined; returns the files."""
    adoption = Adoption(0, 2, run_dir)
    adoption.begin(1)
    adoption.path("group-0-").touch()
    adoption.map_file("sums-0-", 1, makes=True, deadline=0.0)
    prefix = exchange_prefix(run_dir)
    return [*SHARED_MEMORY.glob(f"{prefix}*"), *Path(run_dir).glob(f"{prefix}*")]


def test_a_given_directory_keeps_no_file_of_processes_that_have_ended(base: Path) -> None:
    """Shared memory has none either."""
    run_dir = RunDir(str(base / "given"))
    run_dir.next_epoch()
    left = leave_shared_files(run_dir.path)
    (base / "given" / "core.sock").touch()
    run_dir.close(is_abandoned=False)
    assert {path.name for path in (base / "given").iterdir()} == {"epoch", "supervisor.lock"}
    assert len(left) == 2
    assert not any(path.exists() for path in left)


def test_the_next_supervisor_removes_what_ranks_of_a_killed_one_have_left(base: Path) -> None:
    killed = base / "killed"
    killed.mkdir(mode=0o700)
    left = leave_shared_files(str(killed))
    held = RunDir(str(base / "given"))
    held.register()
    assert all(path.exists() for path in left)
    (base / f"troika-{os.getuid()}" / "given-1").symlink_to(killed)
    held.register()
    assert len(left) == 2
    assert not any(path.exists() for path in left)
    held.close(is_abandoned=False)


def test_a_directory_that_is_gone_is_closed(base: Path) -> None:
    run_dir = RunDir(str(base / "given"))
    shutil.rmtree(run_dir.path)
    run_dir.close(is_abandoned=False)


def test_directory_of_the_dead_is_cleared_by_the_next(base: Path) -> None:
    """The lock ends with its holder; a temporary directory is removed, a given one stays."""
    script = (
        "import sys\nfrom scripts.supervisor.run_dirs import RunDir\n"
        "run_dir = RunDir(sys.argv[1] or None); run_dir.register()\n"
        "print(run_dir.path, flush=True); sys.stdin.read()\n"
    )
    dead = []
    for path in ("", str(base / "given")):
        command = [sys.executable, "-c", script, path]
        with subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as holder:
            assert holder.stdout is not None
            dead.append(holder.stdout.readline().strip())
            assert live_run_dirs() == [dead[-1]]
            holder.send_signal(signal.SIGKILL)
        assert live_run_dirs() == []
    successor = RunDir(str(base / "next"))
    successor.register()
    assert [Path(path).exists() for path in dead] == [False, True]
    assert [link.name for link in register_dir(base).iterdir()] == [f"given-{os.getpid()}"]
    successor.close(is_abandoned=False)


def test_entries_that_vanish_while_the_register_is_read_are_skipped(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another supervisor ends between listing and reading; files that are not links are ignored."""
    held = RunDir(str(base / "held"))
    held.register()
    register = register_dir(base)
    (register / "given-1").symlink_to(base / "gone")
    (register / "note").touch()
    readlink = os.readlink

    def racing(path: Path) -> str:
        (register / "given-1").unlink(missing_ok=True)
        return readlink(path)

    monkeypatch.setattr(os, "readlink", racing)
    assert live_run_dirs() == [held.path]
    (register / "given-1").symlink_to(base / "gone")
    other = RunDir(str(base / "other"))
    other.register()
    other.close(is_abandoned=False)
    held.close(is_abandoned=False)


def test_successor_in_the_same_directory_is_listed_once(base: Path) -> None:
    """The entry of a killed supervisor names a directory that is locked again."""
    register_dir(base).mkdir(mode=0o700)
    (register_dir(base) / "given-1").symlink_to(base / "run")
    held = RunDir(str(base / "run"))
    held.register()
    assert live_run_dirs() == [held.path]
    held.close(is_abandoned=False)
    assert not list(register_dir(base).iterdir())


def test_an_unusable_directory_is_named_by_its_flag(base: Path) -> None:
    file = base / "file"
    file.touch()
    held = RunDir(str(base / "held"))
    problems = {
        str(file): f"--run-dir {file} is a file, not a directory",
        "/proc/troika": "--run-dir /proc/troika cannot be used: No such file or directory",
        f"/{'x' * 100}": r"--run-dir /x+ is too long: .*",
        held.path: f"--run-dir {held.path} is in use by the supervisor with pid {os.getpid()}",
    }
    for path, complaint in problems.items():
        with pytest.raises(ConfigError) as caught:
            open_run_dir(path)
        assert re.fullmatch(complaint, caught.value.spelled(flag_of))
    held.close(is_abandoned=False)


def test_without_room_for_a_temporary_directory_the_flag_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "")
    monkeypatch.setattr(tempfile, "tempdir", "/proc")  # in which not even root makes a directory
    with pytest.raises(ConfigError, match=r"^no temporary run directory can be made; name one"):
        open_run_dir(None)


def test_second_holder_is_refused_and_a_look_disturbs_no_holder(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look holds the lock for a moment; a supervisor that wants the lock waits."""
    path = str(base / "held")
    held = RunDir(path)
    with pytest.raises(RunDirBusyError, match=f"in use by the supervisor with pid {os.getpid()}"):
        RunDir(path)
    held.close(is_abandoned=False)
    monkeypatch.setattr(run_dirs, "_LOCK_TIMEOUT_S", 30.0)  # an interpreter takes time to end
    script = (
        "import fcntl, sys, time\nlock = open(sys.argv[1])\nfcntl.flock(lock, fcntl.LOCK_EX)\n"
        "print('held', flush=True); time.sleep(0.05)\n"
    )
    command = [sys.executable, "-c", script, f"{path}/supervisor.lock"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as looker:
        assert looker.stdout is not None
        assert looker.stdout.readline() == b"held\n"
        RunDir(path).close(is_abandoned=False)


def test_epochs_are_on_the_disk_before_they_are_used(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file and its directory entry are synced, so a power failure cannot undo them."""
    synced: list[str] = []

    def fsync(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))

    monkeypatch.setattr(os, "fsync", fsync)
    path = str(base / "held")
    held = RunDir(path)
    assert [held.next_epoch() for _ in range(2)] == [1, 2]
    assert synced == [f"{path}/epoch.new", path] * 2
    held.close(is_abandoned=False)
    successor = RunDir(path)
    successor.raise_epoch(1)
    assert successor.next_epoch() == 3
    successor.close(is_abandoned=False)


def test_full_disk_stops_no_engine_that_runs(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Epochs still grow, and are saved again when there is space."""
    held = RunDir(str(base / "held"))
    assert held.next_epoch() == 1

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        assert [held.next_epoch() for _ in range(2)] == [2, 3]
    assert held.next_epoch() == 4
    assert (base / "held" / "epoch").read_text() == "4\n"
    held.close(is_abandoned=False)


def test_epochs_by_the_clock_increase_even_at_once() -> None:
    """An engine that ends at once has another epoch than its successor."""
    epochs = [wait_for_epoch_by_clock() for _ in range(3)]
    assert epochs == sorted(set(epochs))
    assert 0 < epochs[-1] < 2**31


@pytest.mark.parametrize("removed", ["", "supervisor.lock", "epoch", "the link"])
def test_what_is_removed_of_a_directory_in_use_is_made_again(base: Path, removed: str) -> None:
    """Epochs go on, and its holder keeps it. Any file may be one that a cleaner removes."""
    path = base / "held"
    held = RunDir(str(path))
    held.register()
    held.next_epoch()
    assert not held.restore()
    if removed == "the link":
        shutil.rmtree(register_dir(base))
    elif removed:
        (path / removed).unlink()
    else:
        shutil.rmtree(path)
    assert held.restore()
    assert not held.restore()
    assert live_run_dirs() == [str(path)]
    with pytest.raises(RunDirBusyError):
        RunDir(str(path))
    held.close(is_abandoned=False)
    successor = RunDir(str(path))
    assert successor.next_epoch() == 2
    successor.close(is_abandoned=False)


def test_a_directory_that_another_supervisor_has_made_again_is_left_to_it(base: Path) -> None:
    path = base / "held"
    held = RunDir(str(path))
    shutil.rmtree(path)
    other = RunDir(str(path))
    (path / "core.sock").touch()
    with pytest.raises(RunDirBusyError, match=f"supervisor with pid {os.getpid()} has made it"):
        held.restore()
    held.close(is_abandoned=False)
    assert (path / "core.sock").exists()
    other.close(is_abandoned=False)

"""The journal on full, broken and slow disks: errors are reported, and later segments complete."""

import errno
import os
import threading
from pathlib import Path

import pytest

from api_proc.resumption import journal as journal_module
from scripts.testing import eventually
from tests.api.journal_owner import Owner, recovered, segments


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS])
@pytest.mark.parametrize("where", ["open", *range(6)])
def test_every_failing_operation_is_reported_and_the_next_segment_is_complete(
    tmp_path: Path, where: str | int, number: int
) -> None:
    num_writes = 0
    broken = True

    def open_file(path: str, flags: int, mode: int) -> int:
        if broken and where == "open":
            raise OSError(number, os.strerror(number))
        return os.open(path, flags, mode)

    def write(fd: int, data: memoryview) -> int:
        nonlocal num_writes
        num_writes += 1
        if broken and num_writes - 1 == where:
            os.write(fd, data[: len(data) // 2])  # a part is written before the error
            raise OSError(number, os.strerror(number))
        return os.write(fd, data)

    owner = Owner(tmp_path, open_file, write)
    owner.recover()
    owner.begin(b"a")
    owner.settle() if where not in (0, 1, "open") else None
    for record in (b"b", b"c", b"d"):
        owner.journal.append(record)
        owner.settle() if not owner.errors else None
    eventually(lambda: owner.errors, "the failure is reported", 30.0)
    assert owner.errors[0].errno == number
    assert not owner.journal.is_writing
    assert owner.journal.append(b"lost") == owner.journal.num_written
    broken = False
    owner.begin(b"a", b"b", b"c", b"d")
    owner.journal.append(b"e")
    owner.journal.close()
    assert recovered(tmp_path) == [b"a", b"b", b"c", b"d", b"e"]
    assert len(segments(tmp_path)) == 1


def test_short_writes_are_completed(tmp_path: Path) -> None:
    owner = Owner(tmp_path, write=lambda fd, data: os.write(fd, data[:3]))
    owner.recover()
    owner.begin(b"snapshot of some length")
    owner.journal.append(b"and a record")
    owner.journal.close()
    assert recovered(tmp_path) == [b"snapshot of some length", b"and a record"]


def test_a_blocked_disk_counts_as_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The queue is bounded, and append never waits."""
    monkeypatch.setattr(journal_module, "MAX_QUEUED_BYTES", 1000)
    may_go_on = threading.Event()

    def write(fd: int, data: memoryview) -> int:
        may_go_on.wait(60.0)
        return os.write(fd, data)

    owner = Owner(tmp_path, write=write)
    owner.recover()
    owner.begin()
    for _ in range(20):
        owner.journal.append(bytes(100))
    assert "does not keep up" in str(owner.errors[0])
    may_go_on.set()
    owner.begin(b"again")
    owner.journal.close()
    assert recovered(tmp_path) == [b"again"]


class SmallDisk:
    """Holds `capacity` bytes; deleted files make room again."""

    def __init__(self, directory: Path, capacity: int) -> None:
        self.directory, self.capacity = directory, capacity

    def write(self, fd: int, data: memoryview) -> int:
        used = sum(path.stat().st_size for path in segments(self.directory))
        if used >= self.capacity:
            raise OSError(errno.ENOSPC, "no room")
        return os.write(fd, data[: self.capacity - used])


def test_a_disk_full_of_old_segments_is_used_again(tmp_path: Path) -> None:
    """Old segments must not prevent a new one."""
    disk = SmallDisk(tmp_path, 2**20)
    owner = Owner(tmp_path, write=disk.write)
    owner.recover()
    owner.begin(b"open")
    for _ in range(20):
        owner.journal.append(bytes(64 * 1024))
        owner.settle() if not owner.errors else None
    assert owner.errors[0].errno == errno.ENOSPC
    for round_ in range(3):
        owner.begin(b"open", b"%d" % round_)
        owner.settle()
        assert owner.journal.is_writing
    owner.journal.close()
    assert recovered(tmp_path) == [b"open", b"2"]


def test_repeatedly_failing_snapshots_leave_two_files(tmp_path: Path) -> None:
    is_broken = False

    def write(fd: int, data: memoryview) -> int:
        if is_broken and b"snapshot" in bytes(data):
            os.write(fd, data[:5])
            raise OSError(errno.EIO, "broken")
        return os.write(fd, data)

    owner = Owner(tmp_path, write=write)
    owner.recover()
    owner.begin(b"first")
    owner.settle()
    is_broken = True
    for round_ in range(5):
        owner.begin(b"snapshot")
        eventually(lambda count=round_ + 1: len(owner.errors) == count, "it fails", 30.0)
        assert len(segments(tmp_path)) == 2
    owner.journal.close()
    assert recovered(tmp_path) == [b"first"]


def test_a_write_of_zero_bytes_is_an_error(tmp_path: Path) -> None:
    owner = Owner(tmp_path, write=lambda fd, data: 0)
    owner.recover()
    owner.begin()
    eventually(lambda: owner.errors, "it is reported", 30.0)
    owner.journal.close()


def test_settled_records_are_synced(tmp_path: Path) -> None:
    """So are the names of new files, and the new segment before old ones are deleted."""
    synced: dict[str, int] = {}
    problems: list[str] = []

    def sync(fd: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        if path == tmp_path:
            named.update(segment.name for segment in segments(tmp_path))
        else:
            synced[path.name] = path.stat().st_size

    def on_notify() -> None:
        if not segments(tmp_path):
            return  # the directory was only read
        path = segments(tmp_path)[-1]
        if synced[path.name] != path.stat().st_size:
            problems.append("settled before it was synced")
        if path.name not in named:
            problems.append("a name was not synced")

    named: set[str] = set()
    owner = Owner(tmp_path, sync=sync, on_notify=on_notify)
    owner.recover()
    for round_ in range(3):
        owner.begin(b"snapshot")
        owner.journal.append(b"%d" % round_)
        owner.settle()
    owner.journal.close()
    assert not problems
    assert len(synced) == 3


def test_a_failed_sync_ends_the_segment(tmp_path: Path) -> None:
    """A failed sync may have lost data, and the next one on the same file would not report it."""
    num_calls = 0

    def sync(fd: int) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 4:
            raise OSError(errno.EIO, "broken")

    owner = Owner(tmp_path, sync=sync)
    owner.recover()
    owner.begin(b"a")
    owner.settle()
    owner.journal.append(b"b")
    eventually(lambda: owner.errors, "it is reported", 30.0)
    owner.begin(b"a", b"b")
    owner.journal.close()
    assert recovered(tmp_path) == [b"a", b"b"]


def test_a_write_that_takes_too_long_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its late completion does not settle later records."""
    gates = {b"old": threading.Event(), b"again": threading.Event()}
    reached = {name: threading.Event() for name in gates}

    def write(fd: int, data: memoryview) -> int:
        for name, gate in gates.items():
            if name in bytes(data):
                reached[name].set()
                gate.wait(60.0)
        return os.write(fd, data)

    owner = Owner(tmp_path, write=write)
    owner.recover()
    owner.begin()
    owner.settle()
    owner.journal.append(b"old")
    assert reached[b"old"].wait(30.0)
    monkeypatch.setattr(journal_module, "STALL_TIMEOUT_S", 0.05)
    eventually(lambda: owner.journal.append(b"x") and owner.errors, "it is given up", 30.0)
    monkeypatch.setattr(journal_module, "STALL_TIMEOUT_S", 100.0)
    owner.begin(b"again")
    position = owner.journal.append(b"new")
    gates[b"old"].set()
    assert reached[b"again"].wait(30.0)
    assert owner.journal.num_written < position
    gates[b"again"].set()
    owner.settle()
    owner.journal.close()
    assert recovered(tmp_path) == [b"again", b"new"]


def test_a_predecessor_does_not_delete_its_successors_segments(tmp_path: Path) -> None:
    may_go_on, reached = threading.Event(), threading.Event()

    def write(fd: int, data: memoryview) -> int:
        if b"late" in bytes(data):
            reached.set()
            may_go_on.wait(60.0)
        return os.write(fd, data)

    owner = Owner(tmp_path, write=write)
    owner.recover()
    owner.begin(b"late")
    assert reached.wait(30.0)
    (tmp_path / f"{7:016d}.journal").write_bytes(b"of a successor")
    may_go_on.set()
    owner.journal.close()
    assert [int(path.stem) for path in segments(tmp_path)] == [1, 7]


def test_a_failed_snapshot_is_not_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The segment before it stays, although its owner completes the snapshot."""
    may_go_on, reached = threading.Event(), threading.Event()
    may_go_on.set()

    def write(fd: int, data: memoryview) -> int:
        reached.set()
        may_go_on.wait(60.0)
        return os.write(fd, data)

    owner = Owner(tmp_path, write=write)
    owner.recover()
    owner.begin(b"open")
    owner.settle()
    monkeypatch.setattr(journal_module, "MAX_QUEUED_BYTES", 1000)
    may_go_on.clear()
    reached.clear()
    owner.journal.begin_segment()
    assert reached.wait(30.0)
    while not owner.errors:
        owner.journal.append(bytes(100))
    owner.journal.complete_segment()
    may_go_on.set()
    owner.journal.close()
    assert recovered(tmp_path)[0] == b"open"


def test_the_end_of_the_previous_segment_is_synced(tmp_path: Path) -> None:
    """Records settled with the new segment may be at the end of the one before."""
    may_go_on, reached = threading.Event(), threading.Event()
    synced: dict[str, int] = {}

    def write(fd: int, data: memoryview) -> int:
        if b"held" in bytes(data):
            reached.set()
            may_go_on.wait(60.0)
        return os.write(fd, data)

    def sync(fd: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        synced[path.name] = path.stat().st_size

    owner = Owner(tmp_path, write=write, sync=sync)
    owner.recover()
    owner.begin()
    owner.settle()
    owner.journal.append(b"held")
    assert reached.wait(30.0)
    owner.journal.append(b"just before the rotation")
    owner.journal.begin_segment()
    may_go_on.set()
    owner.journal.append(b"after")
    owner.settle()
    assert {path.name: path.stat().st_size for path in segments(tmp_path)}.items() <= synced.items()
    owner.journal.close()


@pytest.mark.parametrize("problem", [OSError(errno.EIO, "broken"), ValueError("a bug")])
def test_any_error_is_reported_and_writing_can_be_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: Exception
) -> None:
    """This holds even if the file cannot be closed after an error, as on some network disks."""
    really_close, bad = os.close, set[int]()

    def write(fd: int, data: memoryview) -> int:
        if b"bad" in bytes(data):
            bad.add(fd)
            raise problem
        return os.write(fd, data)

    def close(fd: int) -> None:
        really_close(fd)
        if fd in bad:
            bad.remove(fd)
            raise OSError(errno.EDQUOT, "what was buffered is lost")

    monkeypatch.setattr(os, "close", close)
    owner = Owner(tmp_path, write=write)
    owner.recover()
    owner.begin(b"a")
    owner.journal.append(b"bad")
    eventually(lambda: owner.errors, "it is reported", 30.0)
    assert str(problem) in str(owner.errors[0])
    owner.begin(b"a", b"again")
    owner.settle()
    owner.journal.close()
    assert recovered(tmp_path) == [b"a", b"again"]

"""The journal on disk: what is written comes back, whatever is torn off; failures are heard."""

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from protocol import journal as journal_module
from protocol.journal import Journal, read_segment
from tests.system.conftest import eventually


class Owner:
    """A journal whose callbacks run at once, in its thread: nobody else touches it meanwhile."""

    def __init__(
        self,
        directory: Path,
        open_file: Callable[[str, int, int], int] = os.open,
        write: Callable[[int, bytes], int] = os.write,
    ) -> None:
        self.errors: list[OSError] = []
        self.lock = threading.Lock()
        self.journal = Journal(
            str(directory),
            self._notify,
            lambda: None,
            self.errors.append,
            open_file=open_file,
            write=write,
        )

    def _notify(self, function: Callable[[], None]) -> None:
        with self.lock:
            function()

    def begin(self, *snapshot: bytes) -> None:
        """A new segment with this snapshot."""
        self.journal.begin_segment()
        for record in snapshot:
            self.journal.append(record)
        self.journal.complete_segment()

    def settle(self) -> None:
        """Wait until all that was appended is written or lost."""
        eventually(
            lambda: self.journal.num_written == self.journal.num_appended, "all is settled", 5.0
        )


def recovered(directory: Path) -> list[bytes]:
    """What a successor reads."""
    successor = Owner(directory)
    records = successor.journal.recover()
    successor.journal.close()
    return records


def segments(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.journal"))


def test_records_come_back_in_order(tmp_path: Path) -> None:
    owner = Owner(tmp_path / "j")
    assert owner.journal.recover() == []
    owner.begin()
    records = [b"%d" % i * (i + 1) for i in range(50)]
    for record in records:
        owner.journal.append(record)
    owner.journal.close()
    assert recovered(tmp_path / "j") == records
    assert (tmp_path / "j").stat().st_mode & 0o777 == 0o700
    assert segments(tmp_path / "j")[0].stat().st_mode & 0o777 == 0o600


def test_a_complete_snapshot_replaces_older_segments(tmp_path: Path) -> None:
    owner = Owner(tmp_path)
    owner.journal.recover()
    owner.begin()
    owner.journal.append(b"old")
    owner.begin(b"snapshot")
    owner.journal.append(b"new")
    owner.journal.close()
    assert len(segments(tmp_path)) == 1
    assert recovered(tmp_path) == [b"snapshot", b"new"]


def test_an_incomplete_snapshot_adds_to_the_segment_before_it(tmp_path: Path) -> None:
    owner = Owner(tmp_path)
    owner.journal.recover()
    owner.begin(b"a")
    owner.journal.append(b"b")
    owner.journal.begin_segment()
    owner.journal.append(b"c")
    owner.journal.close()
    assert len(segments(tmp_path)) == 2
    assert recovered(tmp_path) == [b"a", b"b", b"c"]


def test_a_tail_torn_at_any_byte_costs_only_what_was_torn(tmp_path: Path) -> None:
    owner = Owner(tmp_path)
    owner.journal.recover()
    owner.begin(b"first")
    records = [b"first", b"second", b"third"]
    for record in records[1:]:
        owner.journal.append(record)
    owner.journal.close()
    (segment,) = segments(tmp_path)
    data = segment.read_bytes()
    counts = []
    for length in range(len(data) + 1):
        segment.write_bytes(data[:length])
        found, _ = read_segment(segment)
        assert found == records[: len(found)]
        counts.append(len(found))
    assert counts == sorted(counts)
    assert counts[-1] == 3


def test_a_flipped_bit_ends_the_segment_there(tmp_path: Path) -> None:
    owner = Owner(tmp_path)
    owner.journal.recover()
    owner.begin(b"first", b"second")
    owner.journal.close()
    (segment,) = segments(tmp_path)
    data = bytearray(segment.read_bytes())
    data[data.index(b"second")] ^= 1
    segment.write_bytes(data)
    assert read_segment(segment)[0] == [b"first"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS])
@pytest.mark.parametrize("where", ["open", *range(6)])
def test_every_failing_operation_is_heard_and_the_next_segment_has_everything(
    tmp_path: Path, where: str | int, number: int
) -> None:
    num_writes = 0
    broken = True

    def open_file(path: str, flags: int, mode: int) -> int:
        if broken and where == "open":
            raise OSError(number, os.strerror(number))
        return os.open(path, flags, mode)

    def write(fd: int, data: bytes) -> int:
        nonlocal num_writes
        num_writes += 1
        if broken and num_writes - 1 == where:
            os.write(fd, data[: len(data) // 2])  # a part of it is written before
            raise OSError(number, os.strerror(number))
        return os.write(fd, data)

    owner = Owner(tmp_path, open_file, write)
    owner.journal.recover()
    owner.begin(b"a")
    owner.settle() if where not in (0, 1, "open") else None
    for record in (b"b", b"c", b"d"):
        owner.journal.append(record)
        owner.settle() if not owner.errors else None
    eventually(lambda: owner.errors, "the failure is heard", 5.0)
    assert owner.errors[0].errno == number
    assert not owner.journal.is_writing
    assert owner.journal.append(b"lost") == owner.journal.num_written
    broken = False
    owner.begin(b"a", b"b", b"c", b"d")
    owner.journal.append(b"e")
    owner.journal.close()
    assert recovered(tmp_path) == [b"a", b"b", b"c", b"d", b"e"]
    assert len(segments(tmp_path)) == 1


def test_short_writes_are_finished(tmp_path: Path) -> None:
    owner = Owner(tmp_path, write=lambda fd, data: os.write(fd, data[:3]))
    owner.journal.recover()
    owner.begin(b"snapshot of some length")
    owner.journal.append(b"and a record")
    owner.journal.close()
    assert recovered(tmp_path) == [b"snapshot of some length", b"and a record"]


def test_a_disk_that_stands_still_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queue is bounded, and whoever appends never waits."""
    monkeypatch.setattr(journal_module, "MAX_QUEUED_BYTES", 1000)
    may_go_on = threading.Event()

    def write(fd: int, data: bytes) -> int:
        may_go_on.wait(10.0)
        return os.write(fd, data)

    owner = Owner(tmp_path, write=write)
    owner.journal.recover()
    owner.begin()
    for _ in range(20):
        owner.journal.append(bytes(100))
    assert "does not keep up" in str(owner.errors[0])
    may_go_on.set()
    owner.begin(b"again")
    owner.journal.close()
    assert recovered(tmp_path) == [b"again"]


def test_two_owners_are_one_too_many(tmp_path: Path) -> None:
    owner = Owner(tmp_path)
    owner.journal.recover()
    with pytest.raises(OSError, match="in use by another process"):
        Owner(tmp_path).journal.recover(timeout_s=0.0)
    owner.journal.close()
    assert recovered(tmp_path) == []


def test_a_directory_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(PermissionError):
        Owner(tmp_path / "link").journal.recover()

"""The journal on disk: complete records are read back, wherever a file is cut off."""

import os
from pathlib import Path

import pytest

from protocol.journal_segments import read_segment
from tests.protocol.journal_owner import Owner, recovered, segments


def test_records_come_back_in_order(tmp_path: Path) -> None:
    owner = Owner(tmp_path / "j")
    assert owner.recover() == []
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
    owner.recover()
    owner.begin()
    owner.journal.append(b"old")
    owner.begin(b"snapshot")
    owner.journal.append(b"new")
    owner.journal.close()
    assert len(segments(tmp_path)) == 1
    assert recovered(tmp_path) == [b"snapshot", b"new"]


def test_an_incomplete_snapshot_adds_to_the_segment_before_it(tmp_path: Path) -> None:
    owner = Owner(tmp_path)
    owner.recover()
    owner.begin(b"a")
    owner.journal.append(b"b")
    owner.journal.begin_segment()
    owner.journal.append(b"c")
    owner.journal.close()
    assert len(segments(tmp_path)) == 2
    assert recovered(tmp_path) == [b"a", b"b", b"c"]


def test_a_tail_torn_at_any_byte_costs_only_what_was_torn(tmp_path: Path) -> None:
    owner = Owner(tmp_path)
    owner.recover()
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
    owner.recover()
    owner.begin(b"first", b"second")
    owner.journal.close()
    (segment,) = segments(tmp_path)
    data = bytearray(segment.read_bytes())
    data[data.index(b"second")] ^= 1
    segment.write_bytes(data)
    assert read_segment(segment)[0] == [b"first"]


def test_two_owners_are_one_too_many(tmp_path: Path) -> None:
    owner = Owner(tmp_path)
    owner.recover()
    with pytest.raises(OSError, match="in use by another process"):
        Owner(tmp_path).recover()
    owner.journal.close()
    assert recovered(tmp_path) == []


def test_a_directory_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(PermissionError):
        Owner(tmp_path / "link").recover()


def test_zeros_at_the_end_are_not_a_complete_snapshot(tmp_path: Path) -> None:
    """A file system may replace a lost tail by zeros: the segment before still counts."""
    owner = Owner(tmp_path)
    owner.recover()
    owner.begin(b"a")
    owner.journal.begin_segment()
    owner.journal.append(b"b")
    owner.journal.close()
    with segments(tmp_path)[-1].open("ab") as file:
        file.write(bytes(100))
    assert recovered(tmp_path) == [b"a", b"b"]


def test_what_could_not_be_read_is_not_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = Owner(tmp_path)
    owner.recover()
    owner.begin(b"a")
    owner.journal.close()
    successor = Owner(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", lambda path: os.read(-1, 1))
        with pytest.raises(OSError, match="Bad file descriptor"):
            successor.recover()
    assert not successor.journal.is_recovered
    assert successor.recover() == [b"a"]
    successor.journal.close()

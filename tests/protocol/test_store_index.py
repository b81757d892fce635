"""The index of a store: what it names, and what it forgets."""

import hashlib
from pathlib import Path

import pytest

from protocol.stores.index import BlockIndex


def key(number: int, group: int = 0) -> bytes:
    digest = hashlib.sha256(number.to_bytes(8, "little")).digest()
    return digest + bytes([group]) if group else digest


def test_all_that_map_the_file_see_the_same_entries(tmp_path: Path) -> None:
    path = tmp_path / "index"
    with pytest.raises(FileNotFoundError):
        BlockIndex(path)
    one = BlockIndex(path, max_blocks=1000)
    assert one.is_new
    other = BlockIndex(path)
    one.add(key(1))
    one.num_bytes += 10
    assert key(1) in other
    assert key(2) not in other
    assert key(1, group=1) not in other
    assert other.num_bytes == 10
    other.discard(key(1))
    other.discard(key(2))
    assert key(1) not in one
    one.add(key(3))
    other.clear()
    assert key(3) not in one
    assert not BlockIndex(path, max_blocks=1000).is_new
    larger = BlockIndex(path, max_blocks=5000)
    assert larger.is_new
    larger.add(key(4))
    assert key(4) not in one  # it keeps the table that it has mapped
    one.add(key(5))
    assert key(5) in other


def test_a_full_index_loses_few_entries_and_names_nothing_that_was_not_added(
    tmp_path: Path,
) -> None:
    index = BlockIndex(tmp_path / "index", max_blocks=10_000)
    for number in range(10_000):
        index.add(key(number, number % 3))
    kept = sum(key(number, number % 3) in index for number in range(10_000))
    assert kept > 9_900
    assert sum(key(number) in index for number in range(10_000, 60_000)) == 0


def test_another_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "index"
    path.write_bytes(bytes(100))
    with pytest.raises(ValueError, match="not a block index"):
        BlockIndex(path)
    path.write_bytes(bytes(100_000))
    with pytest.raises(ValueError, match="not a block index"):
        BlockIndex(path)

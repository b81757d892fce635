"""Pages of blocks are allocated ahead of use, piece by piece, and returned by a sleep."""

import sys
from pathlib import Path

import pytest
import torch

from protocol.core_worker import BlockCopies
from worker_proc.kv import pages_ahead
from worker_proc.kv.kv_pool import KVPool

NUM_BLOCKS = 64
BLOCK_BYTES = 2**19
SHAPES = [((NUM_BLOCKS, BLOCK_BYTES), (NUM_BLOCKS, BLOCK_BYTES // 2))]
ALL_BYTES = NUM_BLOCKS * (BLOCK_BYTES + BLOCK_BYTES // 2)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def resident_bytes(pool: KVPool) -> int:
    """Return the bytes of a pool that have pages."""
    starts = {t.data_ptr() for pair in pool.tensors for t in (pair.keys, pair.values)}
    total, is_of_pool = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(" ")
        if not name.endswith(":"):
            first, _, last = name.partition("-")
            is_of_pool = any(int(first, 16) <= start < int(last, 16) for start in starts)
        elif is_of_pool and name == "Rss:":
            total += int(rest.split()[0]) * 1024
    return total


@pytest.fixture
def pool() -> KVPool:
    return KVPool(SHAPES, 0, torch.uint8, torch.device("cpu"))


def allocate_all(pool: KVPool, num_used: int) -> int:
    """Allocate what is missing, and return the number of pieces."""
    num_pieces = 1
    while pool.allocate_ahead(num_used):
        num_pieces += 1
        assert num_pieces <= 2 * NUM_BLOCKS
    return num_pieces


def test_as_many_blocks_as_are_used_get_pages_ahead(pool: KVPool) -> None:
    before = resident_bytes(pool)
    assert not pool.allocate_ahead(0)
    assert resident_bytes(pool) == before
    assert allocate_all(pool, 8) > 2  # never much at a time
    assert resident_bytes(pool) >= before + ALL_BYTES // 4
    assert resident_bytes(pool) <= before + ALL_BYTES // 2
    assert not pool.allocate_ahead(8)
    allocate_all(pool, NUM_BLOCKS - 1)
    assert resident_bytes(pool) == ALL_BYTES


def test_content_is_kept(pool: KVPool) -> None:
    keys = pool.tensors[0].keys
    keys[:9] = 7
    allocate_all(pool, 20)
    assert (keys[:9] == 7).all()
    assert not keys[9:].any()


def test_no_more_than_the_bound_is_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages_ahead, "MAX_AHEAD_BYTES", ALL_BYTES // 16)
    monkeypatch.setattr(pages_ahead, "PIECE_BYTES", BLOCK_BYTES)
    pool = KVPool(SHAPES, 0, torch.uint8, torch.device("cpu"))
    allocate_all(pool, 16)
    assert resident_bytes(pool) <= ALL_BYTES * (16 + 4 + 8) // NUM_BLOCKS  # with whole huge pages


def test_a_pool_that_sleeps_gets_no_pages_and_begins_anew(pool: KVPool) -> None:
    before = resident_bytes(pool)
    allocate_all(pool, 16)
    pool.sleep()
    assert not pool.allocate_ahead(16)
    assert resident_bytes(pool) <= before
    pool.swap(BlockCopies([], []), BlockCopies([], []))
    pool.wake()
    allocate_all(pool, 16)
    assert resident_bytes(pool) >= before + ALL_BYTES // 2


def test_a_kernel_that_cannot_is_asked_once(pool: KVPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker_proc.kv.kv_tensors._POPULATE_WRITE", 99)
    assert not pool.allocate_ahead(16)
    monkeypatch.undo()
    before = resident_bytes(pool)
    assert not pool.allocate_ahead(16)
    assert resident_bytes(pool) == before

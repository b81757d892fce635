"""Pages of blocks are allocated ahead of use, piece by piece, and returned by a sleep."""

import sys
from pathlib import Path

import pytest
import torch

from worker_proc.kv import kv_tensors, pages_ahead
from worker_proc.kv.kv_pool import KVPool
from worker_proc.kv.kv_tensors import HostMemory
from worker_proc.kv.pages_ahead import PIECE_BYTES, PagesAhead

NUM_BLOCKS = 128
BLOCK_BYTES = 2**20
SHAPES = [((NUM_BLOCKS, BLOCK_BYTES), (NUM_BLOCKS, BLOCK_BYTES // 2))]
ALL_BYTES = NUM_BLOCKS * (BLOCK_BYTES + BLOCK_BYTES // 2)

CPU = torch.device("cpu")
HUGE_PAGE_BYTES = 2**21


class FakeMemory:
    """Notes up to which block it got pages."""

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        self.tensor = torch.empty(num_blocks, block_bytes, dtype=torch.uint8, device="meta")
        self.ends: list[int] = []

    def allocate(self, first: int, end: int) -> None:
        self.ends.append(end)


def can_allocate() -> bool:
    if sys.platform != "linux":
        return False
    try:
        HostMemory((1, BLOCK_BYTES), torch.uint8).allocate(0, 1)
    except OSError:
        return False
    return True


pytestmark = pytest.mark.skipif(not can_allocate(), reason="needs Linux 5.14")


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


def is_within(num_bytes: int, num_blocks: int) -> bool:
    """Whether these blocks have pages and no others, but for huge pages at both ends."""
    most = num_blocks * ALL_BYTES // NUM_BLOCKS
    return most - 4 * HUGE_PAGE_BYTES <= num_bytes <= most + 4 * HUGE_PAGE_BYTES


@pytest.fixture
def pool() -> KVPool:
    return KVPool(SHAPES, 0, torch.uint8, CPU)


def allocate_all(pool: KVPool, highest_block: int) -> int:
    """Allocate what is missing, and return the number of pieces."""
    num_pieces = 1
    while pool.allocate_ahead(highest_block):
        num_pieces += 1
        assert num_pieces <= 2 * NUM_BLOCKS
    return num_pieces


def test_as_many_blocks_as_are_used_get_pages_after_them(pool: KVPool) -> None:
    before = resident_bytes(pool)
    assert allocate_all(pool, 15) > 2  # never much at a time
    assert is_within(resident_bytes(pool) - before, 15)
    assert not pool.allocate_ahead(15)
    allocate_all(pool, 16)
    assert is_within(resident_bytes(pool) - before, 17)


def test_an_unused_pool_gets_one_piece_of_each_tensor(pool: KVPool) -> None:
    before = resident_bytes(pool)
    allocate_all(pool, 0)
    assert 3 * BLOCK_BYTES <= resident_bytes(pool) - before <= 3 * HUGE_PAGE_BYTES
    assert not pool.allocate_ahead(0)


def test_blocks_up_to_those_in_use_are_not_touched(pool: KVPool) -> None:
    """They have their pages, or nothing uses them: the pool slept since then."""
    before = resident_bytes(pool)
    allocate_all(pool, 95)
    assert is_within(resident_bytes(pool) - before, NUM_BLOCKS - 96)
    assert not pool.allocate_ahead(NUM_BLOCKS - 1)


def test_content_is_kept(pool: KVPool) -> None:
    keys = pool.tensors[0].keys
    keys[:12] = 7  # also past the block that is known to be in use
    allocate_all(pool, 8)
    assert (keys[:12] == 7).all()
    assert not keys[12:].any()


def test_a_busy_worker_allocates_what_it_uses_until_a_piece_of_each_tensor_is_ahead() -> None:
    block_bytes = PIECE_BYTES // 64
    memories = [FakeMemory(1000, block_bytes) for _ in range(16)]
    ahead = PagesAhead(memories)  # type: ignore[arg-type]

    def keep_up(highest_block: int) -> None:
        while ahead.keep_up(highest_block):
            pass

    for highest_block in (8, 16):
        keep_up(highest_block)
        keep_up(highest_block)  # nothing was used since
    assert [memory.ends for memory in memories] == [[73]] * 8 + [[]] * 8
    for highest_block in (64, 65, 72):
        keep_up(highest_block)
    assert [memory.ends for memory in memories] == [[73, 137]] * 16
    keep_up(80)
    assert [memory.ends for memory in memories] == [[73, 137, 201]] * 4 + [[73, 137]] * 12


def test_a_step_waits_for_one_piece_per_thread_and_later_ones_for_the_rest() -> None:
    memories = [FakeMemory(1000, PIECE_BYTES // 64) for _ in range(16)]
    ahead = PagesAhead(memories, 2)  # type: ignore[arg-type]

    def num_pieces() -> int:
        return sum(len(memory.ends) for memory in memories)

    assert ahead.keep_up(16)  # owes 8 pieces
    assert num_pieces() == 2
    assert [ahead.keep_up(16) for _ in range(4)] == [True, True, False, False]
    assert num_pieces() == 8
    for highest_block in (17, 18, 19):
        ahead.keep_up(highest_block)
    assert num_pieces() == 11


def test_no_more_than_the_bound_is_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages_ahead, "MAX_AHEAD_BYTES", 8 * ALL_BYTES // NUM_BLOCKS)
    pool = KVPool(SHAPES, 0, torch.uint8, CPU)
    before = resident_bytes(pool)
    allocate_all(pool, 31)
    assert is_within(resident_bytes(pool) - before, 8)


def test_a_pool_that_sleeps_gets_no_pages_and_starts_over(pool: KVPool) -> None:
    before = resident_bytes(pool)
    allocate_all(pool, 15)
    pool.sleep()
    assert not pool.allocate_ahead(15)
    assert resident_bytes(pool) <= before
    pool.wake()
    allocate_all(pool, 15)
    assert is_within(resident_bytes(pool) - before, 15)


def test_nothing_is_allocated_after_an_error(pool: KVPool, monkeypatch: pytest.MonkeyPatch) -> None:
    before = resident_bytes(pool)
    with monkeypatch.context() as patched:
        patched.setattr(kv_tensors, "_POPULATE_WRITE", 99)
        assert not pool.allocate_ahead(15)
    assert not pool.allocate_ahead(15)
    assert resident_bytes(pool) == before

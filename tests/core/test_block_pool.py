"""The free queue's order, reference counts and the content map."""

import random

import pytest

from core_proc.kv.block_pool import BlockPool


def _hash(number: int) -> bytes:
    return number.to_bytes(16, "little")


def test_blocks_are_handed_out_in_queue_order_and_never_the_null_block() -> None:
    pool = BlockPool(6)
    assert pool.allocate(3) == [1, 2, 3]
    assert pool.allocate(2) == [4, 5]
    assert pool.num_free == 0


def test_plain_blocks_return_to_the_front_tail_first_and_cached_ones_to_the_end() -> None:
    pool = BlockPool(11)
    table = pool.allocate(4)
    for block_id in table[:3]:
        pool.remember(block_id, _hash(block_id))
    pool.free(table)
    assert pool.free_ids() == [4, 5, 6, 7, 8, 9, 10, 3, 2, 1]

    plain = pool.allocate(3)
    pool.free(plain)
    assert pool.free_ids() == [6, 5, 4, 7, 8, 9, 10, 3, 2, 1]


def test_a_hit_takes_its_block_out_of_the_middle() -> None:
    pool = BlockPool(6)
    table = pool.allocate(3)
    for block_id in table:
        pool.remember(block_id, _hash(block_id))
    pool.free(table)
    pool.touch([2])
    assert pool.free_ids() == [4, 5, 3, 1]
    assert pool.ref_count(2) == 1
    pool.check_invariants()


def test_a_shared_block_is_free_only_after_its_last_holder() -> None:
    pool = BlockPool(3)
    table = pool.allocate(1)
    pool.remember(1, _hash(1))
    pool.touch(table)
    pool.free(table)
    assert pool.count_free([1]) == 0
    pool.free(table)
    assert pool.count_free([1]) == 1
    assert pool.cached_block(_hash(1)) == 1


def test_contents_stay_cached_until_the_block_is_handed_out_again() -> None:
    pool = BlockPool(3)
    pool.remember(pool.allocate(1)[0], _hash(7))
    pool.free([1])
    assert pool.allocate(1) == [2]
    assert pool.cached_block(_hash(7)) == 1
    assert pool.allocate(1) == [1]
    assert pool.cached_block(_hash(7)) is None


def test_equal_contents_in_two_blocks_survive_the_loss_of_one() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(2)
    pool.remember(first, _hash(7))
    pool.remember(second, _hash(7))
    assert pool.cached_block(_hash(7)) == first
    pool.forget(first)
    assert pool.cached_block(_hash(7)) == second
    pool.check_invariants()


def test_emptying_the_cache_keeps_references() -> None:
    pool = BlockPool(4)
    pool.remember(pool.allocate(1)[0], _hash(1))
    pool.forget_all()
    assert pool.cached_block(_hash(1)) is None
    assert pool.ref_count(1) == 1
    pool.check_invariants()


@pytest.mark.parametrize("seed", range(10))
def test_random_use_keeps_the_invariants(seed: int) -> None:
    rng = random.Random(seed)
    pool = BlockPool(rng.randint(2, 24))
    tables: list[list[int]] = []
    for _ in range(300):
        action = rng.randrange(4)
        if action == 0:
            tables.append(pool.allocate(rng.randint(0, pool.num_free)))
        elif action == 1 and tables:
            pool.free(tables.pop(rng.randrange(len(tables))))
        elif action == 2 and tables:
            for block_id in rng.choice(tables):
                if pool.hash_of(block_id) is None:
                    pool.remember(block_id, _hash(rng.randrange(6)))
        else:
            hits = {pool.cached_block(_hash(number)) for number in range(6)} - {None}
            pool.touch([block_id for block_id in hits if block_id is not None])
            tables.append([block_id for block_id in hits if block_id is not None])
        pool.check_invariants()
    for table in tables:
        pool.free(table)
    assert pool.num_free == pool.num_usable

"""Sliding-window layers: the blocks that they hold, free and hit."""

import pytest

from protocol.core_worker import NULL_BLOCK
from protocol.model_facts import KVGroup
from tests.core.harness import PLAIN_TOKEN, Harness

FULL = KVGroup()
WINDOW = KVGroup(window=32, max_blocks=7)
"""A window of two blocks beside a chunk of 64 tokens."""


def _live(bench: Harness, name: str, group: int = 0) -> list[bool]:
    table = bench.requests[name].block_tables[group]
    return [block_id != NULL_BLOCK for block_id in table]


def test_only_the_window_is_held() -> None:
    bench = Harness(budget=64, kv_groups=(WINDOW,))
    bench.add("a", 200, 20)
    assert bench.steps(6) == [{"a": n} for n in (64, 64, 64, 8, 1, 1)]
    assert _live(bench, "a") == [False] * 10 + [True] * 3
    assert bench.num_free == 255 - 3
    bench.run()
    assert bench.outputs["a"] == [PLAIN_TOKEN] * 20
    assert bench.num_free == 255


def test_a_hit_needs_only_what_the_window_still_sees() -> None:
    """The blocks before it were reused long ago."""
    bench = Harness(budget=64, caching=True, kv_groups=(WINDOW,))
    prompt = list(range(200))
    bench.add("a", prompt)
    bench.steps(5)
    bench.add("b", [*prompt[:128], 5, 5])
    assert bench.step() == {"a": 1, "b": 2}
    (new,) = bench.sent[-1].scheduled_new_reqs
    assert new.block_ids[0][:6] == [NULL_BLOCK] * 6
    assert _live(bench, "b") == [False] * 6 + [True] * 3
    bench.run()


def test_a_hit_ends_where_one_group_has_lost_its_blocks() -> None:
    """The model has both kinds of layers."""
    bench = Harness(budget=64, blocks=40, caching=True, kv_groups=(FULL, WINDOW))
    prompt = list(range(96))
    bench.add("a", prompt, 1)
    bench.run()
    bench.add("b", [*prompt, 5], 1)
    assert bench.step() == {"b": 1}
    bench.add("c", 400, 1)
    assert bench.scheduler.kv.can_ever_fit(400)
    bench.run()
    bench.add("d", [*prompt, 5], 1)
    (granted,) = bench.step().values()
    assert granted > 33, "its blocks were reused, and hits of one group alone are none"


def test_all_groups_take_their_blocks_from_one_pool() -> None:
    bench = Harness(budget=64, kv_groups=(FULL, WINDOW))
    bench.add("a", 200, 4)
    bench.steps(6)
    assert _live(bench, "a", 0) == [True] * 13
    assert _live(bench, "a", 1) == [False] * 10 + [True] * 3
    assert bench.num_free == 255 - 16
    bench.run()


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_windows_let_a_small_pool_hold_long_requests(depth: int) -> None:
    """A table of all blocks would not fit; freed blocks serve other requests at once."""
    bench = Harness(budget=64, blocks=9, depth=depth, kv_groups=(WINDOW,))
    for name in "abc":
        bench.add(name, 300, 40)
    bench.overlap()
    assert bench.outputs == dict.fromkeys("abc", [PLAIN_TOKEN] * 40)
    assert bench.num_free == 8


def test_a_swapped_out_request_takes_no_hits_that_its_window_has_passed() -> None:
    """If they were kept, it would never fit again."""
    bench = Harness(
        blocks=16,
        block_size=2,
        budget=20,
        caching=True,
        policy="priority",
        kv_groups=(KVGroup(window=8, max_blocks=14),),
        num_host_blocks=20,
        swap_cost_tokens=0.1,
    )
    bench.add("b", 1)
    bench.add("a", 40, 3, priority=5)
    assert bench.step() == {"b": 1, "a": 19}
    bench.scheduler.preempt(bench.requests["a"])
    bench.abort("b")
    bench.add("c", 24, 1)
    assert bench.steps(2) == [{"c": 20}, {"c": 4}]
    hits = bench.scheduler.kv.find_cached_prefix(bench.requests["a"])
    assert 0 < len(hits[0]) <= (19 - 7) // 2, "all behind the window"
    assert bench.step() == {"a": 20}
    bench.run()
    assert bench.outputs["a"] == [PLAIN_TOKEN] * 3

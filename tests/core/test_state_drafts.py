"""State blocks and drafts: the state rolls back to the last right draft."""

import pytest

from protocol.model_facts import KVGroup
from tests.core.harness import PLAIN_TOKEN
from tests.core.state_bench import (
    FULL,
    WINDOW,
    WRONG,
    cached,
    entries,
    make_drafting,
    state_table,
    states,
)


@pytest.mark.parametrize("groups", [(FULL,), (FULL, WINDOW), ()])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("right", range(5))
def test_the_state_rolls_back_to_the_last_right_draft(
    right: int, depth: int, groups: tuple[KVGroup, ...]
) -> None:
    """That draft may be at any place in a block."""
    drafts = [PLAIN_TOKEN] * right + [WRONG] * (4 - right)
    guesses = dict.fromkeys(range(1, 60), drafts)
    bench = make_drafting(4, guesses, depth=depth, groups=groups, spacing=32)
    bench.add("a", 10, 60)
    bench.add("b", 10, 30)
    bench.overlap()
    assert bench.outputs == {"a": [PLAIN_TOKEN] * 60, "b": [PLAIN_TOKEN] * 30}
    accepted = bench.scheduler.speculation.num_accepted_tokens
    assert accepted >= right * 10
    assert states(bench).pool.num_free == 4


def test_drafts_end_where_a_snapshot_is_kept() -> None:
    """Otherwise the snapshot would be cached before its tokens are computed."""
    bench = make_drafting(4, {1: [WRONG] * 8}, spacing=16)
    prompt = list(range(100, 112))
    bench.add("a", prompt, 60)
    bench.step()
    assert bench.step() == {"a": 1 + 3}
    while len(bench.outputs["a"]) < 4:
        bench.step()
    bench.add("b", [*prompt, *[PLAIN_TOKEN] * 4, 5], 1)
    bench.step()
    assert cached(bench, "b") == 0, "the last of the 16 tokens is computed in this step"
    bench.add("c", [*prompt, *[PLAIN_TOKEN] * 4, 5], 1)
    bench.step()
    assert cached(bench, "c") == 16
    bench.run()


def test_drafts_continue_after_a_snapshot_that_the_known_token_ends() -> None:
    bench = make_drafting(4, {5: [PLAIN_TOKEN] * 3}, spacing=16)
    bench.add("a", 11, 60)
    bench.steps(5)
    assert bench.requests["a"].num_tokens == 16
    assert bench.step() == {"a": 1 + 3}
    assert entries(state_table(bench, "a")) == [0, 1], "after 16 tokens, and its own"
    bench.run()


def test_drafts_add_one_block_to_a_table_at_most() -> None:
    bench = make_drafting(4, {7: [PLAIN_TOKEN] * 16}, most=16, spacing=1024)
    bench.add("a", 10, 60)
    bench.steps(7)
    assert bench.requests["a"].num_tokens == 17
    assert bench.step() == {"a": 1 + 15}
    bench.run()


def test_a_request_with_drafts_in_flight_leaves_no_state_of_them() -> None:
    guesses = dict.fromkeys(range(1, 60), [WRONG] * 4)
    bench = make_drafting(4, guesses, depth=2, spacing=16)
    bench.add("a", 13, 60)
    bench.fill()
    while not bench.requests["a"].num_drafts_in_flight:
        bench.update()
        bench.fill()
    bench.scheduler.preempt(bench.requests["a"])
    assert states(bench).pool.num_free == 4
    bench.overlap()
    assert bench.outputs["a"] == [PLAIN_TOKEN] * 60

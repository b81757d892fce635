"""Snapshots of states: where they are kept, which can be hit, and which make room."""

import pytest

from protocol.core_worker import NULL_BLOCK
from tests.core.harness import PLAIN_TOKEN, Harness
from tests.core.state_bench import FULL, WINDOW, cached, entries, make, sent_table, states


def run_prompt(bench: Harness, length: int) -> list[int]:
    """Compute a prompt as request a, and return it."""
    prompt = list(range(100, 100 + length))
    bench.add("a", prompt, 1)
    bench.run()
    return prompt


def test_snapshots_are_at_multiples_and_at_the_end_of_the_prompt() -> None:
    bench = make(9)
    bench.add("a", 200, 1)
    bench.step()
    kept = entries(sent_table(bench))
    assert kept == [3, 7, 11, 12], "after 64, 128 and 192 tokens, and its own"
    bench.add("b", 170, 1)
    bench.step()
    kept = entries(sent_table(bench))
    assert kept == [3, 7, 9, 10], "after 64, 128 and 160 tokens, and its own"
    bench.run()
    assert states(bench).pool.num_free == 9


@pytest.mark.parametrize("length", [65, 79, 80, 81, 96])
def test_the_next_turn_of_a_chat_begins_at_the_end_of_the_prompt(length: int) -> None:
    bench = make(4)
    prompt = list(range(100, 100 + length))
    bench.add("a", prompt, 20)
    bench.run()
    bench.add("b", [*prompt, *bench.outputs["a"], 5, 6, 7], 20)
    bench.step()
    assert cached(bench, "b") == (length - 1) // 16 * 16
    bench.run()


def test_the_last_token_is_computed_from_the_state_before_it() -> None:
    """The last token of a prompt of whole blocks is computed, though all of it is cached."""
    bench = make(9, spacing=16)
    prompt = list(range(100, 164))
    bench.add("a", [*prompt, 5, 6], 1)
    bench.run()
    bench.add("b", prompt, 1)
    assert bench.step() == {"b": 16}
    (new,) = bench.sent[-1].scheduled_new_reqs
    assert new.num_cached_tokens == new.num_computed_tokens == 48


def test_a_snapshot_can_be_hit_from_the_next_step_on() -> None:
    bench = make(9)
    prompt = list(range(100, 200))
    bench.add("a", prompt, 5)
    bench.add("b", prompt, 5)
    assert bench.step() == {"a": 100, "b": 100}, "while its KV can be hit at once"
    bench.add("c", prompt, 5)
    assert bench.step() == {"a": 1, "b": 1, "c": 4}
    bench.run()


@pytest.mark.parametrize("depth", [1, 2, 3, 6])
def test_outputs_are_kept_at_multiples_too(depth: int) -> None:
    """With many steps in flight their tokens are known only some steps later."""
    bench = make(4, depth=depth, spacing=32)
    prompt = list(range(100, 110))
    bench.add("a", prompt, 60)
    bench.overlap()
    bench.add("b", [*prompt, *bench.outputs["a"]], 1)
    bench.fill()
    assert cached(bench, "b") == 64
    bench.overlap()


@pytest.mark.parametrize(("num_states", "blocks"), [(2, 99), (99, 20)])
def test_a_hit_needs_both_the_state_and_the_kv(num_states: int, blocks: int) -> None:
    """Another request takes the only spare state block, or all KV blocks."""
    bench = make(num_states, blocks=blocks)
    prompt = run_prompt(bench, 100)
    bench.add("other", 300, 1)
    bench.run()
    bench.add("b", prompt, 1)
    assert bench.step() == {"b": 100}
    bench.run()
    bench.add("c", prompt, 1)
    assert bench.step() == {"c": 4}


def test_the_hit_of_a_window_and_of_a_state_end_at_one_position() -> None:
    bench = make(9, groups=(FULL, WINDOW))
    prompt = run_prompt(bench, 200)
    bench.add("b", [*prompt[:150], 5, 5], 1)
    bench.step()
    assert cached(bench, "b") == 128
    kept = entries(sent_table(bench))
    assert kept == [7, 8, 9], "where it begins, the end of its prompt, and its own"
    bench.run()


def test_the_oldest_snapshot_is_replaced_first() -> None:
    bench = make(3, spacing=1024)
    prompts = {name: list(range(n, n + 40)) for name, n in (("a", 100), ("b", 200), ("c", 300))}
    for name in "ab":
        bench.add(name, prompts[name], 1)
        bench.run()
    bench.add("a again", prompts["a"], 1)
    bench.run()
    bench.add("c", prompts["c"], 1)
    bench.run()
    for name, num_hit in (("a", 32), ("c", 32), ("b", 0)):
        bench.add(f"{name} once more", prompts[name], 1)
        bench.run()
        assert cached(bench, f"{name} once more") == num_hit


def test_the_block_that_a_request_begins_from_is_not_its_own() -> None:
    """It is not even if it would be replaced first."""
    bench = make(3, spacing=1024)
    for name, first in (("a", 100), ("b", 200)):
        bench.add(name, list(range(first, first + 40)), 1)
        bench.run()
    bench.add("long", 10, 40)
    bench.step()
    for name, first, num_hit in (("a1", 100, 32), ("a2", 100, 32), ("b1", 200, 0)):
        bench.add(name, list(range(first, first + 40)), 1)
        bench.step()
        assert cached(bench, name) == num_hit
    bench.run()


def test_no_second_block_is_given_to_a_content_that_is_cached() -> None:
    bench = make(4)
    prompt = run_prompt(bench, 40)
    bench.scheduler.kv.pool.forget_all()  # so that all is computed again
    bench.add("b", prompt, 1)
    assert bench.step() == {"b": 40}
    assert entries(sent_table(bench)) == [2]


def test_nothing_is_kept_without_a_prefix_cache() -> None:
    bench = make(9, caching=False)
    bench.add("a", 200, 1)
    bench.step()
    assert entries(sent_table(bench)) == [12]


def test_snapshots_delay_no_admission() -> None:
    """Two long prompts leave snapshots in every step, and a third request comes: it is admitted."""
    bench = make(3, budget=128, spacing=16, long_prefill_token_threshold=40)
    bench.add("a", 1000, 50)
    bench.add("b", 1000, 50)
    bench.steps(3)
    bench.add("c", 20, 5)
    assert "c" in bench.step()
    bench.run()


def test_what_is_not_cached_yet_is_given_up_for_an_admission() -> None:
    """At depth 4 the tokens of a snapshot become known later, and its block is needed before."""
    bench = make(2, depth=4, spacing=16)
    bench.add("a", 10, 60)
    while len(bench.requests["a"].block_tables or [[]]) < 2 or not states(bench).blocks_to_hash():
        bench.fill()
        assert bench.num_in_flight
        if not states(bench).blocks_to_hash():
            bench.update()
    assert states(bench).pool.num_free == 0
    bench.update()
    bench.add("b", 5, 5)
    assert "b" in bench.schedule()
    bench.overlap()
    assert bench.outputs["a"] == [PLAIN_TOKEN] * 60


def test_the_only_block_is_taken_over_with_its_content() -> None:
    bench = make(1)
    prompt = run_prompt(bench, 40)
    assert states(bench).pool.num_free == 1
    bench.add("b", prompt, 1)
    bench.step()
    assert cached(bench, "b") == 0, "its own state has taken the only block"


def test_a_hit_is_taken_over_where_no_other_block_is_left() -> None:
    bench = make(2, spacing=1024)
    prompt = run_prompt(bench, 40)
    bench.add("long", 10, 40)
    bench.step()
    bench.add("b", prompt, 20)
    assert bench.step() == {"long": 1, "b": 8}
    assert sent_table(bench)[1] == sent_table(bench)[2] != NULL_BLOCK
    bench.abort("b")
    bench.add("c", prompt, 1)
    assert bench.step() == {"long": 1, "c": 40}, "its content is gone"
    bench.run()


def test_a_hit_that_another_request_reads_is_not_taken_over() -> None:
    bench = make(3, spacing=1024)
    prompt = run_prompt(bench, 40)
    bench.add("b", prompt, 20)
    bench.add("c", prompt, 20)
    bench.add("d", prompt, 20)
    assert bench.step() == {"b": 8, "c": 8}, "d has no block while the others read the snapshot"
    assert bench.step() == {"b": 1, "c": 1, "d": 8}
    bench.run()


def test_a_snapshot_may_be_replaced_while_a_request_waits_to_begin_from_it() -> None:
    bench = make(2, blocks=12)
    prompt = run_prompt(bench, 100)
    bench.add("decodes", 10, 70)
    bench.step()
    bench.add("b", [*prompt, *range(61)], 1)
    assert bench.step() == {"decodes": 1}, "b lacks KV blocks"
    bench.run()
    assert cached(bench, "b") == 0, "the snapshot of the other's outputs has replaced it"


def test_a_victim_that_has_grown_in_the_same_step_leaves_no_snapshot() -> None:
    bench = make(9, blocks=6, spacing=16, policy="priority")
    bench.add("lesser", 31, 20, priority=5)
    bench.step()
    bench.add("important", 32, 20)
    bench.steps(2)
    assert bench.preempted == ["lesser"]
    bench.run()
    assert bench.outputs == dict.fromkeys(["lesser", "important"], [PLAIN_TOKEN] * 20)

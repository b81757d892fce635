"""State blocks of recurrent layers: one for each running request, snapshots in those left over.

The fake worker checks every state that a request begins from, and that no request writes to a
block that another one uses in the same step. Blocks have 16 tokens.
"""

import logging
from typing import Any

import pytest

from core_proc.kv.state_blocks import StateBlocks
from core_proc.options import SchedulerOptions
from core_proc.stats import StatsLine, scheduler_stats
from protocol.config.settings import configure
from protocol.core_worker import NULL_BLOCK, KVGroup, ModelFacts
from tests.core.harness import PLAIN_TOKEN, Harness

FULL = KVGroup()
STATES = KVGroup(is_state=True)
WINDOW = KVGroup(window=32, max_blocks=7)


def make(
    num_states: int,
    *,
    spacing: int = 64,
    groups: tuple[KVGroup, ...] = (FULL,),
    caching: bool = True,
    **options: Any,
) -> Harness:
    """Return a scheduler with this many usable state blocks."""
    return Harness(
        kv_groups=(*groups, STATES),
        num_state_blocks=num_states + 1,
        mamba_block_size=spacing,
        caching=caching,
        **options,
    )


def states(bench: Harness) -> StateBlocks:
    found = bench.scheduler.kv.states
    assert found is not None
    return found


def state_table(bench: Harness, name: str) -> list[int]:
    return bench.requests[name].block_tables[-1]


def sent_table(bench: Harness, step: int = -1) -> list[int]:
    """Return the state table of the only request that a step has introduced."""
    (new,) = bench.sent[step].scheduled_new_reqs
    return new.block_ids[-1]


def entries(table: list[int]) -> list[int]:
    """Return the entries that hold a block."""
    return [index for index, block_id in enumerate(table) if block_id != NULL_BLOCK]


def cached(bench: Harness, name: str) -> int | None:
    return bench.requests[name].num_cached_tokens


# A running request ------------------------------------------------------------------------------


def test_a_table_that_grows_twice_in_a_step_keeps_the_snapshot_before_it() -> None:
    """A step that stretches a chunk moves the request's block twice: the worker gets its end."""
    bench = make(
        5, budget=64, long_prefill_token_threshold=40, elastic_token_budget=True, spacing=64
    )
    bench.add("a", 264)
    assert bench.step() == {"a": 64}
    assert bench.step() == {"a": 64}
    (appended,) = bench.sent[-1].scheduled_cached_reqs.new_block_ids
    assert appended[-1] == state_table(bench, "a")[4:]
    bench.scheduler.preempt(bench.requests["a"])
    bench.run()  # from the snapshot, which the worker checks


@pytest.mark.parametrize("groups", [(FULL,), (FULL, WINDOW), ()])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_a_request_has_one_block_which_moves_along(groups: tuple[KVGroup, ...], depth: int) -> None:
    bench = make(4, groups=groups, depth=depth, caching=False, budget=40)
    bench.add("a", 100, 60)
    bench.step()
    own = sent_table(bench)[-1]
    assert sent_table(bench) == [NULL_BLOCK, NULL_BLOCK, own]
    while bench.requests["a"].block_tables:
        table = state_table(bench, "a")
        assert table == [NULL_BLOCK] * (len(table) - 1) + [own]
        assert states(bench).usage == 0.25
        bench.fill()
        bench.update()
    assert bench.outputs["a"] == [PLAIN_TOKEN] * 60
    assert states(bench).usage == 0.0


def test_a_request_is_admitted_for_each_block_and_none_is_preempted() -> None:
    bench = make(2)
    for name in "abc":
        bench.add(name, 40, 10)
    assert [sorted(granted) for granted in bench.steps(12)] == [["a", "b"]] * 10 + [["c"]] * 2
    bench.run()
    assert bench.scheduler.num_preemptions == 0


def test_an_urgent_request_takes_the_place_of_one_that_holds_the_block() -> None:
    bench = make(2, policy="priority", preempt_for_priority=True)
    bench.add("lesser", 20, 30, priority=5)
    bench.add("equal", 20, 30)
    bench.step()
    bench.add("urgent", 20, 5)
    assert bench.step().keys() == {"equal", "urgent"}
    assert bench.preempted == ["lesser"]
    bench.run()
    assert bench.outputs["lesser"] == [PLAIN_TOKEN] * 30


def test_prompts_share_a_step_with_no_more_than_can_be_admitted() -> None:
    """The adaptive threshold is a share of the step for each prompt that may take part in it."""
    bench = make(2, budget=60, long_prefill_token_threshold_adaptive=True)
    for name in "abcdef":
        bench.add(name, 100, 5)
    assert bench.step() == {"a": 30, "b": 30}


# Snapshots and hits -----------------------------------------------------------------------------


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
    """Of a prompt of whole blocks the last one is computed, though all of it is cached."""
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
    prompt = list(range(100, 200))
    bench.add("a", prompt, 1)
    bench.run()
    bench.add("other", 300, 1)
    bench.run()
    bench.add("b", prompt, 1)
    assert bench.step() == {"b": 100}
    bench.run()
    bench.add("c", prompt, 1)
    assert bench.step() == {"c": 4}


def test_the_hit_of_a_window_and_of_a_state_end_at_one_position() -> None:
    bench = make(9, groups=(FULL, WINDOW))
    prompt = list(range(100, 300))
    bench.add("a", prompt, 1)
    bench.run()
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
    """Even if it would be replaced first."""
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
    prompt = list(range(100, 140))
    bench.add("a", prompt, 1)
    bench.run()
    bench.scheduler.kv.pool.forget_all()  # so that all is computed again
    bench.add("b", prompt, 1)
    assert bench.step() == {"b": 40}
    assert entries(sent_table(bench)) == [2]


def test_nothing_is_kept_without_a_prefix_cache() -> None:
    bench = make(9, caching=False)
    bench.add("a", 200, 1)
    bench.step()
    assert entries(sent_table(bench)) == [12]


# Drafts -----------------------------------------------------------------------------------------

WRONG = PLAIN_TOKEN + 1


def make_drafting(
    num_states: int, drafts: dict[int, list[int]], *, most: int = 8, **options: Any
) -> Harness:
    """Return a scheduler whose worker has these drafts of "a", by its number of outputs."""
    settings = {"num_speculative_tokens": most, "adaptive_speculation": False}
    return make(num_states, guesses={"a": drafts}, **settings, **options)


@pytest.mark.parametrize("groups", [(FULL,), (FULL, WINDOW), ()])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("right", range(5))
def test_the_state_rolls_back_to_the_last_right_draft(
    right: int, depth: int, groups: tuple[KVGroup, ...]
) -> None:
    """At each place in a block."""
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
    """Else the snapshot would be cached when its tokens are known, and before they are computed."""
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


# Few blocks -------------------------------------------------------------------------------------


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
    prompt = list(range(100, 140))
    bench.add("a", prompt, 1)
    bench.run()
    assert states(bench).pool.num_free == 1
    bench.add("b", prompt, 1)
    bench.step()
    assert cached(bench, "b") == 0, "its own state has taken the only block"


def test_a_hit_is_taken_over_where_no_other_block_is_left() -> None:
    bench = make(2, spacing=1024)
    prompt = list(range(100, 140))
    bench.add("a", prompt, 1)
    bench.run()
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
    prompt = list(range(100, 140))
    bench.add("a", prompt, 1)
    bench.run()
    bench.add("b", prompt, 20)
    bench.add("c", prompt, 20)
    bench.add("d", prompt, 20)
    assert bench.step() == {"b": 8, "c": 8}, "d has no block while the others read the snapshot"
    assert bench.step() == {"b": 1, "c": 1, "d": 8}
    bench.run()


def test_a_snapshot_may_be_replaced_while_a_request_waits_to_begin_from_it() -> None:
    bench = make(2, blocks=12)
    prompt = list(range(100, 200))
    bench.add("a", prompt, 1)
    bench.run()
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


# Swap -------------------------------------------------------------------------------------------


def make_swapping(**options: Any) -> Harness:
    """Three requests in KV memory that holds two of them to their ends."""
    settings: dict[str, Any] = {
        **{"blocks": 7, "num_host_blocks": 8, "num_host_state_blocks": 1, "caching": False},
        **{"swap_cost_tokens": 1.0, "state_swap_blocks": 2.0},
    }
    bench = make(4, **(settings | options))
    for name in "abc":
        bench.add(name, 30, 8)
    return bench


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_swapped_request_continues_with_its_state(depth: int) -> None:
    bench = make_swapping(depth=depth)
    bench.overlap()
    assert bench.scheduler.swapper.num_swapped_out > 0
    out, into = (
        [copies for sent in bench.sent if (copies := getattr(sent, name)).host_block_ids]
        for name in ("state_swap_out", "state_swap_in")
    )
    assert len(out) == len(into) == bench.scheduler.swapper.num_swapped_out
    assert bench.outputs == dict.fromkeys("abc", [PLAIN_TOKEN] * 8)
    assert bench.worker.total_scheduled == 3 * (30 + 8 - 1), "nothing is computed again"
    assert bench.scheduler.swapper.num_free_states == 1


@pytest.mark.parametrize(
    ("options", "num_swaps"),
    [
        ({}, 1),
        ({"num_host_state_blocks": 0}, 0),
        ({"num_host_blocks": 1}, 0),
        ({"swap_cost_tokens": 7.9}, 1),  # two KV blocks and a state, for 32 tokens
        ({"swap_cost_tokens": 8.1}, 0),
    ],
)
def test_a_state_is_swapped_if_it_costs_less(options: dict[str, Any], num_swaps: int) -> None:
    bench = make_swapping(**options)
    bench.steps(4)
    assert bench.preempted == ["c"]
    assert bench.scheduler.swapper.num_swapped_out == num_swaps
    bench.run()
    assert bench.outputs == dict.fromkeys("abc", [PLAIN_TOKEN] * 8)


def test_a_state_on_the_host_is_used_before_a_snapshot_of_fewer_tokens() -> None:
    bench = make(9, spacing=16, num_host_blocks=9, num_host_state_blocks=9)
    prompt = list(range(100, 130))
    bench.add("a", prompt, 60)
    bench.steps(5)
    bench.scheduler.preempt(bench.requests["a"])
    bench.scheduler.hold(bench.requests["a"])
    bench.add("b", [*prompt, *[PLAIN_TOKEN] * 20], 1)
    bench.steps(2)
    bench.scheduler.unblock(bench.requests["a"].req_id)
    bench.step()
    (new,) = bench.sent[-1].scheduled_new_reqs
    assert new.num_computed_tokens == 34, "the snapshot is that of 32"
    assert len(bench.sent[-1].state_swap_in.host_block_ids) == 1
    bench.run()
    assert bench.outputs["a"] == [PLAIN_TOKEN] * 60


def test_a_request_with_drafts_in_flight_is_computed_again() -> None:
    """It is not known yet of which tokens its state will be."""
    guesses = dict.fromkeys(range(1, 60), [WRONG] * 4)
    settings = {"num_host_blocks": 9, "num_host_state_blocks": 9, "caching": False}
    bench = make_drafting(4, guesses, depth=2, **settings)
    request = bench.add("a", 13, 60)
    bench.fill()
    while not request.num_drafts_in_flight:
        bench.update()
        bench.fill()
    bench.scheduler.preempt(request)
    assert request.swapped_out is None
    bench.overlap()
    assert bench.outputs["a"] == [PLAIN_TOKEN] * 60


def test_a_request_whose_drafts_were_wrong_is_swapped() -> None:
    guesses = dict.fromkeys(range(1, 60), [WRONG] * 4)
    settings = {"num_host_blocks": 9, "num_host_state_blocks": 9, "caching": False}
    bench = make_drafting(4, guesses, **settings)
    request = bench.add("a", 13, 60)
    bench.steps(5)
    bench.scheduler.preempt(request)
    assert request.swapped_out is not None
    assert bench.step() == {"a": 1}
    bench.run()
    assert bench.outputs["a"] == [PLAIN_TOKEN] * 60


def test_the_cheapest_victim_is_computed_again_from_its_snapshot() -> None:
    """Two requests share four blocks, and the state after them is cached."""
    bench = make(9, spacing=1024, victim_choice="cheapest")
    prompt = list(range(100, 170))
    bench.add("a", prompt, 20)
    bench.steps(2)
    request = bench.add("b", prompt, 20)
    bench.step()
    victims = bench.scheduler.victims
    assert victims._num_lost_tokens(request) == 70 - 64
    states(bench).pool.forget_all()
    assert victims._num_lost_tokens(request) == 70, "its KV is of no use without the state"


@pytest.mark.parametrize("how", ["lose", "reset"])
def test_swapped_states_are_void_when_the_worker_changes(how: str) -> None:
    bench = make_swapping()
    bench.steps(4)
    assert bench.requests["c"].swapped_out is not None
    if how == "lose":
        bench.lose_worker()
    else:
        assert bench.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert bench.scheduler.swapper.num_free_states == 1
    bench.run()
    assert bench.outputs == dict.fromkeys("abc", [PLAIN_TOKEN] * 8)


# Ends and losses --------------------------------------------------------------------------------


def test_a_preempted_request_continues_from_its_last_snapshot() -> None:
    bench = make(9)
    bench.add("a", 150, 60)
    bench.steps(50)
    assert len(bench.outputs["a"]) == 50
    bench.scheduler.preempt(bench.requests["a"])
    assert states(bench).usage == 0.0
    assert bench.step() == {"a": 200 - 192}
    bench.run()
    assert bench.outputs["a"] == [PLAIN_TOKEN] * 60


def test_a_request_that_ends_leaves_its_snapshot() -> None:
    """Even if it ends with the step that has written it."""
    bench = make(4)
    prompt = list(range(100, 140))
    bench.add("a", prompt, 1)
    bench.step()
    assert "a" in bench.finished
    bench.add("b", prompt, 1)
    assert bench.step() == {"b": 8}


def test_a_failed_request_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = make(4)
    prompt = list(range(100, 140))
    bench.add("a", prompt, 5)
    bench.step()
    bench.scheduler.fail_request(bench.requests["a"].req_id, "its logits are not numbers")
    bench.add("b", prompt, 1)
    bench.step()
    assert cached(bench, "b") == 0
    assert states(bench).pool.num_free == 4


def test_a_state_that_cannot_be_hashed_is_dropped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench = make(4)
    bench.add("a", 40, 12)
    bench.step()

    def broken(*_: object) -> None:
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(bench.scheduler.kv, "_extend_hashes", broken)
    with caplog.at_level(logging.ERROR):
        bench.steps(3)
    assert [record.getMessage() for record in caplog.records] == [
        "states of request 0 are not cached"
    ]
    assert states(bench).pool.num_free == 3
    monkeypatch.undo()
    bench.run()
    assert bench.outputs["a"] == [PLAIN_TOKEN] * 12


def test_a_reset_forgets_the_states() -> None:
    bench = make(4, groups=())
    prompt = list(range(100, 140))
    bench.add("a", prompt, 20)
    bench.steps(2)
    assert not bench.scheduler.reset_prefix_cache()
    assert bench.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert bench.step() == {"a": 42}
    bench.run()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_lost_worker_takes_its_states_with_it(depth: int) -> None:
    bench = make(3, depth=depth, budget=50)
    for name in "abcd":
        bench.add(name, 60, 30)
    for _ in range(7):
        bench.fill()
        bench.update()
    bench.fill()
    bench.lose_worker()
    assert states(bench).pool.num_free == 3
    bench.overlap()
    assert bench.outputs == dict.fromkeys("abcd", [PLAIN_TOKEN] * 30)


def test_a_model_without_attention_needs_no_kv_blocks() -> None:
    bench = make(3, groups=(), blocks=2, max_model_len=4096)
    for name in "abcd":
        bench.add(name, 2000, 30)
    bench.run()
    assert bench.outputs == dict.fromkeys("abcd", [PLAIN_TOKEN] * 30)
    assert bench.scheduler.num_preemptions == 0


# Options ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_groups": (STATES, FULL)}, "at the end"),
        ({"kv_groups": (FULL, STATES, STATES)}, "only one"),
        ({"num_state_blocks": 1}, "num_state_blocks 1 must be at least 2"),
        ({"kv_groups": (FULL,)}, "num_state_blocks needs a state group"),
        ({"mamba_block_size": 24}, "mamba_block_size 24 must be a multiple of block_size 16"),
    ],
)
def test_options_that_contradict_a_state_group_are_refused(
    options: dict[str, Any], message: str
) -> None:
    usual: dict[str, Any] = {"kv_groups": (FULL, STATES), "num_state_blocks": 9}
    SchedulerOptions(**usual)
    with pytest.raises(ValueError, match=message):
        SchedulerOptions(**(usual | options))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 512),
        ({"block_size": 48}, 528),
        ({"block_size": 1024}, 1024),
        ({"mamba_block_size": 96}, 96),
    ],
)
def test_the_default_spacing_is_a_multiple_of_the_block_size(
    settings: dict[str, Any], expected: int
) -> None:
    config = configure(**settings)
    facts = ModelFacts("m", 9, 99, config.cache.block_size, 9, [], num_state_blocks=9)
    facts.kv_groups.append(STATES)
    assert SchedulerOptions.combine(config, facts, 0.0).mamba_block_size == expected


# Statistics -------------------------------------------------------------------------------------


def test_the_statistics_have_the_share_of_blocks_that_requests_hold() -> None:
    """Not that of snapshots."""
    bench = make(4)
    bench.add("a", 100, 20)
    bench.steps(3)
    stats = scheduler_stats(bench.scheduler)
    assert stats.state_cache_usage == 0.25
    line = StatsLine(1.0, 0.0).render(stats, 1.0)
    assert line is not None
    assert "KV cache usage: 0.7%, State cache usage: 25.0%, Prefix" in line
    assert scheduler_stats(Harness().scheduler).state_cache_usage is None

"""Steps in flight, at any depth: what is delivered, wasted and late.

Scripted tokens are all different, so that a lost, repeated or misplaced one
shows.
"""

import random
from collections.abc import Mapping, Sequence

import pytest

from core_proc.invariants import check_invariants
from tests.combinations import in_turn
from tests.core.harness import EOS, PLAIN_TOKEN, Harness, preempt_in_flight

DEPTHS = (1, 2, 3, 4, 8)
at_every_depth = pytest.mark.parametrize("depth", DEPTHS)


def _script(names: Sequence[str], count: int) -> dict[str, list[int]]:
    return {name: [1000 * i + j for j in range(3, 3 + count)] for i, name in enumerate(names)}


def _assert_delivered(bench: Harness, script: Mapping[str, Sequence[int]]) -> None:
    """Assert that every request got its script, and nothing is left."""
    assert bench.outputs == script
    assert set(bench.finished) == set(script)
    assert bench.num_free == bench.scheduler.options.num_blocks - 1
    assert bench.worker.mirror == {}


@at_every_depth
def test_depth_steps_are_scheduled_before_the_first_one_returns(depth: int) -> None:
    bench = Harness(depth=depth)
    bench.add("a", 10, 20)
    assert bench.fill() == [{"a": 10}] + [{"a": 1}] * (depth - 1)
    assert bench.schedule() == {}, "the pipe is full"
    assert bench.update() == {"a": PLAIN_TOKEN}
    assert bench.schedule() == {"a": 1}


@at_every_depth
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 7, 20])
def test_a_length_stop_wastes_nothing(depth: int, max_tokens: int) -> None:
    bench = Harness(depth=depth, budget=4, script=_script("abc", max_tokens))
    for name in "abc":
        bench.add(name, 10, max_tokens)
    bench.overlap()
    assert bench.worker.total_scheduled == 3 * (10 + max_tokens - 1)
    _assert_delivered(bench, _script("abc", max_tokens))


@at_every_depth
def test_the_model_length_wastes_nothing(depth: int) -> None:
    bench = Harness(depth=depth, max_model_len=40, script=_script("a", 4))
    bench.add("a", 36, 20)
    bench.overlap()
    assert bench.worker.total_scheduled == 36 + 4 - 1
    _assert_delivered(bench, _script("a", 4))


@at_every_depth
def test_a_stop_token_wastes_one_decode_for_each_further_step_in_flight(depth: int) -> None:
    tokens = [7, 8, EOS, 9, 9, 9, 9, 9, 9, 9, 9, 9]
    bench = Harness(depth=depth, script={"a": tokens})
    bench.add("a", 10, 20)
    bench.overlap()
    assert bench.worker.total_scheduled == 10 + 2 + (depth - 1)
    _assert_delivered(bench, {"a": tokens[:3]})


@at_every_depth
def test_a_stop_token_near_the_length_wastes_no_more_than_the_length_allows(depth: int) -> None:
    bench = Harness(depth=depth, script={"a": [7, 8, EOS]})
    bench.add("a", 10, 4)
    bench.overlap()
    assert bench.worker.total_scheduled == 10 + 2 + min(depth - 1, 1)


@at_every_depth
def test_an_abort_frees_at_once_and_its_late_tokens_are_ignored(depth: int) -> None:
    script = _script("ab", 12)
    bench = Harness(depth=depth, blocks=20, caching=True, script=script)
    bench.add("a", 40, 12)
    bench.add("b", 40, 12)
    bench.fill()
    free_before, num_sent = bench.num_free, len(bench.sent)
    assert bench.abort("a")
    assert bench.num_free > free_before
    bench.add("c", 100, 1)
    bench.overlap()
    assert bench.names(bench.sent[num_sent].finished_req_ids) == ["a"], "the next step reports it"
    assert bench.outputs["a"] == []
    assert bench.outputs["b"] == script["b"]
    assert bench.outputs["c"] == [PLAIN_TOKEN]
    reported = [name for step in bench.sent for name in bench.names(step.finished_req_ids)]
    assert sorted(reported) == ["a", "b", "c"]


@at_every_depth
@pytest.mark.parametrize("caching", [True, False])
def test_preemption_changes_no_tokens(depth: int, caching: bool) -> None:
    names = "abcdef"
    bench = Harness(depth=depth, blocks=12, caching=caching, budget=32, script=_script(names, 40))
    for name in names:
        bench.add(name, 20, 40)
    bench.overlap()
    assert bench.scheduler.num_preemptions > 0
    _assert_delivered(bench, _script(names, 40))


@at_every_depth
def test_a_reset_with_steps_in_flight_changes_no_tokens(depth: int) -> None:
    bench = Harness(depth=depth, caching=True, budget=64, script=_script("abc", 9))
    for name in "abc":
        bench.add(name, 40, 9)
    for _ in range(4):
        bench.fill()
        assert bench.scheduler.reset_prefix_cache(reset_running_requests=True)
        check_invariants(bench.scheduler)
        assert bench.queue == list("abc")
        bench.update()
    bench.overlap()
    _assert_delivered(bench, _script("abc", 9))


@at_every_depth
def test_after_the_loss_of_a_worker_all_is_computed_again_in_the_old_order(depth: int) -> None:
    script = _script("abc", 6)
    bench = Harness(depth=depth, seqs=2, caching=True, script=script)
    for name in "abc":
        bench.add(name, 20, 6)
    bench.fill()
    bench.update()
    assert bench.outputs == {"a": script["a"][:1], "b": script["b"][:1], "c": []}
    next_step_id = bench.scheduler.next_step_id

    bench.lose_worker()
    check_invariants(bench.scheduler)
    assert bench.num_free == 255
    assert not bench.scheduler.in_flight
    assert bench.schedule() == {"a": 21, "b": 21}
    step = bench.sent[-1]
    assert step.step_id == next_step_id
    assert [new.num_prompt_tokens for new in step.scheduled_new_reqs] == [20, 20]
    bench.overlap()
    _assert_delivered(bench, script)


def test_a_lost_worker_owes_no_late_tokens() -> None:
    bench = Harness(blocks=8, depth=2)
    preempt_in_flight(bench)
    bench.lose_worker()
    assert bench.requests["b"].num_late_tokens == 0
    bench.overlap()
    assert {name: len(tokens) for name, tokens in bench.outputs.items()} == {"a": 20, "b": 20}


def test_a_preempted_request_is_not_admitted_before_its_late_token() -> None:
    """Its position depends on the late token; requests behind it wait too."""
    bench = Harness(blocks=8, depth=3, script={"b": [42, 43]})
    bench.add("a", 46, 20)
    bench.add("b", 46, 20)
    assert bench.schedule() == {"a": 46, "b": 46}
    assert bench.schedule() == {"a": 1, "b": 1}
    bench.update()
    assert bench.schedule() == {"a": 1, "b": 1}
    bench.update()
    assert bench.schedule() == {"a": 1}, "a takes the last block, b gives up its own"
    assert bench.preempted == ["b"]
    request = bench.requests["b"]
    assert request.num_late_tokens == 1
    bench.add("c", 5)
    bench.abort("a")
    assert bench.schedule() == {}, "a token of b is in flight"
    assert bench.update() == {"b": PLAIN_TOKEN}
    assert request.output_token_ids == [42, 43, PLAIN_TOKEN]
    assert bench.schedule() == {"b": 49, "c": 5}


def test_a_block_is_cached_only_when_its_pending_token_is_known() -> None:
    bench = Harness(caching=True, depth=2)
    prompt = list(range(15))
    bench.add("a", prompt)
    bench.fill()
    assert bench.requests["a"].num_hashed_blocks == 0
    bench.update()
    bench.schedule()
    assert bench.requests["a"].num_hashed_blocks == 1
    bench.add("b", [*prompt, PLAIN_TOKEN, 5])
    bench.update()
    assert bench.schedule() == {"a": 1, "b": 1}


@at_every_depth
def test_a_block_whose_tokens_become_known_at_the_end_is_cached_at_the_end(depth: int) -> None:
    bench = Harness(caching=True, depth=depth)
    prompt = list(range(15))
    bench.add("a", prompt, 2)
    bench.overlap()
    bench.add("b", [*prompt, PLAIN_TOKEN, 5])
    assert bench.schedule() == {"b": 1}


@pytest.mark.parametrize(("seed", "depth"), in_turn(range(20), DEPTHS))
def test_chaos_delivers_every_token_once_and_in_order(seed: int, depth: int) -> None:
    """Eight requests run in few blocks, with random preemptions, aborts and resets."""
    rng = random.Random(seed)
    names = "abcdefgh"
    script = _script(names, 24)
    bench = Harness(
        depth=depth, blocks=8, seqs=4, budget=rng.choice([6, 16]), caching=True, script=script
    )
    for name in names:
        bench.add(name, 8, 24)
    aborted: set[str] = set()
    for _ in range(40):
        dice = rng.random()
        if dice < 0.1 and bench.scheduler.running:
            bench.scheduler.preempt(rng.choice(bench.scheduler.running))
        elif dice < 0.13:
            name = rng.choice(names)
            aborted |= {name} if bench.abort(name) else set()
        elif dice < 0.2:
            assert bench.scheduler.reset_prefix_cache(reset_running_requests=True)
        elif dice < 0.6 or not bench.num_in_flight:
            bench.schedule()
        else:
            bench.update()
        check_invariants(bench.scheduler)
    bench.overlap()
    for name in names:
        assert bench.outputs[name] == script[name][: len(bench.outputs[name])]
        assert len(bench.outputs[name]) == 24 or name in aborted
    assert set(bench.finished) == set(names) - aborted
    assert bench.num_free == 7
    assert bench.worker.mirror == {}

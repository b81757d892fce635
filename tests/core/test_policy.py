"""Who is preempted, who resumes first, and what a preemption takes back."""

import pytest

from tests.core.harness import PLAIN_TOKEN, Harness


@pytest.mark.parametrize("reserve", [True, False])
def test_reserving_the_whole_input_prevents_thrashing(reserve: bool) -> None:
    bench = Harness(blocks=6, budget=32, scheduler_reserve_full_isl=reserve)
    bench.add("a", 30, 6)
    bench.add("b", 70, 5)
    bench.run()
    assert bench.scheduler.num_preemptions == (0 if reserve else 2)
    assert {name: len(tokens) for name, tokens in bench.outputs.items()} == {"a": 6, "b": 5}


def test_fcfs_preempts_the_last_and_resumes_it_first() -> None:
    bench = Harness(blocks=7)
    for name in "abc":
        bench.add(name, 30, 8)
    assert bench.step() == dict.fromkeys("abc", 30)
    assert bench.steps(2) == [dict.fromkeys("abc", 1)] * 2
    assert bench.step() == {"a": 1, "b": 1}
    assert bench.preempted == ["c"]
    bench.add("d", 10, 6)
    assert [request.req_id for request in bench.scheduler.waiting.in_order()] == [2, 3]
    assert bench.steps(4) == [{"a": 1, "b": 1}] * 4
    assert bench.step() == {"c": 33, "d": 10}
    bench.run()
    assert bench.outputs["c"] == [PLAIN_TOKEN] * 8


def test_nobody_is_admitted_in_a_step_that_preempted() -> None:
    bench = Harness(blocks=8)
    for name, length in (("a", 30), ("b", 30), ("c", 40)):
        bench.add(name, length)
    bench.steps(3)
    bench.add("d", 1, 2)
    assert bench.step() == {"a": 1, "b": 1}
    assert bench.preempted == ["c"]
    assert bench.num_free == 1, "d would have fitted"


def test_priority_evicts_a_victim_that_was_already_served() -> None:
    bench = Harness(blocks=6, policy="priority")
    bench.add("low", 32, priority=5)
    bench.step()
    bench.add("high", 32, priority=0)
    assert bench.step() == {"low": 1, "high": 32}
    assert bench.step() == {"high": 1}
    assert bench.preempted == ["low"]
    assert bench.sent[-1].total_num_scheduled_tokens == 1


def test_a_priority_victim_that_asks_itself_leaves_the_step_to_others() -> None:
    bench = Harness(blocks=6, policy="priority")
    bench.add("low", 30, priority=1)
    bench.step()
    bench.add("high", 32, priority=0)
    assert bench.steps(2) == [{"low": 1, "high": 32}, {"low": 1, "high": 1}]
    assert bench.step() == {"high": 1}
    assert bench.preempted == ["low"]


def test_a_victim_served_one_token_of_its_prompt_gives_its_budget_back() -> None:
    """A grant of one token without a sample is withdrawn like any other."""
    bench = Harness(
        blocks=4,
        policy="priority",
        long_prefill_token_threshold=1,
        scheduler_reserve_full_isl=False,
    )
    bench.add("low", 40, 2, priority=5)
    bench.step()
    bench.add("high", 17, 2, priority=0)
    assert bench.steps(16) == [{"low": 1, "high": 1}] * 16
    assert bench.step() == {"high": 1}
    assert bench.preempted == ["low"]
    assert bench.sent[-1].total_num_scheduled_tokens == 1


def test_equal_victims_do_not_take_turns_for_ever() -> None:
    bench = Harness(
        blocks=4,
        policy="priority",
        long_prefill_token_threshold=1,
        scheduler_reserve_full_isl=False,
    )
    bench.add("a", 40, 2, arrival_time=1.0)
    bench.add("b", 40, 2, arrival_time=1.0)
    bench.run(limit=5000)
    assert bench.scheduler.num_preemptions > 64
    assert bench.finished == {"a": "length", "b": "length"}


def test_blocks_that_a_victim_never_computed_are_no_hits() -> None:
    """Their hashes are known from the moment of the grant, and must go when it is withdrawn."""
    bench = Harness(
        blocks=8,
        caching=True,
        policy="priority",
        long_prefill_token_threshold=32,
        scheduler_reserve_full_isl=False,
    )
    bench.add("low", 96, 2, priority=5)
    assert bench.step() == {"low": 32}
    bench.add("high", 16, priority=0)
    assert bench.steps(2) == [{"low": 32, "high": 16}, {"high": 1}]
    assert bench.preempted == ["low"]
    bench.abort("high")
    assert bench.step() == {"low": 32}
    assert bench.sent[-1].scheduled_new_reqs[0].num_cached_tokens == 64


def test_priority_orders_the_queue_and_never_evicts_for_a_waiter() -> None:
    bench = Harness(seqs=1, policy="priority")
    bench.add("low", 4, 3, priority=9)
    bench.step()
    for name, priority in zip("abcd", (5, 1, 8, 1), strict=True):
        bench.add(name, 4, 1, priority=priority)
    grants = bench.steps(7)
    assert [next(iter(step)) for step in grants if step] == ["low", "low", "b", "d", "a", "c"]


def test_a_resumed_request_hits_its_own_blocks() -> None:
    bench = Harness(blocks=9, caching=True)
    bench.add("a", 64)
    bench.add("b", 62, 4)
    assert bench.step() == {"a": 64, "b": 62}
    bench.add("c", 1, 1)
    assert bench.step() == {"a": 1}
    assert bench.preempted == ["b"]
    bench.abort("a")
    assert bench.step() == {"b": 63 - 48, "c": 1}
    assert bench.requests["b"].num_cached_tokens == 0

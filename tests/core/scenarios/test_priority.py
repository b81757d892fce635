"""The priority policy: order of the queue, choice of the victim, and its limits."""

import pytest

from tests.core.harness import Harness


def test_a_victim_that_was_already_served_gives_its_budget_back() -> None:
    bench = Harness(blocks=6, policy="priority")
    bench.add("low", 32, priority=5)
    bench.step()
    bench.add("high", 32, priority=0)
    assert bench.step() == {"low": 1, "high": 32}
    assert bench.num_free == 0
    assert bench.step() == {"high": 1}
    assert bench.preempted == ["low"]
    assert bench.sent[-1].total_num_scheduled_tokens == 1


def test_a_preempted_one_of_low_priority_resumes_when_the_high_one_ends() -> None:
    bench = Harness(blocks=5, policy="priority")
    bench.add("low", 30, 4, priority=1)
    assert bench.step() == {"low": 30}
    bench.add("high", 32, 4, priority=0)
    assert bench.step() == {"low": 1, "high": 32}
    assert bench.step() == {"high": 1}
    assert bench.preempted == ["low"]
    assert bench.steps(2) == [{"high": 1}] * 2
    assert bench.step() == {"low": 32}
    bench.run()
    assert {name: len(tokens) for name, tokens in bench.outputs.items()} == {"low": 4, "high": 4}


def test_a_victim_that_asks_itself_leaves_the_step_to_others() -> None:
    """vLLM ends the pass and sends an empty step; Troika goes on with the next request."""
    bench = Harness(blocks=6, policy="priority")
    bench.add("low", 30, priority=1)
    bench.step()
    bench.add("high", 32, priority=0)
    assert bench.steps(2) == [{"low": 1, "high": 32}, {"low": 1, "high": 1}]
    assert bench.step() == {"high": 1}
    assert bench.preempted == ["low"]


def _admitted(bench: Harness) -> list[list[str]]:
    new_ids = [[new.req_id for new in step.scheduled_new_reqs] for step in bench.sent]
    return [bench.names(ids) for ids in new_ids if ids]


@pytest.mark.parametrize(
    ("priorities", "seqs", "order"),
    [
        ([3, 1, 2, 0], 2, [["3", "1"], ["2", "0"]]),
        ([5, 1, 8, 3, 2, 7, 4, 6], 1, [[str(i)] for i in (1, 4, 3, 6, 0, 7, 5, 2)]),
        ([1, 0, 1, 0], 1, [["1"], ["3"], ["0"], ["2"]]),
    ],
)
def test_the_most_important_are_admitted_first_and_ties_go_by_arrival(
    priorities: list[int], seqs: int, order: list[list[str]]
) -> None:
    bench = Harness(seqs=seqs, policy="priority")
    for index, priority in enumerate(priorities):
        bench.add(str(index), 4, 2, priority=priority)
    bench.run()
    assert _admitted(bench) == order


def test_an_earlier_time_of_arrival_wins_a_tie_although_it_came_in_later() -> None:
    """The client's clock decides, so a request that is sent again keeps its place."""
    bench = Harness(seqs=1, policy="priority")
    bench.add("late", 4, 1, arrival_time=9.0)
    bench.add("early", 4, 1, arrival_time=1.0)
    bench.run()
    assert _admitted(bench) == [["early"], ["late"]]


def test_no_request_is_evicted_for_a_waiter_when_slots_are_full() -> None:
    bench = Harness(seqs=1, policy="priority")
    bench.add("low", 4, 3, priority=9)
    bench.step()
    for name, priority in zip("abcd", (5, 1, 8, 1), strict=True):
        bench.add(name, 4, 1, priority=priority)
    grants = bench.steps(7)
    assert [next(iter(step)) for step in grants if step] == ["low", "low", "b", "d", "a", "c"]
    assert bench.scheduler.num_preemptions == 0


def test_no_request_is_evicted_for_a_waiter_when_memory_is_full() -> None:
    bench = Harness(blocks=4, policy="priority")
    bench.add("low", 40, 4, priority=9)
    bench.step()
    bench.add("high", 30, 2, priority=0)
    assert bench.steps(3) == [{"low": 1}] * 3
    assert bench.step() == {"high": 30}
    assert bench.scheduler.num_preemptions == 0


def test_requests_after_a_victim_are_still_served() -> None:
    """The victim stood before them in the running list, which shrinks during the pass.

    Its prompt has 70 tokens here: one of 200 could never fit and would be refused.
    """
    bench = Harness(
        blocks=6,
        budget=200,
        policy="priority",
        long_prefill_token_threshold=15,
        scheduler_reserve_full_isl=False,
        max_model_len=80,
    )
    bench.add("a", 70, 9, priority=9)
    assert bench.step() == {"a": 15}
    bench.add("b", 15, priority=0)
    assert bench.step() == {"a": 15, "b": 15}
    bench.add("c", 1, priority=1)
    assert bench.step() == {"a": 15, "b": 1, "c": 1}
    assert bench.step() == {"b": 1, "c": 1}
    assert bench.preempted == ["a"]


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


def test_blocks_that_a_victim_never_computed_are_not_hits() -> None:
    """Their hashes are registered with the grant, and must be removed when it is withdrawn."""
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

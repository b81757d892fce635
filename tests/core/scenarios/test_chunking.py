"""How the budget of a step is distributed, and how prompts are cut into chunks."""

import pytest

from core_proc.scheduling.step import ScheduledStep
from tests.core.harness import Harness


def test_all_that_fit_start_together_in_order_of_arrival() -> None:
    bench = Harness()
    names = [str(i) for i in range(10)]
    for name in names:
        bench.add(name, 10)
    first, second = bench.steps(2)
    assert list(first.items()) == [(name, 10) for name in names]
    assert second == dict.fromkeys(names, 1)


def test_the_threshold_cuts_long_prompts() -> None:
    bench = Harness(budget=1024, long_prefill_token_threshold=400)
    for name in "abc":
        bench.add(name, 800)
    assert bench.steps(4) == [
        {"a": 400, "b": 400, "c": 224},
        {"a": 400, "b": 400, "c": 224},
        {"a": 1, "b": 1, "c": 352},
        {"a": 1, "b": 1, "c": 1},
    ]


@pytest.mark.parametrize(
    ("chunked", "second"),
    [(True, {"a": 1, "b": 576, "c": 10}), (False, {"a": 1, "b": 800, "c": 10})],
)
def test_slots_bound_admission_with_and_without_chunks(
    chunked: bool, second: dict[str, int]
) -> None:
    """The fourth request waits for a slot, not for tokens."""
    bench = Harness(budget=1024, seqs=3, enable_chunked_prefill=chunked)
    for name, length in zip("abcd", (800, 800, 10, 10), strict=True):
        bench.add(name, length)
    assert bench.step() == ({"a": 800, "b": 224} if chunked else {"a": 800})
    assert bench.step() == second
    assert bench.queue == ["d"]


def test_newcomers_join_running_requests_within_the_budget() -> None:
    bench = Harness(budget=64)
    bench.add("a", 60, 4)
    assert bench.step() == {"a": 60}
    bench.add("b", 100, 2)
    bench.add("c", 5, 2)
    assert bench.steps(4) == [
        {"a": 1, "b": 63},
        {"a": 1, "b": 37, "c": 5},
        {"a": 1, "b": 1, "c": 1},
        {},
    ]
    assert sorted(bench.notices) == ["a", "b", "c"]


def test_a_small_budget_is_handed_out_in_order() -> None:
    bench = Harness(budget=10)
    for name in "abc":
        bench.add(name, 25, 2)
    assert bench.steps(10) == [
        {"a": 10},
        {"a": 10},
        {"a": 5, "b": 5},
        {"a": 1, "b": 9},
        {"b": 10},
        {"b": 1, "c": 9},
        {"b": 1, "c": 9},
        {"c": 7},
        {"c": 1},
        {},
    ]


def test_the_threshold_holds_for_a_request_alone() -> None:
    """Short requests never wait for the whole of a long one."""
    bench = Harness(budget=100, long_prefill_token_threshold=16)
    bench.add("long", 50, 2)
    bench.add("s1", 10, 2)
    bench.add("s2", 10, 2)
    assert bench.steps(5) == [
        {"long": 16, "s1": 10, "s2": 10},
        {"long": 16, "s1": 1, "s2": 1},
        {"long": 16},
        {"long": 2},
        {"long": 1},
    ]


def test_max_num_scheduled_tokens_replaces_the_budget() -> None:
    bench = Harness(budget=64, max_num_scheduled_tokens=16)
    bench.add("a", 40)
    bench.add("b", 5)
    assert bench.steps(4) == [{"a": 16}, {"a": 16}, {"a": 8, "b": 5}, {"a": 1, "b": 1}]


def test_the_adaptive_threshold_is_a_fair_share_of_the_budget() -> None:
    bench = Harness(
        budget=120, long_prefill_token_threshold=16, long_prefill_token_threshold_adaptive=True
    )
    for name in "abc":
        bench.add(name, 100, 1)
    assert bench.step() == {"a": 40, "b": 40, "c": 40}


def test_without_chunks_a_prompt_beyond_the_budget_still_runs() -> None:
    bench = Harness(budget=64, enable_chunked_prefill=False)
    bench.add("a", 100, 1)
    assert bench.steps(2) == [{"a": 64}, {"a": 36}]


def test_the_adaptive_threshold_shares_what_decoding_requests_leave() -> None:
    bench = Harness(budget=64, seqs=6, long_prefill_token_threshold_adaptive=True)
    for name in "abcd":
        bench.add(name, 4, 90)
    bench.step()
    bench.add("long", 300, 1)
    bench.add("too", 300, 1)
    for number in range(200):
        bench.add(f"waits{number}", 300, 1)
    assert bench.step() == dict.fromkeys("abcd", 1) | {"long": 30, "too": 30}


def test_the_adaptive_threshold_uses_the_whole_step_however_many_requests_wait() -> None:
    bench = Harness(blocks=4096, seqs=64, long_prefill_token_threshold_adaptive=True)
    for number in range(500):
        bench.add(f"r{number}", 300, 100)
    assert bench.step() == {f"r{number}": 32 for number in range(64)}
    assert sum(bench.step().values()) == 2048


def test_the_adaptive_threshold_is_a_limit_even_with_more_requests_than_tokens() -> None:
    bench = Harness(blocks=4096, budget=64, seqs=100, long_prefill_token_threshold_adaptive=True)
    for number in range(100):
        bench.add(f"r{number}", 30, 100)
    for _ in range(20):
        granted = bench.step()
        assert sum(granted.values()) == 64
        assert max(granted.values()) <= 2


def test_the_adaptive_threshold_ignores_a_front_that_lacks_blocks() -> None:
    bench = Harness(blocks=40, budget=64, seqs=16, long_prefill_token_threshold_adaptive=True)
    bench.add("a", 400, 1)
    assert bench.steps(3) == [{"a": 64}] * 3
    for number in range(10):
        bench.add(f"r{number}", 500, 1)
    bench.step()
    assert bench.step() == {"a": 64}, "no other request can be admitted"


def test_a_request_that_the_budget_does_not_reach_continues_where_it_was() -> None:
    step = ScheduledStep(2, 0)
    requests = [Harness().add(name, 4) for name in "abc"]
    assert step.advance(requests) == 2
    assert [request.num_computed_tokens for request in requests] == [1, 1, 0]
    assert step.sampling == requests[:2]
    assert (step.budget, step.num_tokens) == (0, 2)

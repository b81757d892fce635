"""How the budget of a step is distributed, and how prompts are cut into chunks."""

import pytest

from tests.core.harness import Harness


def test_all_that_fit_start_together_in_order_of_arrival() -> None:
    """S1."""
    bench = Harness()
    names = [str(i) for i in range(10)]
    for name in names:
        bench.add(name, 10)
    first, second = bench.steps(2)
    assert list(first.items()) == [(name, 10) for name in names]
    assert second == dict.fromkeys(names, 1)


def test_the_threshold_cuts_long_prompts() -> None:
    """S2."""
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
    """S3. The fourth request waits for a slot, not for tokens."""
    bench = Harness(budget=1024, seqs=3, enable_chunked_prefill=chunked)
    for name, length in zip("abcd", (800, 800, 10, 10), strict=True):
        bench.add(name, length)
    assert bench.step() == ({"a": 800, "b": 224} if chunked else {"a": 800})
    assert bench.step() == second
    assert bench.queue == ["d"]


def test_newcomers_join_running_requests_within_the_budget() -> None:
    """S4."""
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
    """S5."""
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
    """S6. Short requests never wait for the whole of a long one."""
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
    """S8."""
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


def test_a_request_without_a_grant_continues_at_its_position() -> None:
    """The share of a prompt grows as others leave, until nothing is left for prompts behind it."""
    bench = Harness(
        budget=64, max_num_scheduled_tokens=8, seqs=2, long_prefill_token_threshold_adaptive=True
    )
    names = [str(number) for number in range(14)]
    for name, length in (("a", 40), ("b", 3), *((name, 5) for name in names)):
        bench.add(name, length)
    assert bench.step() == {"a": 4, "b": 3}
    for name in names:
        bench.abort(name)
    assert bench.steps(4) == [{"a": 8}] * 4
    assert bench.requests["b"].num_computed_tokens == 3
    assert bench.steps(2) == [{"a": 4, "b": 1}, {"a": 1, "b": 1}]

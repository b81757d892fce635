"""States are swapped out with a preempted request, if that costs less than recomputing."""

from typing import Any

import pytest

from tests.core.harness import PLAIN_TOKEN, Harness
from tests.core.state_bench import WRONG, make, make_drafting, states


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

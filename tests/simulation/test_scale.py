"""Many replicas in virtual time: none of their requests is lost, and routing by prefixes pays."""

from random import Random

import pytest

from protocol.config import RoutingPolicy
from tests.simulation.scale.costs import Sample, StepCosts, fit
from tests.simulation.scale.replica import SimulatedReplica
from tests.simulation.scale.tally import Tally
from tests.simulation.scale.world import Plan, World

MIN_BLOCKS = 28
"""The longest turn fits."""


def simulate(policy: RoutingPolicy, **changes: float) -> Tally:
    return World(Plan(10, 3000, policy)._replace(**changes)).run()


def test_nothing_is_lost_with_a_tenth_of_the_replicas_and_prefixes_are_hit() -> None:
    aware, in_turn = (
        simulate(policy) for policy in (RoutingPolicy.PREFIX_AWARE, RoutingPolicy.ROUND_ROBIN)
    )
    for tally in (aware, in_turn):
        assert tally.num_lost == 0
        assert tally.num_asked == 3000
        assert tally.num_lost_replicas == 1
        assert tally.num_moved > 0
    hits = [tally.window("before").hit_rate for tally in (aware, in_turn)]
    late = [tally.window("before").ttft_ms[1] for tally in (aware, in_turn)]
    assert hits[0] > 1.2 * hits[1]
    assert late[0] < late[1]
    missing, more = aware.expectation_error
    assert missing < 0.01, "a client alone knows what it has sent"
    assert more < 0.1


def test_a_seed_is_reproduced() -> None:
    one, other = (simulate(RoutingPolicy.PREFIX_AWARE, seed=5, num_requests=500) for _ in range(2))
    assert one.virtual_s == other.virtual_s
    assert (one.num_steps, one.num_tokens) == (other.num_steps, other.num_tokens)
    assert simulate(RoutingPolicy.PREFIX_AWARE, seed=6, num_requests=500).virtual_s != one.virtual_s


def random_plan(number: int) -> Plan:
    """Return a small plan, with few blocks, and often with more requests than replicas answer."""
    random = Random(number)
    return Plan(
        random.randint(1, 6),
        random.randint(20, 200),
        random.choice(list(RoutingPolicy)),
        number,
        load=random.uniform(0.5, 4.0),
        num_blocks=random.randint(MIN_BLOCKS, 150),
        lost_share=random.choice((0.0, 0.1, 0.5, 1.0)),
        away_s=random.uniform(0.1, 30.0),
    )


@pytest.mark.parametrize(
    "numbers", [range(14, 22), pytest.param(range(22, 210), marks=pytest.mark.slow)]
)
def test_replicas_that_compute_late_give_the_same_result(
    numbers: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is as if each step were computed at its time, with preemptions and without replicas."""
    plans = [random_plan(number) for number in numbers]
    late = [World(plan).run() for plan in plans]
    in_time = property(lambda replica: replica._ends_at if replica._asked else None)
    monkeypatch.setattr(SimulatedReplica, "next_end", in_time)
    for plan, tally in zip(plans, late, strict=True):
        assert tally.num_lost == 0, plan
        other = World(plan).run()
        assert (tally.virtual_s, tally.num_steps) == (other.virtual_s, other.num_steps), plan
        assert sorted(tally._samples) == sorted(other._samples), plan


def test_costs_are_found_in_steps_that_have_them() -> None:
    costs = StepCosts(7.0, 0.5, 0.25, 2.0)
    parts = [(0, 100, 100), (0, 900, 900), (1, 0, 300), (64, 0, 9000), (8, 200, 4000), (3, 0, 100)]
    samples = [Sample(*part, ms=1000 * costs.seconds(*part)) for part in parts]
    found, error = fit(samples)
    assert found == pytest.approx(costs)
    assert error < 1e-6

"""The number of engines that are wanted follows the queue."""

import random

import pytest

from scripts.placement.scaling import Demand, Scaler

GROW_S, SHRINK_S = 5.0, 60.0


def scaler(num_first: int = 2, least: int = 1, most: int = 4) -> Scaler:
    return Scaler(num_first, least, most, 10, grow_after_s=GROW_S, shrink_after_s=SHRINK_S)


def test_requests_that_wait_for_long_bring_an_engine() -> None:
    one = scaler()
    assert one.update(Demand(2, 20, 3), 0.0) == 2
    assert one.update(Demand(2, 20, 3), GROW_S - 0.1) == 2
    assert one.update(Demand(2, 20, 3), GROW_S) == 3
    assert one.update(Demand(2, 20, 3), 10 * GROW_S) == 3, "while it is not there yet"
    assert one.update(Demand(3, 30, 3), 11 * GROW_S) == 4
    assert one.update(Demand(4, 40, 9), 99 * GROW_S) == 4


def test_a_long_queue_brings_several() -> None:
    one = scaler()
    one.update(Demand(2, 20, 25), 0.0)
    assert one.update(Demand(2, 20, 25), GROW_S) == 4


def test_a_queue_that_empties_in_between_restarts_the_wait() -> None:
    one = scaler()
    one.update(Demand(2, 20, 3), 0.0)
    one.update(Demand(2, 20, 0), 3.0)
    assert one.update(Demand(2, 20, 3), 6.0) == 2
    assert one.update(Demand(2, 20, 3), 6.0 + GROW_S) == 3


def test_engines_leave_one_by_one_while_the_others_would_be_half_full_at_most() -> None:
    one = scaler(num_first=4)
    assert one.update(Demand(4, 16, 0), 0.0) == 4
    one.update(Demand(4, 10, 0), 100.0)
    assert one.update(Demand(4, 10, 0), 100.0 + SHRINK_S) == 3
    assert one.update(Demand(3, 10, 0), 101.0 + SHRINK_S) == 3
    assert one.update(Demand(3, 10, 0), 101.0 + 2 * SHRINK_S) == 2
    assert one.update(Demand(2, 5, 0), 200.0 + 3 * SHRINK_S) == 2
    one.update(Demand(2, 0, 0), 1000.0)
    assert one.update(Demand(2, 0, 0), 2000.0) == 1
    one.update(Demand(1, 0, 0), 3000.0)
    assert one.update(Demand(1, 0, 0), 4000.0) == 1


def test_engines_do_not_leave_while_none_serves_or_those_that_do_are_busy() -> None:
    """A model that loads for minutes, or an engine here that is cut off from the others."""
    one = scaler(num_first=4)
    for now in range(0, 20 * int(SHRINK_S), 30):
        assert one.update(Demand(0, 0, 0), float(now)) == 4
    for now in range(20 * int(SHRINK_S), 40 * int(SHRINK_S), 30):
        assert one.update(Demand(2, 6, 0), float(now)) == 4, (
            "one of two would be more than half full"
        )


@pytest.mark.parametrize("seed", range(20))
def test_the_number_stays_within_its_bounds(seed: int) -> None:
    draw = random.Random(seed)
    one, now = scaler(), 0.0
    for _ in range(500):
        now += draw.expovariate(0.2)
        demand = Demand(draw.randint(0, 5), draw.randint(0, 60), draw.choice([0, 0, 5, 500]))
        assert 1 <= one.update(demand, now) <= 4

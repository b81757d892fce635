"""The time limit of a step, learned from the steps before it."""

import pytest

from protocol.config import RecoveryConfig
from worker_proc.step_clock import StepClock

RECOVERY = RecoveryConfig(hang_timeout_s=2.0, hang_step_factor=20.0, first_step_timeout_s=60.0)


def clock_after(*steps: tuple[int, float]) -> StepClock:
    clock = StepClock(RECOVERY)
    for num_tokens, duration_s in steps:
        clock.observe(num_tokens, duration_s)
    return clock


def test_first_step_has_the_time_of_first_steps() -> None:
    assert StepClock(RECOVERY).limit_s(1) == 60.0


def test_quick_steps_have_the_least_time() -> None:
    assert clock_after((1, 0.01)).limit_s(1) == 2.0


def test_slow_steps_have_a_multiple_of_what_they_took() -> None:
    assert clock_after((32, 0.5)).limit_s(32) == pytest.approx(10.0)


def test_one_slow_step_among_many_is_forgotten_at_last() -> None:
    """The 99th percentile of the last 128, and not their maximum."""
    clock = clock_after((1, 5.0), *[(1, 0.001)] * 15)
    assert clock.limit_s(1) == pytest.approx(100.0)
    for _ in range(128):
        clock.observe(1, 0.001)
    assert clock.limit_s(1) == 2.0


def test_larger_steps_than_ever_have_more_time_by_their_tokens() -> None:
    """But not more than a first step has."""
    clock = clock_after((1, 0.2))
    assert clock.limit_s(4) == pytest.approx(16.0)
    assert clock.limit_s(2048) == 60.0


def test_size_between_known_ones_has_the_time_of_the_larger() -> None:
    assert clock_after((1, 0.001), (1024, 1.0)).limit_s(64) == pytest.approx(20.0)


def test_setting_above_all_others_holds() -> None:
    """A least time of an hour holds for first steps too."""
    clock = StepClock(RecoveryConfig(hang_timeout_s=3600.0))
    assert clock.limit_s(1) == 3600.0

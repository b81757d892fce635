"""The time limit of a step, learned from the steps before it."""

import pytest

from protocol.config import RecoveryConfig
from worker_proc.step_timer import StepTimer

RECOVERY = RecoveryConfig(hang_timeout_s=2.0, hang_step_factor=20.0, first_step_timeout_s=60.0)


def timer_after(*steps: tuple[int, float]) -> StepTimer:
    timer = StepTimer(RECOVERY)
    for num_tokens, duration_s in steps:
        timer.observe(num_tokens, duration_s)
    return timer


def test_first_step_has_the_time_of_first_steps() -> None:
    assert StepTimer(RECOVERY).limit_s(1) == 60.0


def test_quick_steps_have_the_least_time() -> None:
    assert timer_after((1, 0.01)).limit_s(1) == 2.0


def test_slow_steps_have_a_multiple_of_what_they_took() -> None:
    assert timer_after((32, 0.5)).limit_s(32) == pytest.approx(10.0)


def test_one_slow_step_among_many_is_forgotten_at_last() -> None:
    """The limit follows the 99th percentile of the last 128, and not their maximum."""
    timer = timer_after((1, 5.0), *[(1, 0.001)] * 15)
    assert timer.limit_s(1) == pytest.approx(100.0)
    for _ in range(128):
        timer.observe(1, 0.001)
    assert timer.limit_s(1) == 2.0


def test_larger_steps_than_ever_have_more_time_by_their_tokens() -> None:
    """They have at most the time of a first step."""
    timer = timer_after((1, 0.2))
    assert timer.limit_s(4) == pytest.approx(16.0)
    assert timer.limit_s(2048) == 60.0


def test_size_between_known_ones_has_the_time_of_the_larger() -> None:
    assert timer_after((1, 0.001), (1024, 1.0)).limit_s(64) == pytest.approx(20.0)


def test_setting_above_all_others_holds() -> None:
    """A least time of an hour is no shorter for first steps."""
    timer = StepTimer(RecoveryConfig(hang_timeout_s=3600.0))
    assert timer.limit_s(1) == 3600.0

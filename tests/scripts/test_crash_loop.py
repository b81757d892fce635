"""When the engine counts as failing, and when it is given up."""

from protocol.lifecycle import DeathCause, Role
from scripts.crash_loop import DEATHS_IN_WINDOW, WINDOW_S, CrashLoop


def die(loop: CrashLoop, times: int, start: float = 0.0, step: float = 1.0) -> float:
    """Returns the time of the last death."""
    for number in range(times):
        loop.death(Role.WORKER, DeathCause.EXCEPTION, start + number * step)
    return start + (times - 1) * step


def test_five_deaths_within_a_minute_degrade_until_all_is_well() -> None:
    loop = CrashLoop(None)
    now = die(loop, DEATHS_IN_WINDOW - 1)
    assert not loop.health(now, is_ready=False, resume_at=None).is_degraded
    now = die(loop, 1, now + 1)
    health = loop.health(now, is_ready=False, resume_at=now + 3)
    assert health.is_degraded
    assert health.retry_after_s == 4.0
    assert not loop.health(now, is_ready=True, resume_at=None).is_degraded
    assert not loop.health(now + WINDOW_S, is_ready=False, resume_at=None).is_degraded


def test_slow_deaths_and_kills_from_outside_do_not_count() -> None:
    slow, killed = CrashLoop(1.0), CrashLoop(1.0)
    now = die(slow, 20, step=WINDOW_S / 3)
    for number in range(20):
        killed.death(Role.WORKER, DeathCause.KILLED, float(number))
        killed.death(Role.API, DeathCause.SIGNAL, float(number))
    for loop in (slow, killed):
        assert not loop.health(now, is_ready=False, resume_at=None).is_degraded
        assert not loop.is_over(now)


def test_it_is_given_up_only_where_that_was_asked_for() -> None:
    patient, bounded = CrashLoop(None), CrashLoop(10.0)
    for loop in (patient, bounded):
        die(loop, 10)
        assert not loop.is_over(9.0)
        die(loop, 2, 10.0)
    assert bounded.is_over(11.0)
    assert not patient.is_over(11.0)


def test_a_quiet_time_begins_the_count_anew() -> None:
    loop = CrashLoop(10.0)
    die(loop, 5)
    now = die(loop, 5, 5.0 + WINDOW_S + 1.0)
    assert not loop.is_over(now)

"""When the engine is reported as failing, and when the supervisor gives up."""

from protocol.lifecycle import DeathCause, Health, ProcessState, Role
from scripts.supervisor.actions import Send
from scripts.supervisor.crash_loop import DEATHS_IN_WINDOW, WINDOW_S, CrashLoop
from scripts.supervisor.process_state import Groups, make_groups


def make(give_up_after_s: float | None = None, num_apis: int = 1) -> tuple[CrashLoop, Groups]:
    """An engine whose core and API serve, and whose worker does not."""
    groups = make_groups({Role.WORKER: 1, Role.CORE: 1, Role.API: num_apis})
    for epoch, group in enumerate(groups, 1):
        (process,) = group.processes
        process.begin(epoch, 0.0, 0.0)
        process.state = ProcessState.READY
    groups[Role.WORKER].processes[0].state = ProcessState.BACKOFF
    return CrashLoop(give_up_after_s, groups), groups


def die(loop: CrashLoop, times: int, start: float = 0.0, step: float = 1.0) -> float:
    """Let the worker die repeatedly; return the time of the last death."""
    for number in range(times):
        loop.death(Role.WORKER, DeathCause.EXCEPTION, start + number * step)
    return start + (times - 1) * step


def test_five_deaths_within_a_minute_degrade_until_all_is_well() -> None:
    """The API gets repeated reports with the time to the next start, and one at the end."""
    loop, groups = make()
    now = die(loop, DEATHS_IN_WINDOW - 1)
    assert loop.report(now) == []
    now = die(loop, 1, now + 1)
    groups[Role.WORKER].resume_at = now + 3
    assert loop.report(now) == [Send(groups[Role.API].processes[0].slot, Health(True, 4.0))]
    assert loop.report(now) == []
    assert loop.report(now + 1, is_repeat=True) == [
        Send(groups[Role.API].processes[0].slot, Health(True, 3.0))
    ]
    groups[Role.WORKER].processes[0].state = ProcessState.READY
    assert loop.report(now) == [Send(groups[Role.API].processes[0].slot, Health(False))]
    assert loop.report(now) == loop.report(now, is_repeat=True) == []


def test_every_api_process_gets_the_reports() -> None:
    """Each gets the end, too; one that died meanwhile needs none."""
    loop, groups = make(num_apis=2)
    one, other = (group.processes[0] for group in groups.of(Role.API))
    now = die(loop, DEATHS_IN_WINDOW)
    assert loop.report(now) == [Send(process.slot, Health(True, 1.0)) for process in (one, other)]
    other.on_death(is_final=False)
    other.begin(9, now, 0.0)
    assert loop.report(now) == [Send(other.slot, Health(True, 1.0))]
    one.on_death(is_final=False)
    groups[Role.WORKER].processes[0].state = ProcessState.READY
    assert loop.report(now) == [Send(other.slot, Health(False))]


def serve_and_die(loop: CrashLoop, groups: Groups, times: int, served_s: float) -> float:
    """Let the worker load for a minute, serve and die; return the time of the last death."""
    now = 0.0
    for _ in range(times):
        for group in groups:
            group.processes[0].ready_at = now + 60.0
        now += 60.0 + served_s
        loop.death(Role.WORKER, DeathCause.EXCEPTION, now)
    return now


def test_time_in_which_nothing_was_served_does_not_count() -> None:
    """Deaths right after a minute of loading are a loop; deaths after some service are not."""
    for served_s, is_loop in ((0.0, True), (1.0, True), (20.0, False)):
        loop, groups = make(1.0)
        now = serve_and_die(loop, groups, 20, served_s)
        assert loop.health(now).is_degraded == is_loop
        assert loop.is_over(now) == is_loop
    never, _ = make()
    now = die(never, DEATHS_IN_WINDOW, step=600.0)
    assert never.health(now).is_degraded, "its loads fail"


def test_slow_deaths_and_kills_from_outside_do_not_count() -> None:
    (slow, groups), (killed, _) = make(1.0), make(1.0)
    now = serve_and_die(slow, groups, 20, WINDOW_S / 3)
    for number in range(20):
        killed.death(Role.WORKER, DeathCause.KILLED, float(number))
        killed.death(Role.API, DeathCause.SIGNAL, float(number))
    for loop in (slow, killed):
        assert not loop.health(now).is_degraded
        assert not loop.is_over(now)


def test_it_is_given_up_only_where_that_was_asked_for() -> None:
    (patient, _), (bounded, _) = make(), make(10.0)
    for loop in (patient, bounded):
        die(loop, 10)
        assert not loop.is_over(9.0)
        die(loop, 2, 10.0)
    assert bounded.is_over(11.0)
    assert not patient.is_over(11.0)


def test_a_quiet_time_restarts_the_count() -> None:
    loop, groups = make(10.0)
    die(loop, 5)
    for group in groups:
        group.processes[0].ready_at = 5.0
    now = die(loop, 5, 5.0 + WINDOW_S + 1.0, step=0.1)
    assert not loop.is_over(now)


def test_time_served_before_a_planned_restart_counts() -> None:
    """One death a day is not a loop, even if the worker is restarted each night."""
    loop, groups = make(give_up_after_s=600.0)
    groups[Role.WORKER].processes[0].state = ProcessState.READY
    now = 0.0
    for _ in range(2 * DEATHS_IN_WINDOW):
        serve(groups, now)
        now += 86_400.0
        loop.death(Role.WORKER, None, now)
        serve(groups, now)
        now += 10.0
        loop.death(Role.WORKER, DeathCause.SIGNAL, now)
        assert not loop.is_over(now)


def serve(groups: Groups, since: float) -> None:
    for group in groups:
        group.processes[0].ready_at = since

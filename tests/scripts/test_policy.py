"""The supervisor's policy in virtual time: starts, deaths, backoff and deadlines."""

import signal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.lifecycle import (
    REPEAT_S,
    DeathCause,
    Drain,
    Drained,
    Fatal,
    ProcessState,
    Progress,
    Ready,
    Role,
    Stop,
    WorkerDied,
)
from scripts.supervisor.actions import Announce, Exit, Kill, Origin, Send, Show, Slot, Start
from scripts.supervisor.deaths import Evidence
from scripts.supervisor.policy import CRASH_LOOP_DEATHS
from tests.scripts.drill import API, CORE, WORKER, Drill, starts


def test_everything_starts_at_once_worker_first() -> None:
    """The slowest starts first, and no process waits for another."""
    assert list(Drill().living) == [WORKER, CORE, API]


def test_announced_once_when_the_last_process_is_ready() -> None:
    """It comes neither earlier nor again after a recovery."""
    drill = Drill()
    assert drill.receive(CORE, Ready()) == [Show(CORE, Ready())]
    drill.receive(API, Ready())
    assert drill.receive(WORKER, Ready("cpu")) == [Show(WORKER, Ready("cpu")), Announce()]
    assert drill.policy.is_ready
    drill.die(WORKER)
    assert not drill.policy.is_ready
    assert drill.receive(WORKER, Ready()) == [Show(WORKER, Ready())]
    assert drill.policy.is_ready


@pytest.mark.parametrize("slot", [API, CORE, WORKER])
def test_first_death_is_answered_at_once_and_touches_no_other_process(slot: Slot) -> None:
    """One process is replaced under a greater epoch."""
    drill = Drill().all_ready()
    others = {k: v for k, v in drill.living.items() if k != slot}
    assert drill.die(slot) == [Start(slot, 4)]
    assert {k: v for k, v in drill.living.items() if k != slot} == others


def pause_before_restart(drill: Drill, slot: Slot, evidence: Evidence | None = None) -> float:
    """Kill a process; returns the seconds until its successor starts, and makes that ready."""
    drill.die(slot, evidence=evidence)
    died_at = drill.now
    while slot not in drill.living:
        assert drill.state(slot) is ProcessState.BACKOFF
        drill.wait(drill.policy.next_deadline() - drill.now)
    pause = drill.now - died_at
    drill.receive(slot, Ready())
    return pause


def test_pauses_double_up_to_the_limit_while_successors_do_no_useful_work() -> None:
    """They are 0, then 0.1 s and so on, with jitter between half and whole."""
    drill = Drill().all_ready()
    pauses = [pause_before_restart(drill, CORE) for _ in range(8)]
    assert pauses[0] == 0.0
    for pause, whole in zip(pauses[1:], [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0], strict=True):
        assert whole / 2 - 1e-6 <= pause <= whole + 1e-6
    assert pause_before_restart(drill, CORE, Evidence(has_completed_step=True)) == 0.0


@pytest.mark.parametrize("slot", [CORE, WORKER])
@pytest.mark.parametrize("status", [-signal.SIGKILL, -signal.SIGSEGV, 1])
def test_a_process_that_has_completed_a_step_is_restarted_at_once(slot: Slot, status: int) -> None:
    """It may die often and soon, and of any cause."""
    drill = Drill().all_ready()
    for _ in range(100):
        drill.wait(0.3)
        actions = drill.die(slot, status, Evidence(7, has_completed_step=True))
        assert starts(actions) == [(slot, Origin.STARTED)]
        drill.receive(slot, Ready())


def test_without_work_to_do_service_as_long_as_the_start_took_is_useful() -> None:
    """It takes at least a second. One killed while idle every few seconds never backs off."""
    drill = Drill().all_ready()
    for _ in range(20):
        drill.wait(1.0)
        assert drill.die(CORE) == [Start(CORE, drill.last_epoch)]
        drill.receive(CORE, Ready())
    drill.die(WORKER)
    for start_s, service_s, is_useful in [(3.0, 2.0, False), (3.0, 3.1, True), (0.2, 0.9, False)]:
        drill.wait(start_s)
        drill.receive(WORKER, Ready())
        drill.wait(service_s)
        assert bool(drill.die(WORKER)) == is_useful
        while WORKER not in drill.living:
            drill.wait(drill.policy.next_deadline() - drill.now)


@pytest.mark.parametrize("is_overdue", [False, True])
def test_a_step_that_never_ends_is_not_useful_work(is_overdue: bool) -> None:
    """The time that a process hangs before it is killed is not either."""
    drill = Drill().all_ready()
    for _ in range(3):
        drill.wait(9.0)
        if is_overdue:
            drill.take(drill.policy.processes[0].kill(is_overdue=True))
        actions = drill.die(WORKER, evidence=Evidence(None if is_overdue else 4))
        drill.wait(2.0)
        drill.receive(WORKER, Ready())
    assert actions == []


def test_a_process_that_dies_before_ready_has_done_no_useful_work() -> None:
    """A process that needs minutes to fail still backs off."""
    drill = Drill().all_ready()
    drill.die(CORE)
    for number in range(10):
        drill.wait(9.0)
        drill.receive(CORE, Progress("loading", number))
    assert drill.die(CORE) == []


def test_ranks_of_a_group_are_replaced_together() -> None:
    """The death of one rank kills the others; successors start after the last death."""
    drill = Drill(num_workers=3).all_ready()
    ranks = [Slot(Role.WORKER, rank) for rank in range(3)]
    assert drill.die(ranks[1]) == [Kill(rank, spares_zygote=True) for rank in (ranks[0], ranks[2])]
    assert drill.wait(5.0) == []
    assert drill.die(ranks[0]) == []
    assert drill.die(ranks[2]) == [Start(rank, 6 + rank.rank) for rank in ranks]
    assert drill.die(ranks[0]) == [Kill(rank, spares_zygote=True) for rank in ranks[1:]]


def test_start_without_progress_is_killed_and_progress_extends_it() -> None:
    """The deadline moves with every message of the start and ends with Ready."""
    drill = Drill()
    drill.receive(CORE, Ready())
    drill.receive(API, Ready())
    for number in range(3):
        assert drill.wait(9.0) == []
        drill.receive(WORKER, Progress("weights", number, 9))
    assert drill.wait(5.0) == []
    drill.receive(WORKER, Progress("weights", 2, 9))
    assert drill.wait(4.9) == [], "a repeated report is not progress"
    assert drill.wait(0.2) == [Kill(WORKER)]
    assert drill.wait(100.0) == [], "killed once"
    assert drill.die(WORKER) == [Start(WORKER, 4)]
    drill.receive(WORKER, Ready())
    assert drill.wait(100.0) == []


def test_time_in_which_the_supervisor_stood_still_counts_against_no_process() -> None:
    """It was stopped, or the machine was: a starting process keeps its remaining time."""
    drill = Drill()
    drill.receive(CORE, Ready())
    drill.receive(API, Ready())
    assert drill.wait(8.0) == []
    drill.now += 60.0
    drill.policy.on_turn(drill.now)
    assert drill.take(drill.policy.tick(drill.now)) == []
    assert drill.wait(0.9) == [], "a second of the two that were left"
    assert drill.wait(1.1) == [Kill(WORKER)]


def test_a_supervisor_that_is_slow_all_the_time_still_has_deadlines() -> None:
    drill = Drill()
    drill.receive(CORE, Ready())
    drill.receive(API, Ready())
    for _ in range(20):
        drill.now += 5.0
        drill.policy.on_turn(drill.now)
        if Kill(WORKER) in drill.take(drill.policy.tick(drill.now)):
            return
    raise AssertionError("no start was found to be late")


def test_messages_that_may_be_lost_are_repeated() -> None:
    """A message may be lost with its connection: a process that is to end is asked until it has."""
    drill = Drill().all_ready()
    core, worker = drill.living[CORE], drill.living[WORKER]
    drill.die(WORKER, -signal.SIGSEGV, Evidence(9))
    death = (core, WorkerDied(0, worker, DeathCause.SIGNAL, 9, True))
    drill.wait(20.0)
    assert 1 < drill.sent.count(death) < 5, "for some seconds"
    api = drill.living[API]
    drill.signal()
    drill.wait(3 * REPEAT_S)
    assert drill.sent.count((api, Drain())) >= 3
    drill.receive(API, Drained())
    drill.receive(API, Drained())
    drill.wait(3 * REPEAT_S)
    assert drill.sent.count((core, Drain())) >= 3
    drill.receive(CORE, Drained())
    drill.wait(2.0)
    assert drill.sent.count((api, Stop())) >= 2


def test_words_of_the_dead_change_nothing() -> None:
    """A message with the epoch of a former incarnation is ignored."""
    drill = Drill().all_ready()
    old = drill.living[CORE]
    drill.die(CORE)
    assert drill.take(drill.policy.on_message(old, Ready(), drill.now)) == []
    assert drill.state(CORE) is ProcessState.STARTING
    old = drill.living[CORE]
    drill.die(CORE)
    assert drill.take(drill.policy.on_message(old, Progress("late"), drill.now)) == []
    assert drill.state(CORE) is ProcessState.BACKOFF


def test_ready_of_a_doomed_process_does_not_count() -> None:
    """A process that was sent SIGKILL does not serve, whatever it reports."""
    drill = Drill()
    drill.wait(10.0)
    assert drill.doomed == {WORKER, CORE, API}
    assert drill.receive(CORE, Ready()) == []
    assert not drill.policy.is_ready


def test_fatal_without_retry_ends_the_first_start_with_error_and_hint() -> None:
    """Everything stops with status 1; a process that is still starting is killed."""
    drill = Drill()
    drill.receive(CORE, Ready())
    drill.receive(WORKER, Fatal("loading", "no such layer", "use another model", retry=False))
    assert drill.die(WORKER, 1) == [Kill(API)]
    assert drill.die(API) == [Send(CORE, Stop())]
    assert drill.die(CORE, 0) == [Exit(1)]
    assert drill.policy.failure == (
        "worker failed (loading): no such layer\nhint: use another model"
    )


def test_fatal_without_retry_after_the_first_start_is_retried() -> None:
    """Open requests must be finished, so later failures back off but never end the engine."""
    drill = Drill().all_ready()
    for _ in range(20):
        drill.receive(WORKER, Fatal("loading", "no memory", retry=False))
        drill.die(WORKER, 1)
        drill.wait(2.0)
    assert drill.exit_status is None
    assert drill.policy.failure is None


def test_first_start_that_keeps_failing_is_given_up_but_not_for_kills_from_outside() -> None:
    """Five failures of its own end the engine; SIGKILL and SIGTERM do not count."""
    drill = Drill()
    for _ in range(CRASH_LOOP_DEATHS + 3):
        drill.die(WORKER)
        drill.wait(2.0)
    for _ in range(CRASH_LOOP_DEATHS - 1):
        drill.die(WORKER, 1)
        drill.wait(2.0)
    assert drill.exit_status is None
    drill.die(WORKER, -signal.SIGSEGV)
    assert drill.policy.failure == "worker died of SIGSEGV"


EVENTS = st.sampled_from(
    ["ready", "progress", "fatal", "drained", "die", "crash", "wait", "signal"]
)


@settings(max_examples=300)
@given(st.lists(st.tuples(EVENTS, st.integers(0, 9)), max_size=80), st.integers(1, 3))
def test_any_history_keeps_the_invariants_and_can_be_ended(
    events: list[tuple[str, int]], num_workers: int
) -> None:
    """A slot has one process, epochs grow, no dying group starts any; two signals end all."""
    drill = Drill(num_workers)
    for event, choice in events:
        if drill.exit_status is None:
            play(drill, event, choice)
            check_groups(drill)
    for _ in range(2):
        if drill.exit_status is None:
            drill.signal()
    for slot in list(drill.living):
        assert drill.exit_status is not None or slot in drill.doomed
        if drill.exit_status is None:
            drill.die(slot)
    assert drill.exit_status is not None


def play(drill: Drill, event: str, choice: int) -> None:
    """Draw one event for one living process, or for all."""
    slots = sorted(drill.living)
    slot = slots[choice % len(slots)] if slots else None
    match event:
        case "wait":
            drill.wait(choice * 1.7)
        case "signal" if choice == 0:
            drill.signal()
        case "ready" if slot:
            drill.receive(slot, Ready())
        case "progress" if slot:
            drill.receive(slot, Progress("weights", choice, 9))
        case "fatal" if slot:
            drill.receive(slot, Fatal("loading", "broken", retry=choice > 3))
        case "drained" if slot:
            drill.receive(slot, Drained())
        case "die" | "crash" if slot:
            drill.die(slot, -signal.SIGKILL if event == "die" else 1)


def check_groups(drill: Drill) -> None:
    """A slot is alive exactly if its state is a living one, and a dying group starts no process."""
    for process in drill.policy.processes:
        assert process.is_alive == (process.slot in drill.living)
        dead_states = (ProcessState.BACKOFF, ProcessState.STOPPED)
        assert process.is_alive == (process.state not in dead_states)
    workers = [slot for slot in drill.living if slot.role is Role.WORKER]
    num_ranks = sum(p.slot.role is Role.WORKER for p in drill.policy.processes)
    if drill.exit_status is None and drill.policy.state is not ProcessState.DRAINING:
        assert len(workers) == num_ranks or set(workers) <= drill.doomed

"""Detection of hanging processes, and reports of deaths, in virtual time."""

import logging
import signal

import pytest

from protocol.lifecycle import DeathCause, Fatal, ProcessState, Ready, Role, Suspect, WorkerDied
from protocol.process.progress_page import Phase, ProgressRecord
from scripts.supervisor.actions import (
    Action,
    DumpStacks,
    Kill,
    Note,
    RecordDeath,
    Send,
    Slot,
    Start,
    api_slot,
)
from scripts.supervisor.deaths import Evidence
from tests.scripts.drill import API, CORE, WORKER, Drill

LIMIT_S = 2.0


def mark(
    drill: Drill, slot: Slot, began: float, step_id: int | None = 7
) -> dict[Slot, ProgressRecord]:
    """A mark of a step that began at this time."""
    began_ns = int(began * 1e9)
    phase = Phase.IDLE if step_id is None else Phase.STEP
    deadline_ns = began_ns + int(LIMIT_S * 1e9)
    return {slot: ProgressRecord(drill.living[slot], phase, step_id, began_ns, deadline_ns)}


def look(drill: Drill, marks: dict[Slot, ProgressRecord], now: float) -> list[Action]:
    """Advance the clock, and check the marks at each deadline."""
    actions: list[Action] = []
    while True:
        due = drill.policy.next_look
        drill.now = drill.now if due is None else min(now, max(due, drill.now))
        actions += drill.take(drill.policy.look(marks, drill.now))
        if drill.now >= now and due is not None:
            return actions


def test_hanging_worker_is_suspected_then_killed_and_the_core_is_notified() -> None:
    """It prints its stacks at its deadline, and gets SIGKILL with the cause at twice that time."""
    drill = Drill().all_ready()
    epoch, began = drill.living[WORKER], drill.now
    marks = mark(drill, WORKER, began)
    assert look(drill, marks, began + 1.99) == []
    suspicion = Send(CORE, Suspect(Role.WORKER, 0, epoch, 1.5 * LIMIT_S + 1.0))
    assert look(drill, marks, began + 2.01) == [DumpStacks(WORKER), suspicion]
    assert look(drill, marks, began + 3.99) == []
    assert look(drill, marks, began + 4.01) == [Kill(WORKER)]
    assert look(drill, marks, began + 60.0) == [], "killed once"
    assert drill.die(WORKER, evidence=Evidence(7)) == [Start(WORKER, 4)]
    assert drill.reported_deaths == [WorkerDied(0, epoch, DeathCause.DEADLINE, 7, True)]
    assert drill.words == [RecordDeath(WORKER, epoch, DeathCause.DEADLINE, 7)]


def test_worker_that_continues_gets_work_again() -> None:
    drill = Drill().all_ready()
    epoch, began = drill.living[WORKER], drill.now
    look(drill, mark(drill, WORKER, began), began + 3.0)
    cleared = Send(CORE, Suspect(Role.WORKER, 0, epoch, 0.0))
    assert look(drill, mark(drill, WORKER, began + 3.0), began + 3.1) == [cleared]
    assert look(drill, mark(drill, WORKER, began + 3.0), began + 4.9) == []
    assert WORKER not in drill.doomed


def test_hanging_core_is_killed_and_its_successor_gets_the_cause() -> None:
    """No other process needs a report."""
    drill = Drill().all_ready()
    epoch, began = drill.living[CORE], drill.now
    marks = mark(drill, CORE, began, step_id=None)
    assert look(drill, marks, began + 5.0) == [DumpStacks(CORE), Kill(CORE)]
    assert drill.die(CORE) == [Start(CORE, 4)]
    assert drill.words == [RecordDeath(CORE, epoch, DeathCause.DEADLINE, None)]


def test_hanging_api_is_killed_even_while_it_leaves() -> None:
    """No report is sent: it computes nothing."""
    drill = Drill().all_ready()
    marks = mark(drill, API, drill.now, step_id=None)
    assert look(drill, marks, drill.now + 5.0) == [DumpStacks(API), Kill(API)]
    drill = Drill().all_ready()
    drill.take(drill.policy.on_restart(Role.API, drill.now)[1])
    leaving = api_slot(0, 1, is_spare=True)
    drill.receive(leaving, Ready())
    marks = mark(drill, leaving, drill.now, step_id=None)
    assert look(drill, marks, drill.now + 5.0) == [DumpStacks(leaving), Kill(leaving)]


def test_marks_of_the_dead_are_ignored() -> None:
    """A successor writes the same page; until then its predecessor's mark stays there."""
    drill = Drill().all_ready()
    marks = mark(drill, WORKER, drill.now)
    drill.die(WORKER)
    assert look(drill, marks, drill.now + 60.0) == []


def test_deaths_of_workers_are_kept_for_a_core_that_is_not_there() -> None:
    """Both die: for five seconds a successor that gets ready receives the worker's death."""
    drill = Drill().all_ready()
    epoch = drill.living[WORKER]
    drill.die(CORE)
    drill.die(WORKER, -signal.SIGSEGV, Evidence(9))
    assert drill.reported_deaths == []
    drill.receive(CORE, Ready())
    deaths = [WorkerDied(0, epoch, DeathCause.SIGNAL, 9, True)]
    assert drill.reported_deaths == deaths
    drill.receive(WORKER, Ready())
    drill.die(CORE)
    drill.wait(6.0)
    drill.receive(CORE, Ready())
    assert drill.reported_deaths == deaths


def test_of_a_group_only_the_first_death_is_reported() -> None:
    """The supervisor killed the others itself."""
    drill = Drill(num_workers=3).all_ready()
    ranks = [Slot(Role.WORKER, rank) for rank in range(3)]
    epoch = drill.living[ranks[1]]
    for rank in (1, 0, 2):
        drill.die(ranks[rank], -signal.SIGABRT if rank == 1 else -signal.SIGKILL)
    assert drill.reported_deaths == [WorkerDied(1, epoch, DeathCause.SIGNAL, None, True)]


def test_start_without_progress_counts_as_hanging() -> None:
    drill = Drill()
    drill.wait(10.0)
    drill.die(WORKER)
    assert [word.cause for word in drill.words] == [DeathCause.DEADLINE]


@pytest.mark.parametrize(
    ("status", "fatal", "evidence", "cause"),
    [
        (-signal.SIGKILL, False, Evidence(), DeathCause.KILLED),
        (-signal.SIGTERM, False, Evidence(), DeathCause.KILLED),
        (-signal.SIGKILL, False, Evidence(is_oom=True), DeathCause.OOM),
        (-signal.SIGBUS, False, Evidence(is_oom=True), DeathCause.SIGNAL),
        (-signal.SIGILL, False, Evidence(), DeathCause.SIGNAL),
        (1, True, Evidence(), DeathCause.EXCEPTION),
        (1, False, Evidence(), DeathCause.EXCEPTION),
        (0, False, Evidence(), DeathCause.ENDED),
        (75, False, Evidence(), DeathCause.ENDED),
    ],
)
def test_every_death_has_a_cause(
    status: int, fatal: bool, evidence: Evidence, cause: DeathCause
) -> None:
    drill = Drill().all_ready()
    if fatal:
        drill.receive(WORKER, Fatal("computing", "RuntimeError: no memory"))
    drill.die(WORKER, status, evidence)
    assert [death.cause for death in drill.reported_deaths] == [cause]


def test_the_log_has_step_and_reason() -> None:
    drill = Drill().all_ready()
    actions = drill.policy.on_death(WORKER, -signal.SIGSEGV, drill.now, Evidence(12))
    assert Note(logging.WARNING, "worker died of SIGSEGV in step 12") in actions


def test_no_death_is_reported_at_the_end() -> None:
    """The death of a process that was asked to stop needs no cause."""
    drill = Drill().all_ready()
    drill.signal()
    drill.signal()
    for slot in (API, CORE, WORKER):
        drill.die(slot, 0)
    assert (drill.words, drill.reported_deaths) == ([], [])
    assert drill.state(WORKER) is ProcessState.STOPPED

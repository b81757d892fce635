"""Standby, zygote and planned restarts in virtual time: who follows whom, and when."""

import signal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.lifecycle import (
    DeathCause,
    Drain,
    Drained,
    Fatal,
    Hello,
    ProcessState,
    Progress,
    Ready,
    Role,
    Stop,
)
from scripts.supervisor.planned_restarts import LEAVE_GRACE_S
from scripts.supervisor.succession import HANDOVER_TIMEOUT_S, PATIENCE_S, STANDBY_DELAY_S
from scripts.supervisor.supervised import (
    Action,
    Announce,
    Exit,
    Kill,
    Origin,
    Show,
    Slot,
    Start,
    Swap,
    Tell,
)
from tests.scripts.drill import API, CORE, RECOVERY, STANDBY, WORKER, ZYGOTE, Drill

NEXT_API = Slot(Role.API, 1)


def starts(actions: list[Action]) -> list[tuple[Slot, Origin]]:
    """Who is started, and how."""
    return [(a.slot, a.origin) for a in actions if isinstance(a, Start)]


def standing() -> Drill:
    """Everybody is ready."""
    drill = Drill(standby=True).all_ready()
    drill.wait(0.0)
    drill.say(WORKER, Ready())
    drill.wait(STANDBY_DELAY_S)
    drill.say(STANDBY, Ready())
    return drill


def test_first_worker_waits_for_the_zygote_and_the_standby_for_the_worker() -> None:
    """What is loaded once serves both; the engine is announced without the standby."""
    drill = Drill(standby=True)
    assert set(drill.living) == {ZYGOTE, CORE, API}
    assert drill.state(WORKER) is ProcessState.STARTING
    drill.say(CORE, Ready())
    drill.say(API, Ready())
    drill.say(ZYGOTE, Ready())
    assert starts(drill.wait(0.0)) == [(WORKER, Origin.FORKED)]
    assert Announce() in drill.say(WORKER, Ready())
    assert drill.supervision.is_ready
    assert drill.wait(STANDBY_DELAY_S * 0.9) == []
    assert starts(drill.wait(STANDBY_DELAY_S)) == [(STANDBY, Origin.FORKED)]


def test_standby_takes_over_at_once_and_is_followed_by_another() -> None:
    """The death of the worker is answered in the same call; the next fork waits a little."""
    drill = standing()
    assert starts(drill.die(WORKER)) == [(WORKER, Origin.PROMOTED)]
    assert drill.wait(STANDBY_DELAY_S) == [], "not before the worker serves"
    drill.say(WORKER, Ready())
    assert starts(drill.wait(STANDBY_DELAY_S)) == [(STANDBY, Origin.FORKED)]


def test_without_a_standby_the_zygote_forks_and_without_both_the_worker_loads() -> None:
    """In this order; who is nearly ready is waited for, but not for long."""
    drill = standing()
    drill.die(ZYGOTE)
    drill.die(STANDBY)
    drill.wait(0.0)
    assert drill.living.keys() == {ZYGOTE, WORKER, CORE, API}
    drill.die(WORKER)
    assert drill.wait(1.0) == [], "the zygote loads already"
    drill.die(ZYGOTE)
    assert starts(drill.wait(0.0)) == [(WORKER, Origin.STARTED)]
    assert ZYGOTE not in drill.living, "not while the worker loads"
    drill.say(WORKER, Ready())
    assert starts(drill.wait(2.0)) == [(ZYGOTE, Origin.STARTED)]


def test_standby_that_does_not_get_ready_is_not_waited_for() -> None:
    """Another is forked after two seconds."""
    drill = standing()
    drill.die(STANDBY)
    drill.wait(STANDBY_DELAY_S)
    drill.say(STANDBY, Hello(Role.WORKER, 0, 1))
    assert starts(drill.die(WORKER)) == []
    assert starts(drill.wait(PATIENCE_S * 0.9)) == []
    assert starts(drill.wait(PATIENCE_S)) == [(WORKER, Origin.FORKED)]


def test_who_was_asked_to_take_over_and_does_not_is_killed() -> None:
    """So is a worker that was to be forked and does not come."""
    drill = standing()
    drill.die(WORKER)
    assert Kill(WORKER) in drill.wait(HANDOVER_TIMEOUT_S)
    assert starts(drill.die(WORKER)) + starts(drill.wait(0.1)) == [(WORKER, Origin.FORKED)]
    assert Kill(WORKER) in drill.wait(HANDOVER_TIMEOUT_S)


def test_death_of_a_helper_touches_nobody_else() -> None:
    """The engine stays ready."""
    for helper in (ZYGOTE, STANDBY):
        drill = standing()
        others = {k: v for k, v in drill.living.items() if k != helper}
        drill.die(helper)
        drill.wait(STANDBY_DELAY_S)
        assert {k: v for k, v in drill.living.items() if k != helper} == others
        assert helper in drill.living
        assert drill.supervision.is_ready


def test_model_that_cannot_be_loaded_ends_the_first_start() -> None:
    """The zygote says so, as a worker would."""
    drill = Drill(standby=True)
    drill.say(ZYGOTE, Fatal("loading the model", "CheckpointError: no", retry=False))
    drill.die(ZYGOTE, 1)
    assert drill.supervision.failure == "zygote failed (loading the model): CheckpointError: no"


def test_standby_that_finds_no_memory_ends_nothing() -> None:
    """Even before the engine was ready for the first time."""
    drill = Drill(standby=True)
    drill.say(ZYGOTE, Ready())
    drill.wait(0.0)
    drill.say(WORKER, Ready())
    drill.wait(STANDBY_DELAY_S)
    drill.say(STANDBY, Fatal("loading the model", "InsufficientMemory: no", retry=False))
    drill.die(STANDBY, 1)
    assert drill.supervision.failure is None


def test_end_kills_helpers_and_tells_the_others() -> None:
    """Nothing is lost with them."""
    drill = standing()
    drill.signal()
    drill.signal()
    for slot in list(drill.living):
        drill.die(slot)
    assert drill.exit_status == 1
    drill = Drill(standby=True, recovery=RECOVERY).all_ready()
    drill.wait(0.0)
    drill.signal()
    while drill.living:
        drill.die(next(iter(drill.living)))
    assert drill.exit_status is not None


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_whatever_dies_a_worker_comes_back(data: st.DataObject) -> None:
    """Random deaths and words in random order; then, left in peace, everything is there again."""
    drill = standing()
    for _ in range(data.draw(st.integers(1, 30))):
        slots = sorted(drill.living)
        slot = data.draw(st.sampled_from(slots)) if slots else None
        match data.draw(st.sampled_from(["die", "die", "ready", "progress", "wait"])):
            case "die" if slot is not None:
                drill.die(slot)
            case "ready" if slot is not None:
                drill.say(slot, Ready())
            case "progress" if slot is not None:
                drill.say(slot, Progress("load", data.draw(st.integers(0, 9)), 10))
            case _:
                drill.wait(data.draw(st.sampled_from([0.0, 0.1, 1.0, 6.0])))
        for doomed in list(drill.doomed):
            drill.die(doomed)
    for _ in range(40):
        for slot in list(drill.living):
            drill.say(slot, Ready()) if slot not in drill.doomed else drill.die(slot)
        drill.wait(1.0)
    assert drill.living.keys() == {ZYGOTE, STANDBY, WORKER, CORE, API}
    assert drill.supervision.is_ready


# Planned restarts -------------------------------------------------------------------------------


def ask(drill: Drill, role: Role) -> list[Action]:
    """Ask for a restart that is possible."""
    refusal, actions = drill.supervision.on_restart(role, drill.now)
    assert refusal is None
    return drill.take(actions)


def refusal_of(drill: Drill, role: Role) -> str | None:
    refusal, actions = drill.supervision.on_restart(role, drill.now)
    assert refusal is None or actions == []
    return refusal


@pytest.mark.parametrize("slot", [CORE, WORKER])
def test_who_is_asked_to_leave_is_followed_at_once(slot: Slot) -> None:
    """However often: its death is no failure. One that stays is killed."""
    drill = Drill().all_ready()
    for _ in range(5):
        assert ask(drill, slot.role) == [Tell(slot, Stop())]
        assert refusal_of(drill, slot.role) == f"the {slot} is being replaced already"
        assert starts(drill.die(slot, 0)) == [(slot, Origin.STARTED)]
        assert drill.words[-1].cause is DeathCause.ENDED, "nothing that was computed is blamed"
        drill.say(slot, Ready())
    ask(drill, slot.role)
    assert drill.wait(LEAVE_GRACE_S) == [Kill(slot)]
    assert starts(drill.die(slot)) == [(slot, Origin.STARTED)]


def test_worker_leaves_when_its_standby_is_ready() -> None:
    """Not before; and stays if none gets ready."""
    drill = standing()
    drill.die(STANDBY)
    assert ask(drill, Role.WORKER) == []
    assert refusal_of(drill, Role.WORKER) is not None
    drill.wait(STANDBY_DELAY_S)
    drill.say(STANDBY, Ready())
    assert Tell(WORKER, Stop()) in drill.wait(0.0) + drill.take(drill.supervision.tick(drill.now))
    assert starts(drill.die(WORKER, 0)) == [(WORKER, Origin.PROMOTED)]
    drill.say(WORKER, Ready())
    for _ in range(3):
        drill.wait(1.0)
        if STANDBY in drill.living:
            drill.die(STANDBY)
    assert ask(drill, Role.WORKER) == []
    worker = drill.living[WORKER]
    for _ in range(30):
        if STANDBY in drill.living:
            drill.die(STANDBY)
        drill.wait(1.0)
    assert drill.living[WORKER] == worker
    assert refusal_of(drill, Role.WORKER) is None


def test_api_serves_until_its_successor_does_and_finishes_what_it_has() -> None:
    """They change places; the old one is told that it is replaced, and ends by itself."""
    drill = Drill().all_ready()
    old = drill.living[API]
    assert starts(ask(drill, Role.API)) == [(NEXT_API, Origin.STARTED)]
    assert drill.supervision.is_ready
    actions = drill.say(NEXT_API, Ready())
    assert actions == [
        Show(NEXT_API, Ready()),
        Swap(API, NEXT_API),
        Tell(NEXT_API, Drain(is_replaced=True)),
    ]
    assert drill.living[NEXT_API] == old
    assert drill.supervision.is_ready
    assert refusal_of(drill, Role.API) == "the api before this one still finishes its requests"
    assert drill.die(NEXT_API, 0) == []
    assert starts(ask(drill, Role.API)) == [(NEXT_API, Origin.STARTED)]


def test_old_api_stays_if_its_successor_dies() -> None:
    """Nobody notices."""
    drill = Drill().all_ready()
    ask(drill, Role.API)
    assert drill.die(NEXT_API, 1) == []
    assert drill.supervision.is_ready
    assert drill.state(API) is ProcessState.READY


def test_old_api_that_takes_too_long_is_killed() -> None:
    """After the time for a shutdown."""
    drill = Drill().all_ready()
    ask(drill, Role.API)
    drill.say(NEXT_API, Ready())
    assert drill.wait(RECOVERY.shutdown_timeout_s + LEAVE_GRACE_S) == [Kill(NEXT_API)]


def test_api_that_must_be_alone_ends_first() -> None:
    """New connections wait meanwhile."""
    drill = Drill(is_api_alone=True).all_ready()
    assert ask(drill, Role.API) == [Tell(API, Drain(is_replaced=True))]
    assert starts(drill.die(API, 0)) == [(API, Origin.STARTED)]


def test_end_waits_for_an_api_that_leaves() -> None:
    """Its streams are finished like those of its successor."""
    drill = Drill().all_ready()
    ask(drill, Role.API)
    drill.say(NEXT_API, Ready())
    assert drill.signal() == [Tell(API, Drain())]
    assert drill.say(API, Drained()) == []
    assert drill.die(NEXT_API, 0) == [Tell(CORE, Drain())]


def test_nothing_is_replaced_while_the_engine_ends_or_starts() -> None:
    drill = Drill()
    assert refusal_of(drill, Role.CORE) == "the core is being replaced already"
    assert refusal_of(drill, Role.ZYGOTE) == "no zygote that could be restarted"
    drill.all_ready()
    drill.signal()
    assert refusal_of(drill, Role.CORE) == "the engine is stopping"


def test_promoted_worker_that_is_planned_counts_no_death() -> None:
    """A kill after ten planned restarts is the first death in a row."""
    drill = standing()
    for _ in range(10):
        ask(drill, Role.WORKER)
        drill.die(WORKER, 0)
        drill.say(WORKER, Ready())
        drill.wait(STANDBY_DELAY_S)
        drill.say(STANDBY, Ready())
    assert starts(drill.die(WORKER, -signal.SIGKILL)) == [(WORKER, Origin.PROMOTED)]
    assert Exit(0) not in drill.wait(1.0)

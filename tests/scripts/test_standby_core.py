"""The core's standby in virtual time: its start, its promotion and its death."""

from protocol.lifecycle import Drained, Ready, Role, Stop
from scripts.supervisor.actions import Announce, Exit, Kill, Origin, Send, Show
from scripts.supervisor.failover import HANDOVER_TIMEOUT_S, PATIENCE_S, STANDBY_DELAY_S
from scripts.supervisor.planned_restarts import CORE_PATIENCE_S
from tests.scripts.drill import (
    API,
    CORE,
    STANDBY_CORE,
    WORKER,
    Drill,
    ask,
    refusal_of,
    starts,
)


def guarded() -> Drill:
    """Return a drill whose processes are all ready, the core's standby included."""
    drill = Drill(standby_core=True).all_ready()
    drill.wait(STANDBY_DELAY_S)
    drill.receive(STANDBY_CORE, Ready())
    return drill


def test_core_gets_its_standby_when_the_engine_serves() -> None:
    """An earlier start would take CPU time from loading; no process waits for the standby."""
    drill = Drill(standby_core=True)
    drill.receive(CORE, Ready())
    drill.receive(API, Ready())
    assert drill.wait(5.0) == []
    assert Announce() in drill.receive(WORKER, Ready())
    assert drill.wait(STANDBY_DELAY_S * 0.9) == []
    assert starts(drill.wait(STANDBY_DELAY_S)) == [(STANDBY_CORE, Origin.STARTED)]
    assert drill.policy.is_ready


def test_core_is_followed_by_its_standby_and_that_by_another() -> None:
    """The promotion follows in the same call; the next standby starts when all are ready."""
    drill = guarded()
    standby = drill.living[STANDBY_CORE]
    assert starts(drill.die(CORE)) == [(CORE, Origin.PROMOTED)]
    assert drill.living[CORE] > standby
    assert drill.wait(STANDBY_DELAY_S) == []
    drill.receive(CORE, Ready())
    assert starts(drill.wait(STANDBY_DELAY_S)) == [(STANDBY_CORE, Origin.STARTED)]


def test_core_whose_standby_is_dead_or_slow_starts_alone() -> None:
    """A starting standby is waited for; a killed one is not promoted."""
    drill = guarded()
    assert starts(drill.die(STANDBY_CORE)) == [(STANDBY_CORE, Origin.STARTED)]
    assert starts(drill.die(CORE)) == [], "it is starting already"
    assert starts(drill.receive(STANDBY_CORE, Ready()) + drill.wait(0.0)) == [
        (CORE, Origin.PROMOTED)
    ]
    drill.receive(CORE, Ready())
    drill.wait(STANDBY_DELAY_S)
    assert STANDBY_CORE in drill.living
    drill.die(CORE)
    assert starts(drill.wait(PATIENCE_S * 0.9)) == []
    assert starts(drill.wait(PATIENCE_S)) == [(CORE, Origin.STARTED)]
    drill.die(CORE)
    drill.die(STANDBY_CORE)
    assert starts(drill.wait(2.0)) == [(CORE, Origin.STARTED)]


def test_standby_core_that_does_not_take_over_is_killed() -> None:
    """It was dead already, or stopped: the next core starts without one."""
    drill = guarded()
    drill.die(CORE)
    assert drill.wait(HANDOVER_TIMEOUT_S) == [Kill(CORE)]
    assert starts(drill.die(CORE)) + starts(drill.wait(0.1)) == [(CORE, Origin.STARTED)]


def test_standby_core_that_cannot_live_ends_nothing() -> None:
    """This holds before the engine was first ready too; the pauses between starts grow."""
    drill = Drill(standby_core=True).all_ready()
    num_starts = 0
    while drill.now < 1120.0:
        num_starts += len(starts(drill.wait(0.5)))
        if STANDBY_CORE in drill.living:
            drill.die(STANDBY_CORE, 1)
    assert drill.policy.failure is None
    assert drill.policy.is_ready
    assert num_starts < 80
    assert API in drill.living


def test_standby_core_ends_with_the_engine() -> None:
    drill = guarded()
    drill.signal()
    drill.receive(API, Drained())
    drill.receive(CORE, Drained())
    for slot in (API, CORE, WORKER):
        actions = drill.die(slot, 0)
    assert actions == [Kill(STANDBY_CORE)]
    assert drill.die(STANDBY_CORE) == [Exit(0)]


def test_core_leaves_when_its_standby_is_ready_or_takes_too_long() -> None:
    """Without one its restart only takes a little longer."""
    drill = guarded()
    assert ask(drill, Role.CORE) == [Send(CORE, Stop())]
    assert starts(drill.die(CORE, 0)) == [(CORE, Origin.PROMOTED)]
    drill.receive(CORE, Ready())
    assert ask(drill, Role.CORE) == []
    assert refusal_of(drill, Role.CORE) == "the core is being replaced already"
    drill.wait(STANDBY_DELAY_S)
    assert drill.receive(STANDBY_CORE, Ready()) == [Show(STANDBY_CORE, Ready())]
    assert drill.wait(0.0) + drill.take(drill.policy.tick(drill.now)) == [Send(CORE, Stop())]
    drill.die(CORE, 0)
    drill.receive(CORE, Ready())
    ask(drill, Role.CORE)
    while Send(CORE, Stop()) not in drill.wait(0.1):
        if STANDBY_CORE in drill.living:
            drill.die(STANDBY_CORE)
        assert drill.now < 1000.0 + 3 * CORE_PATIENCE_S

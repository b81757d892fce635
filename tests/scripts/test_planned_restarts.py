"""Planned restarts in virtual time: their order, and events that interfere."""

import signal

import pytest

from protocol.lifecycle import (
    DeathCause,
    Drain,
    Drained,
    ProcessState,
    Ready,
    Role,
    Stop,
)
from scripts.supervisor.actions import Exit, Kill, Origin, Send, Show, Slot, Swap, api_slot
from scripts.supervisor.deaths import Evidence
from scripts.supervisor.failover import STANDBY_DELAY_S
from scripts.supervisor.planned_restarts import LEAVE_GRACE_S
from tests.scripts.drill import (
    API,
    CORE,
    RECOVERY,
    STANDBY,
    WORKER,
    Drill,
    ask,
    refusal_of,
    standing,
    starts,
)

NEXT_API = api_slot(0, 1, is_spare=True)


@pytest.mark.parametrize("slot", [CORE, WORKER])
def test_who_is_asked_to_leave_is_followed_at_once(slot: Slot) -> None:
    """Its death is not a failure, however often. A process that stays is killed."""
    drill = Drill().all_ready()
    for _ in range(5):
        assert ask(drill, slot.role) == [Send(slot, Stop())]
        assert refusal_of(drill, slot.role) == f"the {slot} is being replaced already"
        assert starts(drill.die(slot, 0)) == [(slot, Origin.STARTED)]
        assert drill.words[-1].cause is DeathCause.ENDED, "no step is held responsible"
        drill.receive(slot, Ready())
    ask(drill, slot.role)
    assert drill.wait(LEAVE_GRACE_S) == [Kill(slot)]
    assert starts(drill.die(slot)) == [(slot, Origin.STARTED)]


def test_worker_leaves_when_its_standby_is_ready() -> None:
    """It does not leave earlier, and stays if none gets ready."""
    drill = standing()
    drill.die(STANDBY)
    assert ask(drill, Role.WORKER) == []
    assert refusal_of(drill, Role.WORKER) is not None
    drill.wait(STANDBY_DELAY_S)
    drill.receive(STANDBY, Ready())
    assert Send(WORKER, Stop()) in drill.wait(0.0) + drill.take(drill.policy.tick(drill.now))
    assert starts(drill.die(WORKER, 0)) == [(WORKER, Origin.PROMOTED)]
    drill.receive(WORKER, Ready())
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
    """They exchange slots; the old one is notified that it is replaced, and ends by itself."""
    drill = Drill().all_ready()
    old = drill.living[API]
    assert starts(ask(drill, Role.API)) == [(NEXT_API, Origin.STARTED)]
    assert drill.policy.is_ready
    actions = drill.receive(NEXT_API, Ready())
    assert actions == [
        Show(NEXT_API, Ready()),
        Swap(API, NEXT_API),
        Send(NEXT_API, Drain(is_replaced=True)),
    ]
    assert drill.living[NEXT_API] == old
    assert drill.policy.is_ready
    assert refusal_of(drill, Role.API) == "the api before this one still finishes its requests"
    assert drill.die(NEXT_API, 0) == []
    assert starts(ask(drill, Role.API)) == [(NEXT_API, Origin.STARTED)]


def test_old_api_stays_if_its_successor_dies() -> None:
    """Clients do not notice."""
    drill = Drill().all_ready()
    ask(drill, Role.API)
    assert drill.die(NEXT_API, 1) == []
    assert drill.policy.is_ready
    assert drill.state(API) is ProcessState.READY


def test_old_api_that_takes_too_long_is_killed() -> None:
    """It is killed after the time for a shutdown."""
    drill = Drill().all_ready()
    ask(drill, Role.API)
    drill.receive(NEXT_API, Ready())
    assert drill.wait(RECOVERY.shutdown_timeout_s + LEAVE_GRACE_S) == [Kill(NEXT_API)]


def test_api_that_must_be_alone_ends_first() -> None:
    """New connections wait meanwhile."""
    drill = Drill(is_api_alone=True).all_ready()
    assert ask(drill, Role.API) == [Send(API, Drain(is_replaced=True))]
    assert starts(drill.die(API, 0)) == [(API, Origin.STARTED)]


def test_end_waits_for_an_api_that_leaves() -> None:
    """Its streams are finished, as are those of its successor."""
    drill = Drill().all_ready()
    ask(drill, Role.API)
    drill.receive(NEXT_API, Ready())
    assert drill.signal() == [Send(API, Drain())]
    assert drill.receive(API, Drained()) == []
    assert drill.die(NEXT_API, 0) == [Send(CORE, Drain())]


def test_end_waits_for_an_api_that_leaves_although_its_successor_only_starts() -> None:
    """A later successor takes over, because the first one died."""
    drill = Drill().all_ready()
    ask(drill, Role.API)
    drill.receive(NEXT_API, Ready())
    drill.die(API)
    assert drill.signal() == [Send(API, Drain())]
    assert drill.receive(API, Drained()) == []
    assert drill.die(NEXT_API, 0) == [Send(CORE, Drain())]


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
        drill.receive(WORKER, Ready())
        drill.wait(STANDBY_DELAY_S)
        drill.receive(STANDBY, Ready())
    assert starts(drill.die(WORKER, -signal.SIGKILL)) == [(WORKER, Origin.PROMOTED)]
    assert Exit(0) not in drill.wait(1.0)


# Collisions with other events ------------------------------------------------------------------


def test_who_is_killed_for_leaving_late_did_not_hang() -> None:
    """A long step during a planned restart does not make its requests suspects."""
    drill = Drill().all_ready()
    ask(drill, Role.WORKER)
    assert drill.wait(LEAVE_GRACE_S) == [Kill(WORKER)]
    drill.die(WORKER, evidence=Evidence(7))
    assert [death.cause for death in drill.reported_deaths] == [DeathCause.KILLED]


def test_api_that_finishes_its_streams_outlives_its_successor() -> None:
    """The successor's death neither breaks the streams nor delays the restart."""
    drill = Drill().all_ready()
    ask(drill, Role.API)
    drill.receive(NEXT_API, Ready())
    assert starts(drill.die(API)) == [(API, Origin.STARTED)]
    assert NEXT_API not in drill.doomed
    drill.receive(API, Ready())
    assert drill.policy.is_ready
    assert drill.die(NEXT_API, 0) == []


def test_api_that_dies_while_its_successor_starts_is_replaced_at_once() -> None:
    """It is refused while another one runs; otherwise two processes would serve."""
    drill = Drill().all_ready()
    ask(drill, Role.API)
    actions = drill.die(API)
    assert NEXT_API in drill.doomed
    assert starts(actions) == [(API, Origin.STARTED)]
    drill.die(NEXT_API)
    drill.receive(API, Ready())
    assert drill.policy.is_ready


def test_end_waits_for_an_api_alone_that_leaves_already() -> None:
    """It finishes its streams and has no successor."""
    drill = Drill(is_api_alone=True).all_ready()
    ask(drill, Role.API)
    assert drill.signal() == []
    assert drill.die(API, 0) == [Send(CORE, Drain())]
    assert drill.receive(CORE, Drained()) == [Send(CORE, Stop())]


def test_end_gives_up_what_was_to_be_replaced() -> None:
    """No API accepts new connections then, and no worker leaves early."""
    drill = Drill().all_ready()
    ask(drill, Role.API)
    assert drill.signal() == [Kill(NEXT_API), Send(API, Drain())]
    assert drill.receive(NEXT_API, Ready()) == []
    drill = standing()
    drill.die(STANDBY)
    ask(drill, Role.WORKER)
    drill.signal()
    drill.signal()
    assert drill.take(drill.policy.tick(drill.now + 1.0)) == []


def test_end_lets_an_api_finish_whose_successor_has_died() -> None:
    """It is the front now, and its streams need the core."""
    drill = Drill().all_ready()
    ask(drill, Role.API)
    drill.receive(NEXT_API, Ready())
    assert drill.signal() == [Send(API, Drain())]
    assert drill.die(API) == []
    assert drill.die(NEXT_API, 0) == [Send(CORE, Drain())]


def test_who_is_being_killed_is_not_asked_to_leave() -> None:
    """Its death may take a while; there is nothing to do meanwhile."""
    drill = Drill().all_ready()
    (core,) = (p for p in drill.policy.processes if p.slot == CORE)
    drill.take(core.kill(is_overdue=True))
    assert refusal_of(drill, Role.CORE) == "the core is being replaced already"
    assert drill.wait(LEAVE_GRACE_S) == []
    assert core.deadline is None

"""Shutdown in virtual time: what is finished, and the order in which processes leave."""

import random
import signal
from itertools import count

import pytest

from protocol.config import RecoveryConfig
from protocol.lifecycle import (
    Drain,
    Drained,
    ProcessState,
    Ready,
    Role,
    Stop,
)
from scripts.supervisor.actions import Exit, Kill, Note, Origin, Send, Show, Start
from scripts.supervisor.deaths import Evidence
from scripts.supervisor.policy import SupervisorPolicy
from scripts.supervisor.shutdown import STOP_GRACE_S
from tests.scripts.drill import API, BLOCK_SERVER, CORE, RECOVERY, WORKER, Drill, ask, starts


def test_signal_drains_from_outside_in_then_stops_in_order() -> None:
    """API, core, worker: each leaves before the process that it needs; status 0."""
    drill = Drill().all_ready()
    assert drill.signal() == [Send(API, Drain())]
    assert drill.state(API) is ProcessState.DRAINING
    assert drill.receive(API, Drained()) == [Send(CORE, Drain())]
    assert drill.receive(CORE, Drained()) == [Send(API, Stop())]
    assert drill.die(API, 0) == [Send(CORE, Stop())]
    assert drill.die(CORE, 0) == [Send(WORKER, Stop())]
    assert drill.die(WORKER, 0) == [Exit(0)]
    assert drill.take(drill.policy.tick(drill.now + STOP_GRACE_S)) == [], "the end is final"


@pytest.mark.parametrize("num_ranks", [{}, {Role.PLACER: 1}], ids=str)
def test_an_engine_without_requests_is_stopped_in_order(num_ranks: dict[Role, int]) -> None:
    """All of its engines are on other machines, and clients have no API here."""
    policy = SupervisorPolicy(RECOVERY, num_ranks, count(1).__next__, random.Random(0))
    actions = policy.begin(0.0)
    for process in policy.processes:
        actions += policy.on_message(process.epoch, Ready(), 0.0)
    actions = policy.on_signal(1.0)
    for process in policy.processes:
        assert Send(process.slot, Stop()) in actions
        actions = policy.on_death(process.slot, 0, 2.0, Evidence())
    assert actions[-1] == Exit(0)


def test_the_log_states_how_long_requests_may_take() -> None:
    """Before the engine has served there are none."""
    for drill, text in (
        (Drill(), "stopping; another signal stops at once"),
        (
            Drill().all_ready(),
            f"finishing open requests, for {RECOVERY.shutdown_timeout_s:g} s at most; another"
            " signal stops at once",
        ),
    ):
        actions = drill.policy.on_signal(drill.now)
        assert [action.text for action in actions if isinstance(action, Note)] == [text]


def test_without_api_the_core_is_drained() -> None:
    """An embedded engine has clients of the core only."""
    drill = Drill(api=False).all_ready()
    assert drill.signal() == [Send(CORE, Drain())]
    assert drill.receive(CORE, Drained()) == [Send(CORE, Stop())]


@pytest.mark.parametrize("is_killed", [False, True])
def test_blocks_are_served_until_the_requests_have_gone_on_elsewhere(is_killed: bool) -> None:
    drill = Drill(api=False, block_server=True).all_ready()
    assert drill.signal() == [Send(CORE, Drain())]
    assert drill.receive(CORE, Drained()) == [Send(BLOCK_SERVER, Drain())]
    if is_killed:
        assert drill.die(BLOCK_SERVER) == [Send(CORE, Stop())]
        return
    assert drill.receive(BLOCK_SERVER, Drained()) == [Send(CORE, Stop())]
    assert drill.die(CORE, 0) == [Send(WORKER, Stop())]
    assert drill.die(WORKER, 0) == [Send(BLOCK_SERVER, Stop())]
    assert drill.die(BLOCK_SERVER, 0) == [Exit(0)]


def test_the_engine_serves_without_a_block_server_which_is_replaced() -> None:
    drill = Drill(api=False, block_server=True)
    drill.receive(WORKER, Ready())
    drill.receive(CORE, Ready())
    assert drill.policy.is_ready
    drill.receive(BLOCK_SERVER, Ready())
    drill.wait(10.0)
    assert starts(drill.die(BLOCK_SERVER)) == [(BLOCK_SERVER, Origin.STARTED)]
    assert drill.policy.is_ready


@pytest.mark.parametrize("is_asked", [False, True])
def test_without_api_a_core_that_dies_comes_back_to_finish(is_asked: bool) -> None:
    """Its clients have ledgers. It dies before or while it drains, or is being replaced."""
    drill = Drill(api=False).all_ready()
    if is_asked:
        ask(drill, Role.CORE)
        assert drill.signal() == []
        assert starts(drill.die(CORE, 0)) == [(CORE, Origin.STARTED)]
        assert drill.receive(CORE, Ready())[-1] == Send(CORE, Drain())
    else:
        drill.die(CORE)
        assert drill.signal() == []
        assert drill.receive(CORE, Ready())[-1] == Send(CORE, Drain())
    drill.die(CORE)
    drill.wait(1.0)
    assert drill.receive(CORE, Ready())[-1] == Send(CORE, Drain())
    assert drill.receive(CORE, Drained()) == [Send(CORE, Stop())]


def test_a_core_that_fails_again_and_again_is_not_waited_for() -> None:
    """This holds for its own failures: a core that is killed from outside is always replaced."""
    drill = Drill(api=False, recovery=RecoveryConfig(restart_backoff_max_s=0.5)).all_ready()
    drill.signal()
    for _ in range(5):
        drill.die(CORE, -signal.SIGKILL)
        drill.wait(0.5)
        drill.receive(CORE, Ready())
    for _ in range(3):
        drill.die(CORE, 1)
        drill.wait(0.5)
        drill.receive(CORE, Ready())
    assert drill.die(CORE, 1) == [Send(WORKER, Stop())]


def test_an_api_that_died_is_waited_for_when_it_starts_again_and_may_have_requests() -> None:
    """It has accepted them while the engine recovers."""
    drill = Drill().all_ready()
    drill.die(API)
    drill.die(WORKER)
    assert drill.signal() == [Send(API, Drain())]
    assert drill.receive(API, Ready()) == [Show(API, Ready())]
    assert drill.receive(API, Drained()) == [Send(CORE, Drain())]


def test_an_api_that_has_died_is_not_started_any_more() -> None:
    drill = Drill().all_ready()
    for _ in range(2):
        drill.die(API)
    assert drill.state(API) is ProcessState.BACKOFF
    assert drill.signal() == [Send(CORE, Drain())]
    assert drill.wait(5.0) == []


def test_draining_ends_at_its_deadline() -> None:
    """Requests that take too long do not delay the end."""
    drill = Drill().all_ready()
    drill.signal()
    assert drill.wait(19.9) == []
    assert drill.wait(0.2) == [Send(API, Stop())]


def test_zero_shutdown_timeout_skips_draining() -> None:
    """The end does not wait for requests."""
    recovery = RecoveryConfig(shutdown_timeout_s=0.0)
    assert Drill(recovery=recovery).all_ready().signal() == [Send(API, Stop())]


def test_signal_during_the_first_start_ends_it_at_once() -> None:
    """A process that still imports does not read commands, so it is killed."""
    drill = Drill()
    assert drill.signal() == [Kill(API)]
    assert drill.die(API) == [Kill(CORE)]
    assert drill.die(CORE) == [Kill(WORKER)]
    assert drill.die(WORKER) == [Exit(0)]


def test_stop_that_is_ignored_ends_in_a_kill_in_bounded_time() -> None:
    """SIGKILL comes after 5 s; a process that survives it is left behind, with status 1."""
    drill = Drill().all_ready()
    drill.signal()
    drill.receive(API, Drained())
    drill.receive(CORE, Drained())
    assert drill.wait(STOP_GRACE_S) == [Kill(WORKER), Kill(CORE), Kill(API)]
    assert drill.wait(STOP_GRACE_S) == [Exit(1)]


def test_second_signal_kills_at_once() -> None:
    """Requests were cut off, so the status is 1."""
    drill = Drill().all_ready()
    drill.signal()
    assert drill.signal() == [Send(API, Stop()), Kill(WORKER), Kill(CORE), Kill(API)]
    drill.die(WORKER)
    drill.die(CORE)
    assert drill.die(API) == [Exit(1)]


def test_worker_and_core_are_replaced_while_draining_but_the_api_is_not() -> None:
    """Accepted requests are finished; after the API's death, those of the core's other clients."""
    drill = Drill().all_ready()
    drill.signal()
    assert drill.die(WORKER) == [Start(WORKER, 4)]
    assert drill.die(CORE) == [Start(CORE, 5)]
    assert drill.die(API) == []
    assert drill.receive(CORE, Ready())[-1] == Send(CORE, Drain())
    assert drill.receive(CORE, Drained()) == [Send(CORE, Stop())]
    assert drill.die(CORE, 0) == [Kill(WORKER)]


def test_orphaned_supervisor_kills_everything() -> None:
    """No client is left that waits for results."""
    drill = Drill().all_ready()
    drill.die(CORE)
    drill.die(CORE)
    assert drill.state(CORE) is ProcessState.BACKOFF
    actions = drill.take(drill.policy.on_orphaned(drill.now))
    assert actions == [Send(API, Stop()), Kill(WORKER), Kill(API)]
    drill.die(API)
    assert drill.die(WORKER) == [Exit(0)]

"""Several API processes under one supervisor, in virtual time: each dies and is replaced alone."""

from protocol.lifecycle import Drain, Drained, ProcessState, Ready, Role, Stop
from scripts.supervisor.actions import Kill, Origin, Send, api_slot
from tests.scripts.drill import CORE, RECOVERY, WORKER, Drill, ask, refusal_of, starts

FIRST, SECOND = api_slot(0, 2), api_slot(1, 2)
NEXT_FIRST, NEXT_SECOND = api_slot(0, 2, is_spare=True), api_slot(1, 2, is_spare=True)
RETIRE = Drain(is_replaced=True)


def two(*, is_api_alone: bool = False) -> Drill:
    return Drill(num_apis=2, is_api_alone=is_api_alone).all_ready()


def test_names_have_a_number_only_if_there_are_several() -> None:
    assert [str(slot) for slot in (FIRST, SECOND, NEXT_FIRST)] == ["api-0", "api-1", "api-0 spare"]
    assert [str(api_slot(0, 1)), str(api_slot(0, 1, is_spare=True))] == ["api", "api spare"]


def test_death_of_one_concerns_only_itself() -> None:
    """It is started again at once, with a greater epoch; the other is neither killed nor asked."""
    drill = two()
    epoch = drill.living[FIRST]
    assert starts(drill.die(SECOND)) == [(SECOND, Origin.STARTED)]
    assert drill.living[FIRST] == epoch
    assert drill.state(FIRST) is ProcessState.READY
    assert not drill.policy.is_ready
    drill.receive(SECOND, Ready())
    assert drill.policy.is_ready


def test_deaths_in_a_row_delay_only_that_one() -> None:
    drill = two()
    drill.die(SECOND)
    assert starts(drill.die(SECOND)) == []
    assert starts(drill.die(FIRST)) == [(FIRST, Origin.STARTED)]
    assert starts(drill.wait(1.0)) == [(SECOND, Origin.STARTED)]


def test_they_are_replaced_one_after_the_other() -> None:
    drill = two()
    assert starts(ask(drill, Role.API)) == [(NEXT_FIRST, Origin.STARTED)]
    assert refusal_of(drill, Role.API, 1) == "the api-1 is being replaced already"
    assert starts(drill.wait(1.0)) == []
    assert Send(NEXT_FIRST, RETIRE) in drill.receive(NEXT_FIRST, Ready())
    assert starts(drill.wait(0.0) + drill.take(drill.policy.tick(drill.now))) == [
        (NEXT_SECOND, Origin.STARTED)
    ]
    assert Send(NEXT_SECOND, RETIRE) in drill.receive(NEXT_SECOND, Ready())
    drill.die(NEXT_FIRST, 0)
    drill.die(NEXT_SECOND, 0)
    assert drill.policy.is_ready
    assert refusal_of(drill, Role.API, 2) == "no api with index 2 that could be restarted"
    assert starts(ask(drill, Role.API, 1)) == [(NEXT_SECOND, Origin.STARTED)]


def test_with_journals_each_ends_before_its_successor_starts() -> None:
    """The other one serves meanwhile."""
    drill = two(is_api_alone=True)
    assert ask(drill, Role.API) == [Send(FIRST, RETIRE)]
    assert drill.wait(1.0) == []
    assert starts(drill.die(FIRST, 0)) == [(FIRST, Origin.STARTED)]
    assert drill.wait(1.0) == []
    drill.receive(FIRST, Ready())
    assert drill.take(drill.policy.tick(drill.now)) == [Send(SECOND, RETIRE)]


def test_a_successor_that_dies_ends_the_series() -> None:
    drill = two()
    ask(drill, Role.API)
    drill.die(NEXT_FIRST, 1)
    assert drill.take(drill.policy.tick(drill.now)) == []
    assert drill.policy.is_ready
    assert starts(ask(drill, Role.API, 1)) == [(NEXT_SECOND, Origin.STARTED)]


def test_a_successor_that_does_not_get_ready_ends_the_series() -> None:
    """It is killed at its deadline; the others would not get ready either."""
    drill = two()
    ask(drill, Role.API)
    assert drill.wait(RECOVERY.startup_timeout_s) == [Kill(NEXT_FIRST)]
    assert starts(drill.take(drill.policy.tick(drill.now))) == []
    drill.die(NEXT_FIRST)
    assert starts(drill.take(drill.policy.tick(drill.now))) == []
    assert drill.policy.is_ready


def test_one_whose_predecessor_dies_does_not_end_the_series() -> None:
    """Its successor is killed, as another one replaces both."""
    drill = two()
    ask(drill, Role.API)
    drill.die(FIRST)
    drill.die(NEXT_FIRST)
    drill.receive(FIRST, Ready())
    assert starts(drill.take(drill.policy.tick(drill.now))) == [(NEXT_SECOND, Origin.STARTED)]


def test_one_that_dies_in_the_series_does_not_stop_it() -> None:
    drill = two()
    ask(drill, Role.API)
    drill.die(SECOND)
    drill.receive(NEXT_FIRST, Ready())
    assert starts(drill.take(drill.policy.tick(drill.now))) == []
    drill.receive(SECOND, Ready())
    assert refusal_of(drill, Role.API, 1) is None


def test_the_core_drains_after_the_last_of_them() -> None:
    """One that dies meanwhile has nothing left to finish."""
    for has_died in (False, True):
        drill = two()
        assert drill.signal() == [Send(FIRST, Drain()), Send(SECOND, Drain())]
        assert drill.receive(SECOND, Drained()) == []
        actions = drill.die(FIRST) if has_died else drill.receive(FIRST, Drained())
        assert actions == [Send(CORE, Drain())]
        stops = drill.receive(CORE, Drained())
        assert stops == [Send(slot, Stop()) for slot in (FIRST, SECOND) if slot in drill.living]
        last = [drill.die(slot, 0) for slot in (FIRST, SECOND) if slot in drill.living][-1]
        assert last == [Send(CORE, Stop())]
        assert drill.die(CORE, 0) == [Send(WORKER, Stop())]


def test_the_end_gives_up_the_series() -> None:
    drill = two()
    ask(drill, Role.API)
    actions = drill.signal()
    assert actions == [Kill(NEXT_FIRST), Send(FIRST, Drain()), Send(SECOND, Drain())]
    drill.die(NEXT_FIRST)
    assert starts(drill.take(drill.policy.tick(drill.now))) == []

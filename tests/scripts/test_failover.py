"""Standby and zygote in virtual time: which process follows which, and when."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.lifecycle import (
    Fatal,
    Hello,
    ProcessState,
    Progress,
    Ready,
    Role,
)
from scripts.supervisor.actions import Announce, Kill, Origin, Slot
from scripts.supervisor.failover import HANDOVER_TIMEOUT_S, PATIENCE_S, STANDBY_DELAY_S
from tests.scripts.drill import (
    API,
    CORE,
    RECOVERY,
    STANDBY,
    STANDBY_CORE,
    WORKER,
    ZYGOTE,
    Drill,
    standing,
    starts,
)


def test_first_worker_waits_for_the_zygote_and_the_standby_for_the_worker() -> None:
    """One load serves both; the engine is announced before its standby is ready."""
    drill = Drill(standby=True)
    assert set(drill.living) == {ZYGOTE, CORE, API}
    assert drill.state(WORKER) is ProcessState.STARTING
    drill.receive(CORE, Ready())
    drill.receive(API, Ready())
    drill.receive(ZYGOTE, Ready())
    assert starts(drill.wait(0.0)) == [(WORKER, Origin.FORKED)]
    assert Announce() in drill.receive(WORKER, Ready())
    assert drill.policy.is_ready
    assert drill.wait(STANDBY_DELAY_S * 0.9) == []
    assert starts(drill.wait(STANDBY_DELAY_S)) == [(STANDBY, Origin.FORKED)]


def test_standby_takes_over_at_once_and_is_followed_by_another() -> None:
    """The standby is promoted in the same call; the next fork waits a little."""
    drill = standing()
    assert starts(drill.die(WORKER)) == [(WORKER, Origin.PROMOTED)]
    assert drill.wait(STANDBY_DELAY_S) == [], "not before the worker serves"
    drill.receive(WORKER, Ready())
    assert starts(drill.wait(STANDBY_DELAY_S)) == [(STANDBY, Origin.FORKED)]


def test_without_a_standby_the_zygote_forks_and_without_both_the_worker_loads() -> None:
    """It prefers a standby, a fork, a start, and waits for a starting process only briefly."""
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
    drill.receive(WORKER, Ready())
    assert starts(drill.wait(2.0)) == [(ZYGOTE, Origin.STARTED)]


def test_standby_that_does_not_get_ready_is_not_waited_for() -> None:
    """Another standby is forked after two seconds."""
    drill = standing()
    drill.die(STANDBY)
    drill.wait(STANDBY_DELAY_S)
    drill.receive(STANDBY, Hello(Role.WORKER, 0, 1))
    assert starts(drill.die(WORKER)) == []
    assert starts(drill.wait(PATIENCE_S * 0.9)) == []
    assert starts(drill.wait(PATIENCE_S)) == [(WORKER, Origin.FORKED)]


def test_a_notice_of_a_death_states_whether_the_successor_must_load_the_model() -> None:
    """A standby or zygote has loaded it, or will have soon."""
    drill = standing()
    drill.die(WORKER)
    drill.receive(WORKER, Ready())
    drill.wait(STANDBY_DELAY_S)
    drill.die(WORKER)
    without = Drill().all_ready()
    without.die(WORKER)
    notices = [*drill.reported_deaths, *without.reported_deaths]
    assert [notice.is_loaded_anew for notice in notices] == [False, False, True]


def ranks(slot: Slot, count: int = 2) -> list[Slot]:
    return [Slot(slot.role, rank) for rank in range(count)]


def standing_group() -> Drill:
    """An engine of two ranks, with two standbys."""
    drill = Drill(2, standby=True).all_ready()
    drill.wait(0.0)
    drill.all_ready()
    assert starts(drill.wait(STANDBY_DELAY_S)) == [(slot, Origin.FORKED) for slot in ranks(STANDBY)]
    return drill.all_ready()


@pytest.mark.parametrize("dead", [[0], [1], [0, 1], [1, 0]])
def test_a_group_of_ranks_is_replaced_by_a_standby_group(dead: list[int]) -> None:
    """All standbys are promoted at once, when the last rank is dead; their epochs are a row."""
    drill = standing_group()
    doomed = [rank for rank in range(2) if rank not in dead]
    for rank in [*dead, *doomed]:
        assert drill.state(Slot(Role.STANDBY, 0)) is ProcessState.READY
        actions = drill.die(Slot(Role.WORKER, rank))
    assert starts(actions) == [(slot, Origin.PROMOTED) for slot in ranks(WORKER)]
    first, second = (drill.living[slot] for slot in ranks(WORKER))
    assert second == first + 1
    for slot in ranks(WORKER):
        drill.receive(slot, Ready())
    assert [slot for slot, _ in starts(drill.wait(STANDBY_DELAY_S))] == ranks(STANDBY)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_standby_group_without_one_of_its_ranks_is_not_promoted(rank: int) -> None:
    """The other standby is killed with it; the group is forked."""
    drill = standing_group()
    drill.die(Slot(Role.STANDBY, rank))
    assert drill.doomed == {Slot(Role.STANDBY, 1 - rank)}
    drill.die(Slot(Role.WORKER, rank))
    actions = drill.die(Slot(Role.WORKER, 1 - rank))
    assert starts(actions) == [(slot, Origin.FORKED) for slot in ranks(WORKER)]


def test_a_standby_group_is_waited_for_while_one_rank_is_starting() -> None:
    drill = Drill(2, standby=True).all_ready()
    drill.wait(0.0)
    drill.all_ready()
    drill.wait(STANDBY_DELAY_S)
    drill.receive(Slot(Role.STANDBY, 1), Ready())
    for slot in ranks(WORKER):
        assert starts(drill.die(slot)) == []
    assert starts(drill.wait(PATIENCE_S * 0.9)) == []
    drill.receive(STANDBY, Ready())
    assert starts(drill.wait(0.0)) == [(slot, Origin.PROMOTED) for slot in ranks(WORKER)]


def forking_group(size: int = 2) -> Drill:
    """An engine of ranks that have zygotes and no standbys."""
    drill = Drill(size, zygotes=True).all_ready()
    assert starts(drill.wait(0.0)) == [(slot, Origin.FORKED) for slot in ranks(WORKER, size)]
    return drill.all_ready()


@pytest.mark.parametrize("dead", [0, 1])
def test_a_group_without_standbys_is_forked_when_all_ranks_are_dead(dead: int) -> None:
    """Ranks of two incarnations would never be adopted; their epochs are a row."""
    drill = forking_group()
    actions = drill.die(Slot(Role.WORKER, dead))
    assert starts(actions) == []
    actions = drill.die(Slot(Role.WORKER, 1 - dead))
    assert starts(actions) == [(slot, Origin.FORKED) for slot in ranks(WORKER)]
    first, second = (drill.living[slot] for slot in ranks(WORKER))
    assert second == first + 1


def test_a_group_waits_for_a_zygote_that_is_loading_while_the_others_are_ready() -> None:
    """The death of a zygote replaces it alone, and only once the group serves."""
    drill = forking_group()
    zygotes = ranks(ZYGOTE)
    before = drill.living[zygotes[0]]
    assert starts(drill.die(zygotes[1])) == [(zygotes[1], Origin.STARTED)]
    assert drill.living[zygotes[0]] == before
    for slot in ranks(WORKER):
        assert starts(drill.die(slot)) == []
    assert starts(drill.wait(5.0)) == []
    drill.receive(zygotes[1], Ready())
    assert starts(drill.wait(0.0)) == [(slot, Origin.FORKED) for slot in ranks(WORKER)]


def test_a_group_starts_by_command_if_the_zygote_of_one_rank_is_dead() -> None:
    """The zygote is started again once the group serves."""
    drill = forking_group()
    drill.die(WORKER)
    drill.die(Slot(Role.ZYGOTE, 1))
    actions = drill.die(Slot(Role.WORKER, 1))
    assert starts(actions) == [(slot, Origin.STARTED) for slot in ranks(WORKER)]
    for slot in ranks(WORKER):
        drill.receive(slot, Ready())
    assert starts(drill.wait(2.0)) == [(Slot(Role.ZYGOTE, 1), Origin.STARTED)]


def test_ranks_that_are_killed_with_another_leave_their_zygotes_alive() -> None:
    """One that is late is given up with its zygote, which does not react."""
    drill = forking_group()
    for slot in ranks(WORKER):
        drill.die(slot)
    killed = [action for action in drill.die(WORKER) if isinstance(action, Kill)]
    assert killed == [Kill(Slot(Role.WORKER, 1), spares_zygote=True)]
    drill.die(Slot(Role.WORKER, 1))
    drill.wait(0.1)
    assert Kill(WORKER) in drill.wait(HANDOVER_TIMEOUT_S)


def test_who_was_asked_to_take_over_and_does_not_is_killed() -> None:
    """A worker whose fork does not appear is replaced too."""
    drill = standing()
    drill.die(WORKER)
    assert Kill(WORKER) in drill.wait(HANDOVER_TIMEOUT_S)
    assert starts(drill.die(WORKER)) + starts(drill.wait(0.1)) == [(WORKER, Origin.FORKED)]
    assert Kill(WORKER) in drill.wait(HANDOVER_TIMEOUT_S)


def test_death_of_a_helper_touches_no_other_process() -> None:
    """The engine stays ready."""
    for helper in (ZYGOTE, STANDBY):
        drill = standing()
        others = {k: v for k, v in drill.living.items() if k != helper}
        drill.die(helper)
        drill.wait(STANDBY_DELAY_S)
        assert {k: v for k, v in drill.living.items() if k != helper} == others
        assert helper in drill.living
        assert drill.policy.is_ready


def test_model_that_cannot_be_loaded_ends_the_first_start() -> None:
    """The zygote reports it, as a worker would."""
    drill = Drill(standby=True)
    drill.receive(ZYGOTE, Fatal("loading the model", "CheckpointError: no", retry=False))
    drill.die(ZYGOTE, 1)
    assert drill.policy.failure == "zygote failed (loading the model): CheckpointError: no"


def test_standby_that_finds_no_memory_ends_nothing() -> None:
    """This holds before the engine was first ready too."""
    drill = Drill(standby=True)
    drill.receive(ZYGOTE, Ready())
    drill.wait(0.0)
    drill.receive(WORKER, Ready())
    drill.wait(STANDBY_DELAY_S)
    drill.receive(STANDBY, Fatal("loading the model", "InsufficientMemory: no", retry=False))
    drill.die(STANDBY, 1)
    assert drill.policy.failure is None


def test_end_kills_helpers_and_stops_the_others() -> None:
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
    while drill.exit_status is None:
        for slot in list(drill.living):
            drill.die(slot)
        drill.wait(1.0)
    assert drill.exit_status == 0


@settings(max_examples=150)
@given(
    st.data(),
    st.sampled_from([(True, False), (False, True), (True, True)]),
    st.sampled_from([1, 2, 3]),
)
def test_all_processes_come_back_after_any_deaths_and_restarts(
    data: st.DataObject, standbys: tuple[bool, bool], size: int
) -> None:
    """Deaths, messages and restarts come in random order."""
    has_zygotes = standbys[0] or size > 1
    drill = Drill(size, standby=standbys[0], zygotes=has_zygotes, standby_core=standbys[1])
    expected = {API, CORE, *ranks(WORKER, size)}
    expected |= set(ranks(STANDBY, size)) if standbys[0] else set()
    expected |= set(ranks(ZYGOTE, size)) if has_zygotes else set()
    expected |= {STANDBY_CORE} if standbys[1] else set()
    settle(drill)
    assert drill.living.keys() == expected
    for _ in range(data.draw(st.integers(1, 30))):
        slots = sorted(drill.living)
        slot = data.draw(st.sampled_from(slots)) if slots else None
        match data.draw(st.sampled_from(["die", "die", "ready", "progress", "restart", "wait"])):
            case "die" if slot is not None:
                drill.die(slot)
            case "ready" if slot is not None:
                drill.receive(slot, Ready())
            case "progress" if slot is not None:
                drill.receive(slot, Progress("load", data.draw(st.integers(0, 9)), 10))
            case "restart":
                role = data.draw(st.sampled_from([Role.CORE, Role.WORKER, Role.API]))
                drill.take(drill.policy.on_restart(role, drill.now)[1])
            case _:
                drill.wait(data.draw(st.sampled_from([0.0, 0.1, 1.0, 6.0])))
        for doomed in list(drill.doomed):
            drill.die(doomed)
    settle(drill)
    assert drill.living.keys() == expected
    assert drill.policy.is_ready


def settle(drill: Drill) -> None:
    """Let a minute pass in which every process does at once what it is asked."""
    for _ in range(60):
        for slot in sorted(drill.living):
            if slot in drill.doomed or drill.state(slot) is ProcessState.DRAINING:
                drill.die(slot, 0)
            elif slot in drill.living:
                drill.receive(slot, Ready())
        drill.wait(1.0)

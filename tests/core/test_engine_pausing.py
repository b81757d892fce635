"""Pause, sleep and reset through EngineCore: what stops, what goes on, and the answers."""

import pytest

from core_proc.engine import EngineCore
from protocol.api_core import Control, ControlAction, ControlDone, PauseMode
from protocol.config.settings import configure
from tests.core.engine_bench import (
    CLIENT,
    FACTS,
    OTHER,
    add,
    answer,
    make_engine,
    run_all,
    run_step,
    scheduled,
)

PAUSE, RESUME, SLEEP, RESET = (
    ControlAction.PAUSE,
    ControlAction.RESUME,
    ControlAction.SLEEP,
    ControlAction.RESET_PREFIX_CACHE,
)
MODES = [PauseMode.PAUSED_NEW, PauseMode.PAUSED_ALL]


def ask(engine: EngineCore, action: ControlAction, **fields: object) -> list[ControlDone]:
    """Send a control as CLIENT, with number 9; return the immediate answers."""
    engine.control(CLIENT, Control(9, action, **fields))  # type: ignore[arg-type]
    return answers(engine)


def answers(engine: EngineCore) -> list[ControlDone]:
    return [m for _, m in engine.take_outgoing() if isinstance(m, ControlDone)]


def tokens_of(engine: EngineCore) -> dict[int, int]:
    """Run to the end; return the number of tokens of each request."""
    counts: dict[int, int] = {}
    for _, row in run_all(engine):
        assert row.first_index == counts.get(row.request_id, row.first_index)
        counts[row.request_id] = row.first_index + len(row.token_ids)
    return counts


def test_paused_all_computes_nothing_and_continues_exactly() -> None:
    engine = make_engine()
    engine.add(CLIENT, add(1))
    run_step(engine)
    assert ask(engine, PAUSE) == [ControlDone(9, True, PauseMode.PAUSED_ALL)]
    assert engine.add(CLIENT, add(2)) is None
    assert engine.schedule() is None
    assert engine.status().pause_mode is PauseMode.PAUSED_ALL
    assert ask(engine, RESUME) == [ControlDone(9, True, PauseMode.RUNNING)]
    assert tokens_of(engine) == {1: 8, 2: 8}


def test_steps_in_flight_when_the_pause_comes_still_count() -> None:
    engine = make_engine()
    engine.add(CLIENT, add(1))
    step = scheduled(engine)
    ask(engine, PAUSE)
    [row] = engine.update(answer(engine, step))[CLIENT].outputs
    assert row.token_ids == [7]


def test_paused_new_finishes_running_requests_and_admits_none() -> None:
    engine = make_engine()
    engine.add(CLIENT, add(1, max_tokens=3))
    run_step(engine)
    ask(engine, PAUSE, pause_mode=PauseMode.PAUSED_NEW)
    engine.add(CLIENT, add(2))
    run_step(engine)
    run_step(engine)
    while (step := engine.schedule()) is not None:
        assert not step.total_num_scheduled_tokens
        engine.update(answer(engine, step))
    assert (engine.stats().num_running_reqs, engine.stats().num_waiting_reqs) == (0, 1)
    ask(engine, RESUME)
    assert tokens_of(engine) == {2: 8}


def test_sleep_is_sent_after_the_last_step_in_flight_and_then_answered() -> None:
    engine = make_engine(max_steps_in_flight=2)
    engine.add(CLIENT, add(1))
    in_flight = [scheduled(engine), scheduled(engine)]
    assert ask(engine, SLEEP) == []
    num_tokens = 0
    while in_flight:
        assert not engine.is_sleep_due
        for outputs in engine.update(answer(engine, in_flight.pop(0))).values():
            num_tokens += len(outputs.outputs)
        if (step := engine.schedule()) is not None:
            assert step.total_num_scheduled_tokens == 0, "it reports ended requests only"
            in_flight.append(step)
    assert num_tokens == 2, "the step in flight counts"
    assert engine.is_sleep_due
    engine.sleep_sent()
    assert answers(engine) == [ControlDone(9, True, PauseMode.PAUSED_ALL)]
    assert not engine.is_sleep_due
    assert engine.status().is_sleeping
    assert ask(engine, SLEEP) == [ControlDone(9, True, PauseMode.PAUSED_ALL)], "it sleeps already"


def fall_asleep(engine: EngineCore) -> None:
    ask(engine, SLEEP)
    while (step := engine.schedule()) is not None:
        engine.update(answer(engine, step))
    assert engine.is_sleep_due
    engine.sleep_sent()
    engine.take_outgoing()


def test_requests_that_slept_get_all_their_tokens() -> None:
    engine = make_engine()
    engine.add(CLIENT, add(1))
    run_step(engine)
    fall_asleep(engine)
    assert engine.stats().kv_cache_usage == 0.0
    engine.add(CLIENT, add(2))
    assert engine.schedule() is None
    ask(engine, RESUME)
    assert not engine.is_sleeping
    assert tokens_of(engine) == {1: 8, 2: 8}


def test_a_pause_does_not_wake_a_sleeper() -> None:
    engine = make_engine()
    fall_asleep(engine)
    engine.add(CLIENT, add(1))
    for mode in MODES:
        [done] = ask(engine, PAUSE, pause_mode=mode)
        assert (done.ok, done.pause_mode) == (True, PauseMode.PAUSED_ALL)
        assert engine.is_sleeping
        assert engine.schedule() is None


def test_a_resume_before_the_sleep_began_fails_the_sleep() -> None:
    engine = make_engine()
    engine.add(CLIENT, add(1))
    step = scheduled(engine)
    assert ask(engine, SLEEP) == []
    engine.control(OTHER, Control(3, RESUME))
    assert [
        (client, m.ok) for client, m in engine.take_outgoing() if isinstance(m, ControlDone)
    ] == [
        (CLIENT, False),
        (OTHER, True),
    ]
    engine.update(answer(engine, step))
    while engine.has_unfinished:
        run_step(engine)
        assert not engine.is_sleep_due


@pytest.mark.parametrize("mode", MODES)
def test_a_pause_outlives_the_workers(mode: PauseMode) -> None:
    """A pause of new requests admits requests that have run before."""
    engine = make_engine()
    if mode is PauseMode.PAUSED_ALL:
        engine.add(CLIENT, add(1))
        run_step(engine)
    ask(engine, PAUSE, pause_mode=mode)
    if mode is PauseMode.PAUSED_NEW:
        engine.add(CLIENT, add(1))
    engine.lose_workers()
    engine.adopt_workers(FACTS)
    assert engine.pause_mode is mode
    assert engine.schedule() is None
    ask(engine, RESUME)
    assert tokens_of(engine) == {1: 8}


def test_new_workers_of_a_sleeping_engine_are_put_to_sleep() -> None:
    engine = make_engine()
    fall_asleep(engine)
    engine.lose_workers()
    assert not engine.is_sleep_due
    engine.adopt_workers(FACTS)
    assert engine.schedule() is None
    assert engine.is_sleep_due


def test_the_cache_is_reset_only_where_nothing_uses_it_or_all_that_runs_gives_way() -> None:
    engine = make_engine()
    prompt = list(range(3, 40))
    engine.add(CLIENT, add(1, prompt))
    run_step(engine)
    assert [done.ok for done in ask(engine, RESET)] == [False]
    assert [done.ok for done in ask(engine, RESET, reset_running_requests=True)] == [True]
    assert engine.stats().kv_cache_usage == 0.0
    assert tokens_of(engine) == {1: 8}
    assert [done.ok for done in ask(engine, RESET)] == [True]
    engine.add(CLIENT, add(2, prompt, max_tokens=1))
    [(_, row)] = run_all(engine)
    assert row.num_cached_tokens == 0


@pytest.mark.parametrize("action", [PAUSE, SLEEP])
def test_drain_ends_a_pause_and_allows_no_other(action: ControlAction) -> None:
    engine = make_engine()
    engine.add(CLIENT, add(1))
    ask(engine, action)
    engine.drain()
    engine.take_outgoing()
    assert [done.ok for done in ask(engine, action)] == [False]
    assert tokens_of(engine) == {1: 8}
    assert engine.is_drained


def test_without_workers_ever_controls_are_answered() -> None:
    engine = EngineCore(configure(model="null"))
    assert ask(engine, PAUSE) == [ControlDone(9, False, PauseMode.RUNNING)]


def test_what_is_restored_does_not_undo_what_was_asked_for_since() -> None:
    """A client extends or ends the pause while the core is down; another one restores its own."""
    for asked, mode in ((PauseMode.PAUSED_ALL, PauseMode.PAUSED_ALL), (None, PauseMode.RUNNING)):
        engine = make_engine()
        ask(engine, RESUME) if asked is None else ask(engine, PAUSE, pause_mode=asked)
        engine.control(OTHER, Control(3, PAUSE, PauseMode.PAUSED_NEW, restores=True))
        engine.control(OTHER, Control(4, SLEEP, restores=True))
        assert answers(engine) == [ControlDone(n, False, mode) for n in (3, 4)]
        assert not engine.status().is_sleeping


@pytest.mark.parametrize("modes", [MODES, MODES[::-1]])
def test_of_two_pauses_that_are_restored_the_stiller_one_holds(modes: list[PauseMode]) -> None:
    """Their clients connect in any order; each of them may end it."""
    engine = make_engine()
    ask(engine, RESET)
    for mode in modes:
        engine.control(OTHER, Control(3, PAUSE, mode, restores=True))
    assert engine.status().pause_mode is PauseMode.PAUSED_ALL
    assert ask(engine, PAUSE, pause_mode=PauseMode.PAUSED_NEW)
    assert engine.status().pause_mode is PauseMode.PAUSED_NEW


def test_a_pause_outlives_the_client_that_asked() -> None:
    engine = make_engine()
    ask(engine, PAUSE)
    engine.drop_client(CLIENT)
    assert engine.pause_mode is PauseMode.PAUSED_ALL


def test_a_reconnected_client_gets_no_answer_to_controls_of_its_old_connection() -> None:
    engine = make_engine()
    for client in (CLIENT, OTHER):
        engine.control(client, Control(9, RESUME))
    engine.drop_client(CLIENT)
    assert [client for client, _ in engine.take_outgoing()] == [OTHER]

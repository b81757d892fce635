"""Adapters in whose loads workers die are suspected, tried alone, and refused."""

import pytest

from core_proc.engine import EngineCore
from core_proc.recovery.adapter_trials import MAX_KNOWN, REFUSED_POINTS, AdapterTrials
from protocol.adapters import Adapter
from protocol.api_core import ControlDone, ErrorCode, Refused
from protocol.core_worker import (
    AdapterLoaded,
    LoadAdapter,
)
from tests.core.adapter_engine import (
    A,
    B,
    adapted,
    answer_oldest,
    control,
    ended_controls,
    load_all,
    make_engine,
    new_ids,
    refusals,
)
from tests.core.engine_bench import CLIENT, FACTS, add, answer, scheduled


def die(engine: EngineCore, *, is_fault: bool = True, in_step: bool = False) -> None:
    """Let the workers die, of a fault or of a signal from outside; others take their place."""
    engine.lose_workers()
    engine.attribute_death(is_fault=is_fault, in_step=in_step)
    engine.adopt_workers(FACTS)


def test_an_adapter_whose_load_kills_workers_is_refused_and_others_continue() -> None:
    """The first death leaves two suspects, each of which is loaded alone then."""
    engine = make_engine(max_loras=2)
    engine.add(CLIENT, adapted(1, A))
    engine.add(CLIENT, adapted(2, B))
    engine.add(CLIENT, add(3))
    engine.control(CLIENT, control(4, B))
    assert engine.take_adapters() == [LoadAdapter(A), LoadAdapter(B)]
    scheduled(engine)
    die(engine)
    assert engine.take_adapters() == [LoadAdapter(A)]
    assert engine.schedule() is None, "a death is that of the load"
    engine.answered(AdapterLoaded(A.adapter_id))
    assert new_ids(scheduled(engine)) == [1, 3]
    assert engine.take_adapters() == [], "a step is in flight"
    assert engine.schedule() is None
    engine.update(answer_oldest(engine))
    assert engine.take_adapters() == [LoadAdapter(B)]
    assert engine.schedule() is None
    assert refusals(engine) == {}
    die(engine)
    mail = engine.take_outgoing()
    [refused] = [message for _, message in mail if isinstance(message, Refused)]
    assert (refused.request_id, refused.error.code) == (2, ErrorCode.QUARANTINED)
    assert "adapter 'b': workers died when they loaded it" in refused.error.message
    [answered] = [message for _, message in mail if isinstance(message, ControlDone)]
    assert (answered.number, answered.code) == (4, ErrorCode.QUARANTINED)
    assert engine.take_adapters() == [LoadAdapter(A)], "as always: it is not a suspect"
    engine.answered(AdapterLoaded(A.adapter_id))
    assert new_ids(scheduled(engine)) == [1, 3]
    refused_now = engine.add(CLIENT, adapted(5, B))
    assert refused_now is not None
    assert refused_now.error.code is ErrorCode.QUARANTINED
    changed = Adapter("b", B.path, b"B" * 32)
    assert engine.add(CLIENT, adapted(6, changed)) is None, "other files are another adapter"


def test_one_signal_from_outside_during_a_load_delays_no_other_request() -> None:
    """Workers may be killed often, as long as a load ends in between."""
    engine = make_engine()
    engine.add(CLIENT, add(1, max_tokens=1000))
    for number in range(2, 12):
        engine.add(CLIENT, adapted(number, A))
        assert engine.take_adapters() == [LoadAdapter(A)]
        assert new_ids(scheduled(engine)) == [1]
        die(engine, is_fault=False)
        load_all(engine)
        assert new_ids(scheduled(engine)) == [1, number]
        engine.abort(CLIENT, [number])
        die(engine, is_fault=False, in_step=True)
    assert refusals(engine) == {}


@pytest.mark.parametrize(
    ("causes", "num_deaths"),
    [([True], 2), ([False], 4), ([True, False], 3), ([False, True], 3), ([False, False, True], 3)],
)
def test_deaths_during_a_load_are_bounded_whatever_their_causes(
    causes: list[bool], num_deaths: int
) -> None:
    """The last cause is that of all further deaths; innocent adapters and requests end well."""
    engine = make_engine(max_loras=2)
    engine.add(CLIENT, adapted(1, A))
    engine.add(CLIENT, adapted(2, B))
    engine.add(CLIENT, add(3))
    died = 0
    for _ in range(100):
        messages = engine.take_adapters()
        if LoadAdapter(A) in messages:
            is_alone = messages == [LoadAdapter(A)]
            die(engine, is_fault=causes[min(died, len(causes) - 1)])
            died += 1
            continue
        for message in messages:
            if isinstance(message, LoadAdapter):
                engine.answered(AdapterLoaded(message.adapter.adapter_id))
        if (step := engine.schedule()) is not None:
            engine.update(answer(engine, step))
    assert died == num_deaths
    assert is_alone, "the last one"
    assert refusals(engine) == {1: ErrorCode.QUARANTINED}
    assert not engine.has_unfinished


def kill_until_refused(engine: EngineCore, adapter: Adapter, *, is_fault: bool = False) -> int:
    """Let the workers die in each load of an adapter; returns how many did."""
    died = 0
    while LoadAdapter(adapter) in engine.take_adapters():
        die(engine, is_fault=is_fault)
        died += 1
    return died


def test_a_refused_adapter_is_tried_again_when_it_is_loaded_again() -> None:
    engine = make_engine()
    engine.add(CLIENT, adapted(1, A))
    assert kill_until_refused(engine, A) == 4
    engine.now += 1e6
    refused = engine.add(CLIENT, adapted(2, A))
    assert refused is not None
    assert refused.error.code is ErrorCode.QUARANTINED
    engine.take_outgoing()
    for number, is_fault, num_deaths in ((3, True, 1), (4, False, 2)):
        engine.control(CLIENT, control(number, A))
        assert kill_until_refused(engine, A, is_fault=is_fault) == num_deaths
        assert [(n, ok) for n, ok, _ in ended_controls(engine)] == [(number, False)]
    engine.control(CLIENT, control(5, A))
    engine.add(CLIENT, add(6))
    assert engine.take_adapters() == [LoadAdapter(A)]
    assert engine.schedule() is None, "a suspect is loaded alone"
    engine.answered(AdapterLoaded(A.adapter_id))
    assert ended_controls(engine) == [(5, True, "")]
    assert engine.add(CLIENT, adapted(7, A)) is None
    assert len(new_ids(scheduled(engine))) == 2


def succeed(engine: EngineCore, *, is_explained: bool) -> EngineCore:
    """Let the core die, together with its workers; their death is explained to the next one."""
    records = engine.take_loads()
    engine = EngineCore(engine._config)
    engine.inherit_loads(records or [])
    if is_explained:
        engine.attribute_death(is_fault=False)
    engine.adopt_workers(FACTS)
    return engine


def test_a_successor_core_knows_suspects_and_what_is_refused() -> None:
    """Core and workers may die together in each load."""
    engine, died = make_engine(), 0
    for request_id in range(20):
        refused = engine.add(CLIENT, adapted(request_id, A))
        if refused is not None:
            break
        assert engine.take_adapters() == [LoadAdapter(A)]
        engine = succeed(engine, is_explained=True)
        died += 1
    assert died == 4
    assert refused is not None
    assert refused.error.code is ErrorCode.QUARANTINED
    engine = succeed(engine, is_explained=False)
    assert engine.add(CLIENT, adapted(30, A)) is not None
    engine.control(CLIENT, control(31, A))
    load_all(engine)
    assert engine.add(CLIENT, adapted(32, A)) is None


def test_cores_that_die_alone_make_no_suspect() -> None:
    engine = make_engine()
    for request_id in range(20):
        assert engine.add(CLIENT, adapted(request_id, A)) is None
        engine.add(CLIENT, add(100 + request_id))
        assert engine.take_adapters() == [LoadAdapter(A)]
        assert engine.schedule() is not None
        engine = succeed(engine, is_explained=False)


def test_a_cause_that_is_known_late_does_not_count_against_a_load_that_has_ended() -> None:
    engine = make_engine()
    engine.add(CLIENT, adapted(1, A))
    engine.add(CLIENT, add(2))
    engine.take_adapters()
    engine.lose_workers()
    engine.adopt_workers(FACTS)
    load_all(engine)
    engine.attribute_death()
    engine.lose_workers()
    engine.adopt_workers(FACTS)
    assert engine.take_adapters() == [LoadAdapter(A)]
    assert new_ids(scheduled(engine)) == [2], "it is not a suspect"


def test_only_a_death_in_a_load_alone_refuses_an_adapter() -> None:
    """The cause of a first death is known when the next workers load both beside a step."""
    engine = make_engine(max_loras=2)
    engine.add(CLIENT, adapted(1, A))
    engine.add(CLIENT, adapted(2, B))
    engine.add(CLIENT, add(3))
    engine.take_adapters()
    engine.lose_workers()
    engine.adopt_workers(FACTS)
    assert engine.take_adapters() == [LoadAdapter(A), LoadAdapter(B)]
    assert new_ids(scheduled(engine)) == [3]
    engine.attribute_death(in_step=False)
    die(engine)
    assert refusals(engine) == {}
    assert engine.take_adapters() == [LoadAdapter(A)]
    die(engine)
    assert refusals(engine) == {1: ErrorCode.QUARANTINED}


def test_the_number_of_adapters_that_are_remembered_is_bounded() -> None:
    trials = AdapterTrials()
    for adapter_id in range(1, MAX_KNOWN + 2):
        for _ in range(REFUSED_POINTS):
            trials.begin(adapter_id, is_alone=True)
            trials.workers_lost()
            trials.attribute_death(is_fault=False)
        assert trials.refuses(adapter_id)
    assert not trials.refuses(1), "the first one"
    records = trials.take_records()
    assert records is not None
    assert len(records) == MAX_KNOWN
    successor = AdapterTrials()
    successor.inherit(records)
    assert all(successor.refuses(adapter_id) for adapter_id in range(2, MAX_KNOWN + 2))


def test_a_request_and_not_the_adapter_that_was_loaded_meanwhile_is_found() -> None:
    """While the request is searched for, nothing is computed during a load."""
    engine = make_engine()
    engine.add(CLIENT, add(1, prompt=[6, 6, 6]))
    engine.add(CLIENT, adapted(2, A))
    deaths = 0
    for _ in range(200):
        messages = engine.take_adapters()
        step = engine.schedule()
        if step is not None and 1 in new_ids(step):
            deaths += 1
            die(engine, in_step=True)
            continue
        for message in messages:
            if isinstance(message, LoadAdapter):
                engine.answered(AdapterLoaded(message.adapter.adapter_id))
        if step is not None:
            engine.update(answer(engine, step))
        if not engine.has_unfinished:
            break
    assert refusals(engine) == {1: ErrorCode.QUARANTINED}
    assert deaths <= 4
    assert not engine.has_unfinished


def test_no_adapter_is_loaded_during_steps_while_a_crashing_request_is_searched() -> None:
    engine = make_engine()
    for number in range(4):
        engine.add(CLIENT, add(number, prompt=[5, 6, number]))
    scheduled(engine)
    die(engine, in_step=True)
    step = scheduled(engine)
    engine.add(CLIENT, adapted(9, A))
    assert engine.take_adapters() == []
    assert engine.schedule() is None
    engine.update(answer(engine, step))
    assert engine.take_adapters() == [LoadAdapter(A)]
    assert engine.schedule() is None
    engine.answered(AdapterLoaded(A.adapter_id))
    assert engine.schedule() is not None

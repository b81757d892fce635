"""The time in the queue, which the first output of a request states."""

import msgspec
import pytest

from core_proc.engine import EngineCore
from protocol.api_core import RequestOutput
from tests.core.engine_bench import CLIENT, FACTS, add, make_engine, run_all, run_step

ADDED, ADMITTED, LATER = 10.0, 12.0, 19.0


def rows(engine: EngineCore, request_id: int) -> list[RequestOutput]:
    """Run everything, and return the outputs of one request."""
    return [row for _, row in run_all(engine) if row.request_id == request_id]


def begun(**fields: object) -> EngineCore:
    """Return an engine whose only request has been admitted, and has no output yet."""
    engine = make_engine()
    engine.now = ADDED
    engine.add(CLIENT, msgspec.structs.replace(add(1), **fields))
    engine.now = ADMITTED
    assert engine.schedule() is not None
    engine.now = LATER
    return engine


def test_the_first_output_has_the_time_until_the_first_admission() -> None:
    engine = make_engine(max_num_seqs=1)
    engine.now = ADDED
    engine.add(CLIENT, add(1, max_tokens=2))
    engine.add(CLIENT, add(2, max_tokens=3))
    found = []
    while engine.has_unfinished:
        found += run_step(engine)[CLIENT].outputs
        engine.now += 1.5
    times = [(row.request_id, row.queue_time_s) for row in found]
    assert times == [(1, 0.0), (1, None), (2, 3.0), (2, None), (2, None)]


def test_a_lost_worker_does_not_change_it() -> None:
    engine = begun()
    engine.lose_workers()
    engine.adopt_workers(FACTS)
    assert [row.queue_time_s for row in rows(engine, 1)][:2] == [ADMITTED - ADDED, None]


def test_a_preemption_does_not_change_it() -> None:
    engine = begun()
    engine.lose_workers()  # so that no token is late
    engine.adopt_workers(FACTS)
    assert engine.schedule() is not None
    [request] = engine.scheduler.running
    engine.scheduler.preempt(request)
    engine.scheduler.in_flight.clear()
    request.num_late_tokens = 0
    engine.now += 1.0
    assert rows(engine, 1)[0].queue_time_s == ADMITTED - ADDED


def test_at_a_new_core_it_begins_with_the_acceptance_at_the_client() -> None:
    """This is so after the death of a core, and at another replica."""
    engine = begun(resent=True, age_s=5.0)
    engine.lose_workers()
    engine.adopt_workers(FACTS)
    assert rows(engine, 1)[0].queue_time_s == pytest.approx(5.0 + ADMITTED - ADDED)


def test_a_request_that_comes_with_outputs_has_none() -> None:
    """Its client knows the time from the core that has computed them."""
    engine = begun(output_token_ids=[7], resent=True, age_s=5.0)
    engine.lose_workers()
    engine.adopt_workers(FACTS)
    assert {row.queue_time_s for row in rows(engine, 1)} == {None}

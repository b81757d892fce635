"""KnownEngine: which requests an engine gets, by the statuses of its core and the time without."""

import msgspec
import pytest

from protocol.api_core import EngineState, EngineStats, PauseMode, Status
from protocol.client.errors import EngineFailed, Overloaded
from protocol.client.expected_model import ExpectedModel
from protocol.client.known_engine import KnownEngine
from protocol.process.model_files import ModelFiles
from tests.protocol.fake_core import FACTS, READY, RECOVERING, STARTING

HERE, THERE = "ipc:///run/core.sock", "tcp://10.0.0.2:7000"
DRAINING = msgspec.structs.replace(READY, state=EngineState.DRAINING)
STALL_S = 10.0


def make_engine(
    address: str = HERE, own: ModelFiles | None = None, *, is_replica: bool = False
) -> KnownEngine:
    return KnownEngine(address, STALL_S, 0.0, ExpectedModel(own), is_replica=is_replica)


def counting(num_steps: int = 0, running: int = 0, waiting: int = 0) -> Status:
    stats = EngineStats(num_steps=num_steps, num_running_reqs=running, num_waiting_reqs=waiting)
    return msgspec.structs.replace(READY, stats=stats)


@pytest.mark.parametrize("is_replica", [False, True])
def test_an_engine_without_facts_is_starting(is_replica: bool) -> None:
    engine = make_engine(is_replica=is_replica)
    text = "starting, or all replicas have left$" if is_replica else "the engine is starting$"
    with pytest.raises(Overloaded, match=text):
        engine.require_facts()
    engine.take(STARTING, 0.0, 0)
    with pytest.raises(Overloaded, match=text):
        engine.require_facts()


def test_facts_are_kept_while_a_successor_starts_and_requests_are_accepted() -> None:
    engine = make_engine()
    for status in (READY, RECOVERING, STARTING):
        engine.take(status, 0.0, 0)
        assert engine.require_facts() == FACTS
        assert engine.fingerprint == FACTS.fingerprint
        assert engine.is_ready is (status is READY)
    longer = msgspec.structs.replace(FACTS, dtype="other")
    engine.take(msgspec.structs.replace(READY, facts=longer), 0.0, 0)
    assert engine.fingerprint == longer.fingerprint != FACTS.fingerprint


def test_an_engine_that_does_not_serve_in_time_gets_no_requests_until_it_does() -> None:
    engine = make_engine()
    engine.take(READY, 0.0, 0)
    for _ in range(10):
        engine.take(RECOVERING, 0.0, 0)  # its core reports, but it has no workers
        engine.tick(1.0)
    assert engine.require_facts() == FACTS
    engine.tick(1.0)
    with pytest.raises(EngineFailed, match="no engine has served for 10 s"):
        engine.require_facts()
    assert not engine.is_stalled_for_good
    engine.tick(STALL_S)
    assert engine.is_stalled_for_good
    engine.take(READY, 0.0, 0)
    assert engine.require_facts() == FACTS
    assert not engine.is_stalled


@pytest.mark.parametrize("is_replica", [False, True])
def test_a_draining_engine_gets_only_the_rest_of_accepted_requests(is_replica: bool) -> None:
    engine = make_engine(is_replica=is_replica)
    engine.take(DRAINING, 0.0, 0)
    assert engine.require_facts(is_resent=True) == FACTS
    with pytest.raises(Overloaded, match="no other one has joined$" if is_replica else "down$"):
        engine.require_facts()
    engine.tick(STALL_S)
    engine.take(DRAINING, 0.0, 0)
    engine.tick(1.0)
    assert not engine.is_stalled, "it finishes its requests"


def test_an_engine_with_another_model_gets_no_requests() -> None:
    engine = make_engine(THERE, ModelFiles(weights="w1"))
    wrong = msgspec.structs.replace(READY, facts=msgspec.structs.replace(FACTS, weights="w2"))
    right = msgspec.structs.replace(READY, facts=msgspec.structs.replace(FACTS, weights="w1"))
    engine.take(wrong, 0.0, 0)
    assert not engine.is_ready
    for text in (engine.why_not_ready(is_connected=True), engine.holding_error.message):
        assert text.endswith("model 'fake' has weights w2 instead of w1")
    with pytest.raises(EngineFailed, match="w2 instead of w1"):
        engine.require_facts(is_resent=True)
    engine.take(STARTING, 0.0, 0)
    assert engine.other_model, "its successor's model is not known yet"
    engine.take(right, 0.0, 0)
    assert engine.is_ready
    assert engine.require_facts().weights == "w1"
    assert "none with its fingerprint has served" in engine.holding_error.message


def test_requests_of_others_are_those_that_are_not_open_here() -> None:
    engine = make_engine()
    for running, waiting, num_own, num_others in [(3, 4, 2, 5), (1, 0, 2, 0), (0, 0, 0, 0)]:
        engine.take(counting(running=running, waiting=waiting), 0.0, num_own)
        assert engine.num_other_requests == num_others


def test_a_core_makes_progress_by_steps_or_if_it_has_none_to_compute() -> None:
    engine = make_engine()
    paused = msgspec.structs.replace(counting(8, running=1), pause_mode=PauseMode.PAUSED_ALL)
    times = []
    for now, (status, num_own) in enumerate(
        [
            (counting(7, running=1), 1),
            (counting(7, running=1), 1),
            (counting(8, running=1), 1),
            (counting(8), 1),  # the request has not arrived there yet
            (counting(8), 0),
            (paused, 1),
            (counting(8, waiting=1), 0),
            (counting(0, waiting=1), 0),  # another core
        ],
        start=1,
    ):
        engine.take(status, float(now), num_own)
        assert engine.last_status_time == now
        times.append(engine.last_progress_time)
    assert times == [1, 1, 3, 3, 5, 6, 6, 8]

"""The engine in one process: its bounds, its refusals, and more prompts than its queue takes."""

import pytest

from protocol.api_core import ErrorCode
from protocol.ledger import RequestFailed
from protocol.sampling import SamplingParams
from protocol.settings import configure
from scripts.inprocess import InprocEngine


def small_engine() -> InprocEngine:
    return InprocEngine(configure(model="null", max_num_waiting=2, max_num_seqs=2))


def test_generate_takes_more_prompts_than_the_queue() -> None:
    engine = small_engine()
    tokens: dict[int, int] = {}
    for output in engine.generate([[5, n] for n in range(20)], SamplingParams(max_tokens=3)):
        tokens[output.request_id] = tokens.get(output.request_id, 0) + len(output.token_ids)
    assert list(tokens.values()) == [3] * 20
    assert sorted(tokens) == list(tokens)


def test_generate_refuses_a_bad_prompt_before_any_of_them_runs() -> None:
    engine = small_engine()
    with pytest.raises(RequestFailed) as caught:
        next(engine.generate([[1], [2], [-1]], SamplingParams()))
    assert caught.value.error.param == "prompt"
    assert not engine.has_unfinished


def test_generate_left_early_leaves_nothing_running() -> None:
    engine = small_engine()
    outputs = engine.generate([[5, n] for n in range(4)], SamplingParams(max_tokens=100))
    next(outputs)
    outputs.close()
    assert not engine.has_unfinished


def test_refused_request_leaves_nothing_behind() -> None:
    engine = small_engine()
    for _ in range(2):
        engine.submit([5], SamplingParams(max_tokens=2))
    for _ in range(5):
        with pytest.raises(RequestFailed) as caught:
            engine.submit([5], SamplingParams(max_tokens=2))
        assert caught.value.error.code is ErrorCode.OVERLOADED
    with pytest.raises(RequestFailed) as caught:
        engine.submit([5], SamplingParams(temperature=5.0))
    assert caught.value.error.param == "temperature"
    finished = []
    while engine.has_unfinished:
        finished += [output.request_id for output in engine.step() if output.finish_reason]
    assert len(finished) == 2
    assert len(engine._ledger) == 0

"""The engine in one process: bounds, refusals, and more prompts than its queue holds."""

import msgspec
import pytest

from core_proc import engine as engine_module
from protocol.api_core import ErrorCode, PauseMode, RequestOutput
from protocol.client.errors import RequestFailed
from protocol.config.settings import configure
from protocol.kv_events import BlocksStored
from protocol.sampling import FinishReason, Grammar, GrammarKind, SamplingParams
from scripts import inprocess
from scripts.inprocess import InprocEngine
from worker_proc.null.runner import NullRunner
from worker_proc.runner import PORTABLE_ATTENTION


def small_engine() -> InprocEngine:
    return InprocEngine(configure(model="null", max_num_waiting=2, max_num_seqs=2))


@pytest.mark.parametrize(("attention", "count"), [(PORTABLE_ATTENTION, 1), ("native kernel", 0)])
def test_missing_kernels_are_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, attention: str, count: int
) -> None:
    runner = NullRunner(msgspec.structs.replace(small_engine().facts, device="cpu"))
    monkeypatch.setattr(runner, "attention", attention)
    monkeypatch.setattr(inprocess, "make_runner", lambda *_: runner)
    small_engine()
    found = [record.message for record in caplog.records if "attention is slower" in record.message]
    assert len(found) == count


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


def test_refused_request_leaves_no_state() -> None:
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


def test_pause_sleep_and_reset_change_no_token() -> None:
    params = SamplingParams(max_tokens=40)
    prompt = list(range(5, 50))
    expected = collect(InprocEngine(configure(model="null")), prompt, params)
    engine = InprocEngine(configure(model="null"))
    engine.submit(prompt, params)
    tokens: list[int] = []
    for i in range(400):
        tokens += [t for output in engine.step() for t in output.token_ids]
        if i % 10 == 3:
            assert engine.pause()
            assert engine.step() == []
        elif i % 10 == 5:
            assert engine.sleep()
            assert engine.stats().kv_cache_usage == 0.0
            assert engine.step() == []
            assert engine.wake_up()
        elif i % 10 == 7:
            assert not engine.has_unfinished or not engine.reset_prefix_cache()
            assert engine.reset_prefix_cache(reset_running_requests=True)
        elif i % 10 == 4:
            assert engine.resume()
    assert tokens == expected


def collect(engine: InprocEngine, prompt: list[int], params: SamplingParams) -> list[int]:
    return [t for output in engine.generate([prompt], params) for t in output.token_ids]


@pytest.mark.parametrize("mode", [PauseMode.PAUSED_NEW, PauseMode.PAUSED_ALL])
def test_generate_on_a_paused_engine_raises_instead_of_waiting(mode: PauseMode) -> None:
    engine = small_engine()
    engine.pause(mode)
    with pytest.raises(RuntimeError, match=mode):
        next(engine.generate([[5]], SamplingParams()))
    assert not engine.has_unfinished
    engine.resume()
    assert len(collect(engine, [5], SamplingParams(max_tokens=3))) == 3


def test_a_request_that_fails_on_its_own_ends_with_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def row(*_: object) -> RequestOutput:
        raise RuntimeError("a bug")

    engine = small_engine()
    monkeypatch.setattr(engine_module, "output_row", row)
    [output] = engine.generate([[5]], SamplingParams())
    assert (output.token_ids, output.finish_reason) == ([], FinishReason.ERROR)
    assert len(engine._ledger) == 0


def test_kv_events_list_what_the_cache_stored() -> None:
    engine = InprocEngine(configure(model="null", enable_kv_events=True))
    collect(engine, list(range(5, 45)), SamplingParams(max_tokens=1))
    stored = [e for e in engine.take_kv_events() if isinstance(e, BlocksStored)]
    assert [t for event in stored for t in event.token_ids] == list(range(5, 37))
    assert engine.take_kv_events() == []


def test_outputs_follow_a_grammar_and_a_bad_one_fails_alone() -> None:
    engine = InprocEngine(configure(model="null"))
    letters = SamplingParams(max_tokens=40, grammar=Grammar(GrammarKind.REGEX, "[ab]{10}"))
    wrong = SamplingParams(max_tokens=40, grammar=Grammar(GrammarKind.REGEX, "[ab"))
    good, bad = engine.submit([5, 6], letters), engine.submit([5, 6], wrong)
    rows: list[RequestOutput] = []
    while engine.has_unfinished:
        rows += engine.step()
    ids = [token_id for row in rows if row.request_id == good for token_id in row.token_ids]
    assert len(ids) == 11
    assert set(ids[:10]) <= {3 + ord("a"), 3 + ord("b")}
    assert [row.finish_reason for row in rows if row.request_id == bad] == [FinishReason.ERROR]

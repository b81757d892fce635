"""The core's loop and several ranks, each of which must answer."""

import msgspec
import pytest

from protocol.adapters import Adapter
from protocol.api_core import AddRequest, EngineState
from protocol.core_worker import (
    AdapterLoaded,
    BlocksLoaded,
    CompileGrammar,
    GrammarCompiled,
    LoadAdapter,
    SchedulerOutput,
    StepFailed,
    UnloadAdapter,
)
from protocol.sampling import Grammar, GrammarKind, SamplingParams
from tests.core.loop_bench import CORE_EPOCH, FACTS, Bench, WorkerEnd


def test_a_rank_with_another_model_is_not_adopted(caplog: pytest.LogCaptureFixture) -> None:
    other = msgspec.structs.replace(FACTS, model="other", vocab_size=900)
    with Bench(tensor_parallel_size=2) as bench:
        first = WorkerEnd(bench, 5)
        second = WorkerEnd(bench, 6, rank=1, facts=other)
        first.hello()
        second.hello()
        bench.until(lambda: second.is_killed)
        assert bench.state is EngineState.STARTING
        assert "rank 1 has model 'other' instead of 'fake', vocab_size 900 " in caplog.text
        assert not first.is_killed
        WorkerEnd(bench, 7).hello()
        WorkerEnd(bench, 8, rank=1).join()
        assert bench.state is EngineState.READY
        assert not first.adopted, "it belongs to the group before"


def test_a_successor_of_one_rank_waits_for_those_of_the_others() -> None:
    """A rank whose death was not noticed yet is not adopted with it."""
    with Bench(tensor_parallel_size=2) as bench:
        first, second = WorkerEnd(bench, 5), WorkerEnd(bench, 6, rank=1)
        first.hello()
        second.join()
        successors = WorkerEnd(bench, 7), WorkerEnd(bench, 8, rank=1)
        successors[0].hello()
        bench.until(lambda: bench.state is EngineState.RECOVERING)
        second.kill_process()
        successors[1].join()
        bench.until(lambda: successors[0].adopted)
        assert (first.adopted, second.adopted) == ([6], [6])


@pytest.mark.parametrize("error", ["", "no memory"])
def test_a_grammar_is_ready_when_every_rank_has_answered(error: str) -> None:
    """Otherwise a rank would compile it in the step, while the others wait."""
    with Bench(tensor_parallel_size=2) as bench:
        first, second = WorkerEnd(bench, 5), WorkerEnd(bench, 6, rank=1)
        first.answers = second.answers = False
        first.hello()
        second.join()
        client = bench.client()
        grammar = Grammar(GrammarKind.REGEX, "a*")
        params = SamplingParams(max_tokens=4, grammar=grammar)
        client.send(CORE_EPOCH, AddRequest(1, [5, 6, 7], params))
        bench.until(lambda: second.unanswered)
        epoch, message = second.unanswered.pop()
        assert isinstance(message, CompileGrammar)
        first.unanswered.clear()
        first.send(epoch, GrammarCompiled(message.grammar_id))
        for _ in range(20):
            bench.turn()
        assert not second.unanswered
        second.send(epoch, GrammarCompiled(message.grammar_id, error))
        if error:
            bench.until(lambda: client.refused)
            assert client.refused[0].error.message == error
        else:
            bench.until(lambda: second.unanswered)
            assert isinstance(second.unanswered[0][1], SchedulerOutput)


@pytest.mark.parametrize("errors", [("", ""), ("", "not finite"), ("no", "no")])
def test_an_adapter_is_loaded_when_every_rank_has_answered(errors: tuple[str, str]) -> None:
    """If some ranks cannot load it, the others drop it."""
    adapter = Adapter("a", "/a", b"1" * 32)
    with Bench(tensor_parallel_size=2, enable_lora=True) as bench:
        first, second = WorkerEnd(bench, 5), WorkerEnd(bench, 6, rank=1)
        first.answers = second.answers = False
        first.hello()
        second.join()
        client = bench.client()
        client.add(1, adapter=adapter)
        bench.until(lambda: second.unanswered)
        epoch, message = second.unanswered.pop()
        assert message == LoadAdapter(adapter)
        second.send(epoch, AdapterLoaded(adapter.adapter_id, errors[1]))
        for _ in range(20):
            bench.turn()
        assert not second.unanswered
        first.send(epoch, AdapterLoaded(adapter.adapter_id, errors[0]))
        if not any(errors):
            bench.until(lambda: second.unanswered)
            assert isinstance(second.unanswered[0][1], SchedulerOutput)
            return
        bench.until(lambda: client.refused)
        assert client.refused[0].error.message == f"adapter 'a': {errors[1]}"
        if not all(errors):
            bench.until(lambda: second.unanswered)
            assert second.unanswered[0][1] == UnloadAdapter(adapter.adapter_id)


def test_blocks_are_loaded_as_far_as_every_rank_has_read_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Bench(tensor_parallel_size=2) as bench:
        first, second = WorkerEnd(bench, 5), WorkerEnd(bench, 6, rank=1)
        first.hello()
        second.join()
        loaded: list[BlocksLoaded] = []
        monkeypatch.setattr(bench.engine, "answered", loaded.append)
        epoch = first.adopted[-1]
        first.send(epoch, BlocksLoaded(7, 5, 100))
        first.send(epoch, BlocksLoaded(7, 4, 200))  # again
        first.send(epoch, BlocksLoaded(8, 9, 100))
        second.send(epoch, BlocksLoaded(8, 3, 50))
        bench.until(lambda: loaded)
        assert loaded == [BlocksLoaded(8, 3, 100)]
        second.send(epoch, BlocksLoaded(7, 6, 300))
        bench.until(lambda: len(loaded) == 2)
        assert loaded[1] == BlocksLoaded(7, 4, 300)


def test_the_error_of_any_rank_is_logged_and_ends_the_adoption(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Bench(tensor_parallel_size=2) as bench:
        first, second = WorkerEnd(bench, 5), WorkerEnd(bench, 6, rank=1)
        first.answers = second.answers = False
        first.hello()
        second.join()
        bench.client().add(1)
        bench.until(lambda: second.unanswered)
        epoch, step = second.unanswered[0]
        second.send(epoch, StepFailed(step.step_id, "no memory for the collective"))
        bench.until(lambda: bench.state is EngineState.RECOVERING)
        assert "failed on rank 1: no memory for the collective" in caplog.text

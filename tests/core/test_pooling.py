"""Requests for a vector in the engine: one output without tokens, whatever happens before it."""

from collections.abc import Sequence

import msgspec
import pytest

from core_proc.outputs.check import InvalidWorkerOutput
from protocol.api_core import ErrorCode, StepOutputs
from protocol.core_worker import ModelRunnerOutput
from protocol.sampling import (
    MAX_EMBEDDING_SIZE,
    Pooling,
    PoolingType,
    SamplingParams,
    pooling_params,
)
from tests.core.pooling_bench import CLIENT, FACTS, Bench
from worker_proc.null.runner import NullRunner

LAST, MEAN = Pooling(), Pooling(PoolingType.MEAN)


def vectors_of(
    prompts: Sequence[Sequence[int]], pooling: Pooling, **settings: object
) -> dict[int, bytes]:
    bench = Bench(**settings)
    for number, prompt in enumerate(prompts):
        assert bench.add(number, prompt, pooling_params(pooling)) is None
    bench.run()
    assert not bench.core.has_unfinished
    assert bench.core.stats().generation_tokens == 0
    return bench.vectors()


@pytest.mark.parametrize("pooling", [LAST, MEAN, Pooling(dimensions=3)])
@pytest.mark.parametrize("num_speculative_tokens", [0, 3])
def test_each_prompt_gets_its_vector_however_it_is_scheduled(
    pooling: Pooling, num_speculative_tokens: int
) -> None:
    prompts = [[5 + n] * (1 + 9 * n) for n in range(8)] * 2
    more = {"num_speculative_tokens": num_speculative_tokens}
    want = vectors_of(prompts, pooling, max_num_seqs=1, enable_prefix_caching=False)
    assert {len(vector) for vector in want.values()} == {4 * (pooling.dimensions or 16)}
    assert len(set(want.values())) == 8
    assert vectors_of(prompts, pooling, **more) == want
    assert vectors_of(prompts, pooling, max_num_batched_tokens=16, max_num_seqs=16, **more) == want


@pytest.mark.parametrize("pooling", [LAST, MEAN])
@pytest.mark.parametrize("length", [1, 2, 20])
def test_vectors_of_one_step_fit_into_its_answer(pooling: Pooling, length: int) -> None:
    """This holds for any budget and any number of requests; all come to their ends."""
    bench = Bench(max_num_batched_tokens=2**14, max_num_seqs=512)
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    for number in range(400):
        bench.add(number, [5 + number] * length, pooling_params(pooling))
    for number in range(400, 440):
        bench.add(number, [7] * 40, params)
    bench.run()
    assert bench.largest_answer == 128
    assert bench.largest_answer * 4 * MAX_EMBEDDING_SIZE <= 2**23
    assert sum(len(row.token_ids) for n in range(400, 440) for row in bench.rows[n]) == 40 * 30
    bench.rows = {number: bench.rows[number] for number in range(400)}
    assert len(bench.vectors()) == 400


def test_a_mean_computes_the_whole_prompt_and_a_last_token_only_what_is_missing() -> None:
    prompt = list(range(5, 69))
    for pooling, num_cached in ((LAST, 63), (MEAN, 0)):
        bench = Bench()
        for number in range(2):
            bench.add(number, prompt, pooling_params(pooling))
            bench.run()
        assert [bench.rows[n][0].num_cached_tokens for n in range(2)] == [0, num_cached]
        assert len(set(bench.vectors().values())) == 1


def test_a_preempted_mean_is_not_swapped_but_computed_again() -> None:
    bench = Bench(max_num_batched_tokens=16, max_num_seqs=16)
    bench.add(1, [5] * 100, pooling_params(MEAN))
    for _ in range(3):
        bench.step()
    scheduler = bench.core.scheduler
    [victim] = scheduler.running
    assert scheduler.swapper.prefers(victim, victim.num_computed_tokens)
    scheduler.preempt(victim)
    assert victim.swapped_out is None
    bench.run()
    assert bench.core.scheduler.num_scheduled_tokens == 3 * 16 + 100
    assert bench.vectors() == {1: vectors_of([[5] * 100], MEAN)[0]}


def test_lost_workers_and_a_resend_give_the_same_vector_once() -> None:
    want = vectors_of([[5] * 100], MEAN)[0]
    bench = Bench(max_num_batched_tokens=16, max_num_seqs=16)
    bench.add(1, [5] * 100, pooling_params(MEAN))
    for _ in range(3):
        bench.step()
    bench.core.lose_workers()
    bench.runner = NullRunner(FACTS)
    bench.runner.reset()
    bench.core.adopt_workers(FACTS, 0.001)
    bench.step()
    bench.add(1, [5] * 100, pooling_params(MEAN))
    bench.run()
    assert bench.vectors() == {1: want}


@pytest.mark.parametrize(
    ("params", "param"),
    [
        (SamplingParams(max_tokens=2, pooling=LAST), "max_tokens"),
        (pooling_params(Pooling(dimensions=17)), "dimensions"),
    ],
)
def test_bad_poolings_are_refused_by_name(params: SamplingParams, param: str) -> None:
    refused = Bench().add(1, [5], params)
    assert refused is not None
    assert refused.error.param == param


def test_a_model_without_vectors_refuses_them() -> None:
    refused = Bench(msgspec.structs.replace(FACTS, embedding_size=0)).add(
        1, [5], pooling_params(LAST)
    )
    assert refused is not None
    assert refused.error.param == "pooling"


WHOLE = msgspec.structs.replace(
    FACTS, generates=False, computes_whole_prompts=True, default_pooling=PoolingType.CLS
)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 64, "max_num_seqs": 8},
        {"max_num_scheduled_tokens": 16, "max_num_seqs": 300, "max_num_batched_tokens": 4096},
        {"long_prefill_token_threshold": 7, "max_num_partial_prefills": 2, "max_num_seqs": 16},
        {"scheduling_policy": "priority", "preempt_for_priority": True, "max_num_seqs": 4},
    ],
    ids=str,
)
def test_whole_prompts_are_never_cut(settings: dict[str, object]) -> None:
    """This holds for all settings, and past the vectors that one answer holds."""
    bench = Bench(WHOLE, **settings)
    pooling = pooling_params(Pooling(PoolingType.CLS))
    longest = WHOLE.max_model_len
    lengths = [1, 2, 500, longest, 33, *[20] * 300, longest]
    for number, length in enumerate(lengths):
        assert bench.add(number, [5 + number] * length, pooling) is None
    while (step := bench.core.schedule()) is not None:
        for new in step.scheduled_new_reqs:
            assert new.num_computed_tokens == 0
            assert step.num_scheduled_tokens.get(new.req_id, 1) == new.num_prompt_tokens
        output = bench.runner.execute(step)
        assert len(output.pooled) == len(step.scheduled_new_reqs) <= 128
        for row in bench.core.update(output).get(CLIENT, StepOutputs([])).outputs:
            bench.rows.setdefault(row.request_id, []).append(row)
    assert not bench.core.has_unfinished
    assert len(bench.vectors()) == len(lengths)


def test_a_prompt_for_a_vector_may_fill_the_context_in_chunks() -> None:
    bench = Bench(max_num_batched_tokens=256)
    longest = FACTS.max_model_len
    assert bench.add(1, [5] * longest, pooling_params(MEAN)) is None
    refused = bench.add(2, [5] * (longest + 1), pooling_params(MEAN))
    assert refused is not None
    assert refused.error.code is ErrorCode.TOO_LONG
    bench.run()
    assert set(bench.vectors()) == {1}


def test_a_model_without_output_layer_refuses_to_generate() -> None:
    refused = Bench(WHOLE).add(1, [5], SamplingParams(max_tokens=3))
    assert refused is not None
    assert (refused.error.code, refused.error.param) == (ErrorCode.UNSUPPORTED, "model")


def test_a_classification_head_allows_its_own_pooling_only() -> None:
    facts = msgspec.structs.replace(WHOLE, num_labels=3, embedding_size=3)
    bench = Bench(facts)
    refused = bench.add(1, [5], pooling_params(LAST))
    assert refused is not None
    assert refused.error.param == "pooling"
    assert bench.add(2, [5], pooling_params(Pooling(PoolingType.CLS))) is None


@pytest.mark.parametrize(
    "pooled", [{2: b"1234"}, {1: b"123"}, {1: b""}, {1: b"1234"}, {7: b"1234" * 3}]
)
def test_a_worker_that_returns_other_vectors_misbehaves(pooled: dict[int, bytes]) -> None:
    bench = Bench()
    bench.add(1, [5], pooling_params(Pooling(dimensions=3)))
    bench.add(2, [5], SamplingParams(max_tokens=3))
    with pytest.raises(InvalidWorkerOutput, match="vector"):
        bench.step({"pooled": pooled})


def test_a_missing_vector_fails_its_request_alone() -> None:
    bench = Bench()
    bench.add(1, [5], pooling_params(LAST))
    bench.add(2, [5], SamplingParams(max_tokens=3, ignore_eos=True))
    bench.step({"pooled": {}})
    bench.run()
    assert bench.refused == {1: ErrorCode.INTERNAL}
    assert sum(len(row.token_ids) for row in bench.rows[2]) == 3


def test_late_vectors_of_aborted_requests_are_dropped() -> None:
    bench = Bench()
    bench.add(1, [5], pooling_params(LAST))
    step = bench.core.schedule()
    assert step is not None
    bench.core.abort(CLIENT, [1])
    output: ModelRunnerOutput = bench.runner.execute(step)
    assert output.pooled
    assert bench.core.update(output) == {}

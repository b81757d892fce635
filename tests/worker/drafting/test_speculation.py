"""Drafts change no token and no logprob of real models."""

from pathlib import Path

import pytest

from tests.worker.checkpoints import ARCHITECTURES, Architecture, build_checkpoint
from tests.worker.compressed_models import DEEPSEEK_V4
from tests.worker.drafting.oracle import (
    MAX_TOKENS,
    NUM_DRAFTS,
    PARAMS,
    PROMPTS,
    Oracle,
    make_params,
)
from tests.worker.mini_scheduler import MiniScheduler
from tests.worker.parity import make_runner
from tests.worker.steps import new, step
from worker_proc.drafting import repetitions
from worker_proc.drafting.ngram_index import NgramIndex
from worker_proc.model_runner import ModelRunner

NUM_BLOCKS = 400
WHOLE, CHUNK = 64, 5
MODELS = [a for a in ARCHITECTURES if a.name in ("llama", "gemma3")]


@pytest.mark.usefixtures("_backend")
@pytest.mark.parametrize(
    ("_backend", "dtype"),
    [("sdpa", "float32"), ("native", "float32"), ("native", "bfloat16")],
    indirect=["_backend"],
)
@pytest.mark.parametrize(
    "architecture",
    [*MODELS, pytest.param(DEEPSEEK_V4, marks=pytest.mark.slow)],
    ids=lambda a: a.name,
)
def test_tokens_and_logprobs_are_those_without_drafts(
    architecture: Architecture,
    dtype: str,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if architecture is DEEPSEEK_V4 and "sdpa" in request.node.name:
        pytest.skip("it needs the kernels")
    is_bitwise = request.node.callspec.params["_backend"] == "native"
    build_checkpoint(tmp_path, architecture.config())
    swap = {"swap_space_bytes": 2 << 20}
    plain = make_runner(tmp_path, NUM_BLOCKS, dtype, **swap)
    alone = MiniScheduler(plain, WHOLE)
    expected = alone.run(PROMPTS, PARAMS)
    assert len({tuple(output) for output in expected}) > len(PARAMS) // 2
    assert any(len(output) < MAX_TOKENS for output in expected), "one ended by EOS"
    texts = [prompt + output for prompt, output in zip(PROMPTS, expected, strict=True)]
    guessing = make_runner(tmp_path, NUM_BLOCKS, dtype, num_speculative_tokens=NUM_DRAFTS, **swap)
    for drafter in (NgramIndex, Oracle):
        Oracle.texts = texts
        monkeypatch.setattr(repetitions, "NgramIndex", drafter)
        for chunk, swap_every, spare in ((WHOLE, 0, 0), (CHUNK, 7, 3)):
            mini_scheduler = MiniScheduler(guessing, chunk, swap_every, spare)
            assert mini_scheduler.run(PROMPTS, PARAMS) == expected, (drafter, chunk)
            check_logprobs(mini_scheduler, alone, is_exact=is_bitwise)
            check_happened(mini_scheduler, drafter, everything=not spare)
    Oracle.texts = ()


def check_logprobs(mini_scheduler: MiniScheduler, alone: MiniScheduler, is_exact: bool) -> None:
    if is_exact:
        assert mini_scheduler.logprobs == alone.logprobs
    for found, expected in zip(mini_scheduler.logprobs, alone.logprobs, strict=True):
        assert [entry.token_id for entry in found] == [entry.token_id for entry in expected]
        assert [entry.logprob for entry in found] == pytest.approx(
            [entry.logprob for entry in expected], abs=0.1
        )


def check_happened(
    mini_scheduler: MiniScheduler, drafter: type[NgramIndex], everything: bool
) -> None:
    num_accepted = sum(accepted for _, accepted in mini_scheduler.accepted)
    assert num_accepted > 20
    # How long the repetitions of a random model are is chance; the oracle's drafts are not.
    most = {NUM_DRAFTS} if drafter is Oracle else set()
    assert {accepted for _, accepted in mini_scheduler.accepted} >= {0, 1, 2} | most
    if drafter is Oracle and everything:
        assert {a for m, a in mini_scheduler.accepted if m == NUM_DRAFTS} == set(
            range(NUM_DRAFTS + 1)
        )


@pytest.fixture(scope="module")
def guessing(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    directory = tmp_path_factory.mktemp("llama")
    build_checkpoint(directory, ARCHITECTURES[0].config())
    return make_runner(directory, NUM_BLOCKS, num_speculative_tokens=NUM_DRAFTS)


def test_drafts_are_announced_for_those_that_sampled(guessing: ModelRunner) -> None:
    guessing.reset()
    output = guessing.execute(step(0, 12, [new(1), new(2)], counts={1: 6, 2: 6}))
    assert (output.num_sampled_tokens, output.num_draft_tokens) == ([], [])
    bound = make_params(logit_bias={9: 1e3}, max_tokens=9)
    circling = type(new(3))(
        *(3, new(3).token_ids, 6, bound, [[31, 32, 33, 34]], 0, 0),
    )
    guessing.execute(step(1, 8, [circling], counts={3: 6}))
    guessing.execute(step(2, 3))
    output = guessing.execute(step(3, 1, counts={1: 0, 2: 0}))
    assert (output.sampled_token_ids, output.num_draft_tokens) == ([9], [NUM_DRAFTS])
    output = guessing.execute(step(4, 5, counts={1: 0, 2: 0, 3: 5}))
    assert output.sampled_token_ids == [9] * 5
    assert output.num_sampled_tokens == [5]


def test_indices_grow_with_the_chunks_of_a_prompt(guessing: ModelRunner) -> None:
    guessing.reset()
    guessing.execute(step(0, 4, [new(1)], counts={1: 4}))
    index = guessing._mirror.requests[1].ngram_index
    assert index is not None
    assert len(index._before) == 4
    guessing.execute(step(1, 2, counts={1: 2}))
    assert len(index._before) == 7

"""Drafts change no token and no logprob of a model in ranks or in stages."""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest
from transformers import LlamaConfig

from tests.worker.checkpoints import SHAPE, build_checkpoint
from tests.worker.drafting.oracle import NUM_DRAFTS, PARAMS, PROMPTS, Oracle
from tests.worker.driving import Run
from tests.worker.parallel.ranks import Ranks
from tests.worker.parallel.stages import DEEP, Stages
from tests.worker.recurrent_models import RECURRENT
from worker_proc.drafting import repetitions
from worker_proc.parallel.pipe import StagePipe
from worker_proc.runner import Runner

PLAIN = {"max_num_batched_tokens": 300}
GUESSING = PLAIN | {"num_speculative_tokens": NUM_DRAFTS, "adaptive_speculation": False}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "model"
    build_checkpoint(directory, LlamaConfig(**DEEP))
    return directory


@cache
def without_drafts(divide: Callable[..., Stages | Ranks], checkpoint: Path, *numbers: int) -> Run:
    """Return what a model computes without drafts; `numbers` are those of stages or ranks."""
    return divide(checkpoint, *numbers).drive(PROMPTS, PARAMS, **PLAIN)


def check(run: Run, expected: Run) -> None:
    assert run.output_token_ids == expected.output_token_ids
    assert run.logprobs == expected.logprobs
    assert 20 < run.num_accepted_drafts < run.num_drafts


@pytest.mark.parametrize(
    ("num_stages", "num_shares"),
    [(2, 1), *(pytest.param(*one, marks=pytest.mark.slow) for one in ((3, 1), (2, 2)))],
)
def test_stages_verify_drafts(
    num_stages: int,
    num_shares: int,
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Drafts are right and wrong, beside prompts in chunks, preempted, swapped and alone."""
    expected = without_drafts(Stages, checkpoint, num_stages, num_shares)
    guessing = Stages(
        checkpoint,
        num_stages,
        num_shares,
        num_speculative_tokens=NUM_DRAFTS,
        swap_space_bytes=2 << 20,
    )
    check(guessing.drive(PROMPTS, PARAMS, **GUESSING), expected)
    texts = [a + b for a, b in zip(PROMPTS, expected.output_token_ids, strict=True)]
    monkeypatch.setattr(Oracle, "texts", texts)
    monkeypatch.setattr(repetitions, "NgramIndex", Oracle)
    check(guessing.drive(PROMPTS, PARAMS, **GUESSING), expected)
    check(guessing.drive(PROMPTS, PARAMS, **GUESSING | {"max_num_seqs": 1}), expected)
    check(guessing.drive(PROMPTS, PARAMS, **GUESSING | {"max_num_batched_tokens": 17}), expected)
    began = [tokens[:4] for tokens in expected.output_token_ids]
    resumed = guessing.drive(PROMPTS, PARAMS, outputs=began, **GUESSING)
    assert resumed.output_token_ids == expected.output_token_ids
    few_blocks = {"num_blocks": 45, "num_host_blocks": guessing.facts.num_host_blocks}
    run = guessing.drive(PROMPTS, PARAMS, **GUESSING | few_blocks)
    check(run, expected)
    assert run.num_preemptions > 0
    # As if results came after the step that builds on them, which they may in all ranks but one.
    monkeypatch.setattr(StagePipe, "has_tokens", lambda pipe, step: False)
    check(guessing.drive(PROMPTS, PARAMS, **GUESSING), expected)


def test_ranks_verify_drafts(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = without_drafts(Ranks, checkpoint, 2)
    guessing = Ranks(checkpoint, 2, num_speculative_tokens=NUM_DRAFTS)
    check(guessing.drive(PROMPTS, PARAMS, **GUESSING), expected)
    texts = [a + b for a, b in zip(PROMPTS, expected.output_token_ids, strict=True)]
    monkeypatch.setattr(Oracle, "texts", texts)
    monkeypatch.setattr(repetitions, "NgramIndex", Oracle)
    check(guessing.drive(PROMPTS, PARAMS, **GUESSING | {"max_num_batched_tokens": 17}), expected)


@pytest.fixture
def draft(tmp_path: Path) -> str:
    """Return a smaller model, which agrees with the other one now and then."""
    build_checkpoint(tmp_path / "draft", LlamaConfig(**SHAPE))
    return str(tmp_path / "draft")


BY_MODEL = GUESSING | {"has_draft_model": True}


def which_draft(runners: Sequence[Runner]) -> list[bool]:
    """Return which runners have a draft model."""
    drafters = [getattr(runner, "_drafter", None) for runner in runners]
    return [drafter is not None and drafter.model is not None for drafter in drafters]


def check_draft_model(
    runners: Sequence[Runner], answering_rank: int, run: Run, expected: Run
) -> None:
    assert run.output_token_ids == expected.output_token_ids
    assert run.logprobs == expected.logprobs
    assert 20 < run.num_accepted_drafts < run.num_drafts
    assert which_draft(runners) == [rank == answering_rank for rank in range(len(runners))]


@pytest.mark.parametrize(
    ("num_stages", "num_shares"), [(2, 1), pytest.param(2, 2, marks=pytest.mark.slow)]
)
def test_a_draft_model_drafts_at_the_first_rank_of_the_last_stage(
    num_stages: int, num_shares: int, checkpoint: Path, draft: str
) -> None:
    """It does so for prompts in chunks, preempted and resumed requests."""
    expected = without_drafts(Stages, checkpoint, num_stages, num_shares)
    stages = Stages(
        checkpoint,
        num_stages,
        num_shares,
        speculative_model=draft,
        num_speculative_tokens=NUM_DRAFTS,
        swap_space_bytes=2 << 20,
    )
    rank = num_stages * num_shares - num_shares
    few_blocks = {"num_blocks": 45, "num_host_blocks": stages.facts.num_host_blocks}
    for settings in ({}, {"max_num_batched_tokens": 17}, {"max_num_seqs": 1}, few_blocks):
        run = stages.drive(PROMPTS, PARAMS, **BY_MODEL | settings)
        check_draft_model(stages.runners, rank, run, expected)
    assert run.num_preemptions > 0
    began = [tokens[:4] for tokens in expected.output_token_ids]
    resumed = stages.drive(PROMPTS, PARAMS, outputs=began, **BY_MODEL)
    assert resumed.output_token_ids == expected.output_token_ids


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_all_ranks_verify_the_drafts_of_one(num_ranks: int, checkpoint: Path, draft: str) -> None:
    expected = without_drafts(Ranks, checkpoint, num_ranks)
    ranks = Ranks(checkpoint, num_ranks, speculative_model=draft, num_speculative_tokens=NUM_DRAFTS)
    for settings in ({}, {"max_num_batched_tokens": 17}, {"max_num_seqs": 1}):
        run = ranks.drive(PROMPTS, PARAMS, **BY_MODEL | settings)
        check_draft_model(ranks.runners, 0, run, expected)


@pytest.mark.slow
def test_a_draft_model_drafts_for_recurrent_layers_in_stages(tmp_path: Path, draft: str) -> None:
    [architecture] = [one for one in RECURRENT if one.name == "qwen3_5_text"]
    build_checkpoint(tmp_path / "model", architecture.config())
    expected = Stages(tmp_path / "model", 1).drive(PROMPTS, PARAMS, **PLAIN)
    stages = Stages(
        tmp_path / "model", 2, speculative_model=draft, num_speculative_tokens=NUM_DRAFTS
    )
    run = stages.drive(PROMPTS, PARAMS, **BY_MODEL)
    check_draft_model(stages.runners, 1, run, expected)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["qwen3_5_text", "lfm2", "granitemoehybrid"])
@pytest.mark.parametrize("divide", [Stages, Ranks])
def test_a_recurrent_draft_model_is_whole_at_one_rank(
    divide: type[Stages] | type[Ranks], name: str, tmp_path: Path
) -> None:
    """Nearly all drafts of the model itself are right: divided, its sums have other orders."""
    [architecture] = [one for one in RECURRENT if one.name == name]
    model = tmp_path / "model"
    build_checkpoint(model, architecture.config())
    expected = divide(model, 2).drive(PROMPTS, PARAMS, **PLAIN)
    parts = divide(model, 2, speculative_model=str(model), num_speculative_tokens=NUM_DRAFTS)
    answering_rank = 1 if divide is Stages else 0
    assert which_draft(parts.runners) == [rank == answering_rank for rank in range(2)]
    few_blocks = {"num_blocks": 60, "num_host_blocks": 0}
    for settings in ({}, {"max_num_batched_tokens": 17}, few_blocks):
        run = parts.drive(PROMPTS, PARAMS, **BY_MODEL | {"mamba_block_size": 8} | settings)
        assert run.output_token_ids == expected.output_token_ids
        assert run.logprobs == expected.logprobs
        assert 20 < 0.95 * run.num_drafts < run.num_accepted_drafts
    assert run.num_preemptions > 0

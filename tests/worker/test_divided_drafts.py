"""Drafts from repetitions change no token and no logprob of a model in ranks or in stages."""

from pathlib import Path

import pytest
from transformers import LlamaConfig

from tests.worker.checkpoints import build_checkpoint
from tests.worker.driving import Run
from tests.worker.test_ranks import Ranks
from tests.worker.test_speculation import NUM_DRAFTS, PARAMS, PROMPTS, Oracle
from tests.worker.test_stages import DEEP, Stages
from worker_proc.drafting import repetitions
from worker_proc.parallel.pipe import StagePipe

PLAIN = {"max_num_batched_tokens": 300}
GUESSING = PLAIN | {"num_speculative_tokens": NUM_DRAFTS, "adaptive_speculation": False}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    build_checkpoint(tmp_path / "model", LlamaConfig(**DEEP))
    return tmp_path / "model"


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
    """Right and wrong ones, beside prompts in chunks, preempted, swapped and by itself."""
    plain = Stages(checkpoint, num_stages, num_shares)
    expected = plain.drive(PROMPTS, PARAMS, **PLAIN)
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
    expected = Ranks(checkpoint, 2).drive(PROMPTS, PARAMS, **PLAIN)
    guessing = Ranks(checkpoint, 2, num_speculative_tokens=NUM_DRAFTS)
    check(guessing.drive(PROMPTS, PARAMS, **GUESSING), expected)
    texts = [a + b for a, b in zip(PROMPTS, expected.output_token_ids, strict=True)]
    monkeypatch.setattr(Oracle, "texts", texts)
    monkeypatch.setattr(repetitions, "NgramIndex", Oracle)
    check(guessing.drive(PROMPTS, PARAMS, **GUESSING | {"max_num_batched_tokens": 17}), expected)

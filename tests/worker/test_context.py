"""The context of a model: vLLM's lengths where frequencies are scaled, and the tokens beyond."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from protocol.sampling import SamplingParams
from tests.worker.checkpoints import SHAPE, build_checkpoint
from tests.worker.driving import drive
from tests.worker.test_loader import load
from tests.worker.test_parity import generate, make_runner
from worker_proc.errors import UnsupportedModel
from worker_proc.loading.context import context_length

ORIGINAL = {"original_max_position_embeddings": 64}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


def scaled(stated: int, **rope: Any) -> LlamaConfig:
    shape = SHAPE | {"max_position_embeddings": stated}
    return LlamaConfig(**shape, rope_parameters={"rope_theta": 10000.0, **rope})


@pytest.mark.parametrize(
    ("stated", "rope", "length"),
    [
        (64, {"rope_type": "default"}, 64),
        (64, {"rope_type": "yarn", "factor": 4.0}, 256),
        (80, {"rope_type": "yarn", "factor": 4.0, **ORIGINAL}, 256),
        (256, {"rope_type": "yarn", "factor": 4.0, **ORIGINAL}, 256),
        (64, {"rope_type": "linear", "factor": 2.5}, 160),
        (256, {"rope_type": "llama3", "factor": 4.0, **LLAMA3, **ORIGINAL}, 256),
    ],
)
def test_lengths_are_those_of_vllm(stated: int, rope: dict[str, Any], length: int) -> None:
    assert context_length(scaled(stated, **rope), has_attention=True) == length


def test_a_context_that_is_cut_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert context_length(scaled(256, **LONGROPE, **ORIGINAL), has_attention=True) == 64
    assert "cut from 256 (max_position_embeddings) to 64 tokens: longrope" in caplog.text


def test_frequencies_of_the_longest_text_are_refused(tmp_path: Path) -> None:
    build_checkpoint(tmp_path, scaled(64, rope_type="dynamic", factor=2.0))
    with pytest.raises(UnsupportedModel, match="rope_type is dynamic, whose frequencies depend"):
        load(tmp_path)


@pytest.mark.parametrize("kind", ["yarn", "linear"])
def test_tokens_beyond_the_stated_length_are_those_of_transformers(
    kind: str, tmp_path: Path
) -> None:
    config = scaled(64, rope_type=kind, factor=4.0)
    build_checkpoint(tmp_path, config)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    prompts = [[7 + 3 * i % 241 for i in range(size)] for size in (50, 100, 200)]
    expected = [generate(model, prompt, 30) for prompt in prompts]
    runner = make_runner(tmp_path, 200)
    assert runner.facts.max_model_len == 256
    run = drive(runner, prompts, SamplingParams(max_tokens=30, temperature=0.0), max_num_seqs=4)
    assert run.output_token_ids == expected

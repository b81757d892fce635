"""The context of a model: vLLM's lengths where frequencies are scaled, and the tokens beyond."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, PhimoeConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM
from transformers.models.phimoe.modeling_phimoe import PhimoeRotaryEmbedding

from protocol.sampling import SamplingParams
from tests.worker.checkpoints import SHAPE, build_checkpoint
from tests.worker.driving import drive
from tests.worker.parity import generate, make_runner
from worker_proc.loading.context import context_length
from worker_proc.loading.frequencies import fix_frequencies

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
        (64, {"rope_type": "dynamic", "factor": 2.0}, 128),
        (64, {"rope_type": "dynamic", "factor": 2.0, "alpha": 1000.0}, 64),
        (256, {"rope_type": "llama3", "factor": 4.0, **LLAMA3, **ORIGINAL}, 256),
    ],
)
def test_lengths_are_those_of_vllm(stated: int, rope: dict[str, Any], length: int) -> None:
    assert context_length(scaled(stated, **rope), has_attention=True) == length


@pytest.mark.parametrize(("asked", "length"), [(None, 64), (64, 64), (65, 256), (300, 256)])
def test_longrope_is_as_long_as_it_is_asked_for(asked: int | None, length: int) -> None:
    config = scaled(256, **LONGROPE, **ORIGINAL)
    assert context_length(config, has_attention=True, max_model_len=asked) == length


def test_a_context_that_is_cut_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        context_length(scaled(256, **LONGROPE, **ORIGINAL), has_attention=True)
    assert "the context is 64 tokens, with the short factors of longrope" in caplog.text
    assert "--max-model-len serves up to 256 (max_position_embeddings)" in caplog.text


PROMPTS = [[7 + 3 * i % 241 for i in range(size)] for size in (10, 50, 100, 200)]


def tokens_of(config: LlamaConfig, directory: Path, prompts: list[list[int]]) -> list[list[int]]:
    """Return the tokens of transformers for a checkpoint's weights and another configuration."""
    model = AutoModelForCausalLM.from_pretrained(directory, config=config, dtype=torch.float32)
    return [generate(model, prompt, 30) for prompt in prompts]


@pytest.mark.parametrize("max_model_len", [64, 256])
def test_all_texts_have_the_factors_of_the_longest_one(max_model_len: int, tmp_path: Path) -> None:
    """A step has texts of any length; long texts have the factors of transformers."""
    config = scaled(256, **LONGROPE, **ORIGINAL)
    build_checkpoint(tmp_path, config)
    prompts = [prompt for prompt in PROMPTS if len(prompt) + 30 <= max_model_len]
    own = tokens_of(config, tmp_path, prompts)
    kind = "short_factor" if max_model_len == 64 else "long_factor"
    of_kind = dict.fromkeys(("short_factor", "long_factor"), LONGROPE[kind])
    expected = tokens_of(scaled(256, **LONGROPE | of_kind, **ORIGINAL), tmp_path, prompts)
    runner = make_runner(tmp_path, 200, max_model_len=max_model_len)
    assert runner.facts.exact_resume, runner.facts.exact_resume_reason
    assert runner.facts.decoder == "native"
    params = SamplingParams(max_tokens=30, temperature=0.0)
    run = drive(runner, prompts, params, max_num_seqs=4)
    assert run.output_token_ids == expected
    for prompt, found, of_own in zip(prompts, run.output_token_ids, own, strict=True):
        if max_model_len == 64 or len(prompt) > 64:
            assert found == of_own


@pytest.mark.parametrize(("model_len", "factor", "scale"), [(64, 1.0, 1.2), (256, 2.0, 1.3)])
def test_a_forward_that_looks_at_positions_sees_the_longest_text(
    model_len: int, factor: float, scale: float
) -> None:
    """That of Phi-3.5-MoE chooses a scale, and computes frequencies for short texts each time."""
    scales = {"short_mscale": 1.2, "long_mscale": 1.3, "rope_theta": 10_000.0}
    shape = {key: SHAPE[key] for key in ("hidden_size", "num_attention_heads")}
    rotary = PhimoeRotaryEmbedding(
        PhimoeConfig(
            **shape, max_position_embeddings=256, rope_parameters=LONGROPE | ORIGINAL | scales
        )
    )
    fix_frequencies(rotary, model_len)
    positions = torch.tensor([[0, 1, 5, 63]])
    cosines, sines = rotary(torch.zeros(1, 4, 1), positions)
    angles = positions[..., None] / 10_000.0 ** (torch.arange(0, 16, 2) / 16) / factor
    torch.testing.assert_close(cosines, torch.cat([angles.cos()] * 2, -1) * scale)
    torch.testing.assert_close(sines, torch.cat([angles.sin()] * 2, -1) * scale)
    on_meta = rotary(torch.zeros(1, 4, 1, device="meta"), positions.to("meta"))
    assert [(part.shape, part.device.type) for part in on_meta] == [(cosines.shape, "meta")] * 2


def test_dynamic_ntk_has_the_base_of_its_longest_text(tmp_path: Path) -> None:
    """That is vLLM's: the base is stretched for the stated length times the factor."""
    factor, dim = 4.0, 16
    build_checkpoint(tmp_path, scaled(64, rope_type="dynamic", factor=factor))
    base = 10_000.0 * (factor * factor - (factor - 1)) ** (dim / (dim - 2))
    shape = SHAPE | {"max_position_embeddings": 256}
    fixed = LlamaConfig(**shape, rope_parameters={"rope_theta": base, "rope_type": "default"})
    expected = tokens_of(fixed, tmp_path, PROMPTS)
    runner = make_runner(tmp_path, 200)
    assert runner.facts.max_model_len == 256
    assert runner.facts.exact_resume, runner.facts.exact_resume_reason
    params = SamplingParams(max_tokens=30, temperature=0.0)
    run = drive(runner, PROMPTS, params, max_num_seqs=4)
    assert run.output_token_ids == expected


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

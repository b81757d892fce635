"""Of a checkpoint with several parts, the one that writes texts is served, and only it is read."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from tests.families.configs import small_config
from tests.worker.checkpoints import SHAPE, build_checkpoint, load_model
from tests.worker.driving import drive
from tests.worker.parity import (
    GREEDY,
    MAX_TOKENS,
    MODES,
    ROOMY,
    is_greedy,
    make_prompts,
    make_runner,
)
from worker_proc.errors import CheckpointError

WEIGHTS = "model.safetensors"


def write_omni(directory: Path, **further: torch.Tensor) -> Any:
    """Write a checkpoint of Qwen2.5-Omni: its thinker, and tensors of the parts that speak."""
    model = build_checkpoint(directory, small_config("qwen2_5_omni_thinker"))
    thinker = json.loads((directory / "config.json").read_text())
    whole = {"model_type": "qwen2_5_omni", "dtype": "float32", "thinker_config": thinker}
    (directory / "config.json").write_text(json.dumps(whole))
    tensors = load_file(directory / WEIGHTS)
    named = {f"thinker.{name}": tensor for name, tensor in tensors.items()}
    save_file(named | further, directory / WEIGHTS, {"format": "pt"})
    return model


def test_the_part_that_thinks_is_served(tmp_path: Path) -> None:
    model = write_omni(tmp_path, **{"talker.weight": torch.ones(2), "token2wav.x": torch.ones(3)})
    prompts = make_prompts()
    outputs = drive(make_runner(tmp_path, ROOMY), prompts, GREEDY, **MODES["chunked"][1])
    for prompt, output in zip(prompts, outputs.output_token_ids, strict=True):
        assert is_greedy(model, prompt, output, MAX_TOKENS)


def test_tensors_that_the_part_does_not_have_are_refused(tmp_path: Path) -> None:
    write_omni(tmp_path, **{"thinker.model.layers.0.scale": torch.ones(2)})
    with pytest.raises(CheckpointError, match=r"layers\.0\.scale, which qwen2_5_omni_thinker does"):
        load_model(tmp_path, "float32")


def test_experts_for_images_are_omitted_and_those_for_texts_are_kept(tmp_path: Path) -> None:
    """One conversion makes both of the tensors in the file."""
    build_checkpoint(tmp_path, small_config("ernie4_5_vl_moe"))
    parameters = dict(load_model(tmp_path, "float32").model.named_parameters())
    assert any("text_moe.experts" in name for name in parameters)
    assert not any("vision_moe" in name or "vision_tower" in name for name in parameters)


def test_a_tower_may_hold_indices(tmp_path: Path) -> None:
    build_checkpoint(tmp_path, small_config("nemotron_h_omni"))
    assert torch.int64 in {tensor.dtype for tensor in load_file(tmp_path / WEIGHTS).values()}
    load_model(tmp_path, "float32")


def test_a_weight_that_is_stored_as_indices_is_refused(tmp_path: Path) -> None:
    build_checkpoint(tmp_path, LlamaConfig(**SHAPE))
    tensors = load_file(tmp_path / WEIGHTS)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].long()
    save_file(tensors, tmp_path / WEIGHTS, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"misses model\.norm\.weight"):
        load_model(tmp_path, "float32")

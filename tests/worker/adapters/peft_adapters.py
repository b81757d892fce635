"""Small random adapters in PEFT's format, and transformers' models with them merged."""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from protocol.adapters import CONFIG_FILE, WEIGHTS_FILE


def linears(model: nn.Module, targets: Sequence[str]) -> Iterator[tuple[str, int, int]]:
    """Yield name, inputs and outputs of the linear layers whose names end in one of these."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | Conv1D) and name.rpartition(".")[2] in targets:
            shape = module.weight.shape
            inputs, outputs = shape if isinstance(module, Conv1D) else shape[::-1]
            yield name, inputs, outputs


def write_adapter(
    directory: Path,
    model: nn.Module,
    targets: Sequence[str],
    *,
    rank: int = 4,
    seed: int = 1,
    dtype: torch.dtype = torch.float32,
    strength: float = 1.0,
    **config: Any,
) -> Path:
    """Write an adapter whose products are about as large as the weights, times `strength`."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, inputs, outputs in linears(model, targets):
        prefix = f"base_model.model.{name}"
        down = torch.randn(rank, inputs, generator=generator) / inputs**0.5
        up = torch.randn(outputs, rank, generator=generator) / rank**0.5
        tensors[f"{prefix}.lora_A.weight"] = down.to(dtype)
        tensors[f"{prefix}.lora_B.weight"] = (strength * up).to(dtype)
    written = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "base",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": list(targets),
        "bias": "none",
        "use_dora": False,
        "use_rslora": False,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        **config,
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / CONFIG_FILE).write_text(json.dumps(written))
    save_file(tensors, directory / WEIGHTS_FILE)
    return directory


@torch.no_grad()
def merge(model: PreTrainedModel, directory: Path) -> PreTrainedModel:
    """Add an adapter to the weights of a model, in float32, by PEFT's formulas."""
    config = json.loads((directory / CONFIG_FILE).read_text())
    tensors = load_file(directory / WEIGHTS_FILE)
    model = model.float()
    for key, down in tensors.items():
        if ".lora_A." not in key:
            continue
        name = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        up = tensors[key.replace(".lora_A.", ".lora_B.")]
        rank, alpha = (
            _of_pattern(config[pattern], name, config[default])
            for pattern, default in (("rank_pattern", "r"), ("alpha_pattern", "lora_alpha"))
        )
        scale = alpha / (rank**0.5 if config["use_rslora"] else rank)
        change = scale * up.float() @ down.float()
        module = model.get_submodule(name)
        module.weight += change.T if isinstance(module, Conv1D) else change
    return model


def _of_pattern(patterns: dict[str, float], name: str, default: float) -> float:
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", name):
            return value
    return default

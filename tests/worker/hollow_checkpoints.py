"""Writes checkpoints whose weights are holes in a file: of any size, within milliseconds.

What reads them finds zeros, and takes the memory and the time that weights of this size take.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PretrainedConfig
from transformers.initialization import no_init_weights

from protocol.config.settings import configure
from worker_proc.errors import UnsupportedModel
from worker_proc.loading.text_model import auto_class
from worker_proc.startup.load_runner import load_model_runner

_TYPES = {torch.bfloat16: "BF16", torch.float32: "F32"}


def write_hollow(
    directory: Path, config: PretrainedConfig, dtype: torch.dtype = torch.bfloat16
) -> int:
    """Write a checkpoint for a configuration; returns the bytes of its weights."""
    directory.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(directory)
    with torch.device("meta"), no_init_weights():
        model = auto_class(config).from_config(config)
    header: dict[str, object] = {}
    end = 0
    tied = model.all_tied_weights_keys
    for name, tensor in model.state_dict().items():
        if name not in tied:
            first, end = end, end + tensor.numel() * dtype.itemsize
            entry = {"dtype": _TYPES[dtype], "shape": list(tensor.shape)}
            header[name] = entry | {"data_offsets": [first, end]}
    text = json.dumps(header).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return end


def assert_refused_before_weights(
    directory: Path, config: PretrainedConfig, settings: dict[str, Any], reason: str
) -> None:
    """Assert that a model is refused with these settings, for a reason, before weights are read."""
    write_hollow(directory, config)
    phases: list[str] = []
    configured = configure(model=str(directory), device="cpu", num_threads=1, **settings)
    with pytest.raises(UnsupportedModel, match=reason):
        load_model_runner(configured, lambda phase, done, total: phases.append(phase))
    assert "load_weights" not in phases

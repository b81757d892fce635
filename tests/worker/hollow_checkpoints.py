"""Writes checkpoints whose weights are holes in a file: of any size, within milliseconds.

What reads them finds zeros, and takes the memory and the time that weights of this size take.
"""

import json
from pathlib import Path

import torch
from transformers import PretrainedConfig
from transformers.initialization import no_init_weights

from worker_proc.loading.text_model import auto_class

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

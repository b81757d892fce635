"""Writes small quantized checkpoints, in the layouts of the libraries that make them.

Weights are rounded to the nearest code, group by group; every layout is packed word by word, as its
description in worker_proc/quantization states it, and by other code than it is read with.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, PretrainedConfig

from tests.worker.checkpoints import build_checkpoint
from tests.worker.quantization.bitsandbytes_layouts import bitsandbytes_int8, bitsandbytes_table
from tests.worker.quantization.float_layouts import (
    auto_round_float,
    fbgemm_fp8,
    float_quantized,
    fp8_blocks,
    fp8_number,
    fp8_tensor,
    modelopt,
    mxfp4_pack_quantized,
    mxfp8_quantized,
    nvfp4_pack_quantized,
)
from tests.worker.quantization.integer_layouts import (
    auto_round,
    awq,
    bitnet,
    gptq,
    int_quantized,
    pack_quantized,
)
from tests.worker.quantization.layouts import (
    WIDE,
    Layout,
)

LAYOUTS = (
    gptq(4, 128, is_symmetric=True),
    gptq(4, 32, is_symmetric=False),
    gptq(4, 64, is_symmetric=False, has_order=True),
    gptq(8, -1, is_symmetric=False, version=2),
    awq(64),
    awq(128),
    *map(bitnet, ("bitlinear", "autobitlinear")),
    pack_quantized(4, 32, is_symmetric=False),
    pack_quantized(4, 128, is_symmetric=True),
    pack_quantized(8, -1, is_symmetric=True),
    int_quantized(codes_rows=False),
    int_quantized(codes_rows=True),
    float_quantized("channel"),
    float_quantized("tensor"),
    fp8_blocks(),
    fp8_tensor(),
    bitsandbytes_int8(),
    bitsandbytes_table("nf4", is_nested=True),
    bitsandbytes_table("fp4", is_nested=False),
    *(fp8_number(name) for name in ("weight_scale_inv", "qscale_weight")),
    fbgemm_fp8(),
    *(nvfp4_pack_quantized(), mxfp4_pack_quantized(), mxfp8_quantized()),
    *(modelopt(algorithm) for algorithm in ("NVFP4", "W4A8_NVFP4_FP8", "FP8", "MXFP8")),
    *(auto_round(one) for one in (gptq(4, 128, is_symmetric=True), awq(64))),
    auto_round(gptq(8, -1, is_symmetric=False, version=2)),
    *map(
        auto_round_float,
        (
            *(nvfp4_pack_quantized(), mxfp4_pack_quantized(), mxfp8_quantized()),
            *map(float_quantized, ("channel", "tensor")),
        ),
    ),
)


def is_quantized(name: str, tensor: torch.Tensor) -> bool:
    """Return whether a tensor is the weight of a linear layer or an expert."""
    kept = ("embed", "lm_head", "mlp.gate.", "norm")
    return name.endswith(".weight") and tensor.dim() == 2 and not any(part in name for part in kept)


def write_quantized(
    directory: Path, layout: Layout, config: PretrainedConfig | None = None
) -> Path:
    """Write a checkpoint in a layout; returns that of the weights that it stands for."""
    dense = directory.with_name(f"{directory.name}-dense")
    for path in (directory, dense):
        build_checkpoint(path, config or LlamaConfig(**WIDE))
    stored, values = {}, {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        if is_quantized(name, tensor):
            parts, weight = layout.encode(tensor)
            layer = name.removesuffix("weight")
            stored |= {layer + part: value.contiguous() for part, value in parts.items()}
            values[name] = weight.float()
        else:
            stored[name] = values[name] = tensor
    save_file(stored, directory / "model.safetensors", {"format": "pt"})
    save_file(values, dense / "model.safetensors", {"format": "pt"})
    path = directory / "config.json"
    settings = json.loads(path.read_text()) | {"quantization_config": layout.settings}
    path.write_text(json.dumps(settings))
    return dense


def replace_tensor(directory: Path, name: str, value: torch.Tensor | None) -> None:
    """Store another value of a tensor, or one more tensor; None: leave it out."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    tensors.pop(name, None)
    if value is not None:
        tensors[name] = value
    save_file(tensors, path, {"format": "pt"})

"""Layouts of bitsandbytes, with 8 bits and with tables of 4 bits."""

import json
from typing import Any

import torch

from tests.worker.quantization.layouts import (
    Encoded,
    Layout,
)


def bitsandbytes_int8() -> Layout:
    """bitsandbytes with 8 bits, as of LLM.int8()."""

    def encode(weight: torch.Tensor) -> Encoded:
        greatest = weight.abs().amax(1)
        codes = (weight / greatest[:, None] * 127).round()
        values = codes * (greatest[:, None] / 127)
        parts = {
            "weight": codes.to(torch.int8),
            "SCB": greatest,
            "weight_format": torch.tensor(0, dtype=torch.uint8),
        }
        return parts, values

    settings = {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False}
    return Layout("bitsandbytes_int8", settings, encode, "bitsandbytes int8")


NF4 = (
    *(-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0.0),
    *(0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0),
)
FP4 = (
    *(0.0, 0.0052083333, 0.6666667, 1.0, 0.3333333, 0.5, 0.1666667, 0.25),
    *(-0.0, -0.0052083333, -0.6666667, -1.0, -0.3333333, -0.5, -0.1666667, -0.25),
)


def bitsandbytes_table(name: str, *, block_size: int = 64, is_nested: bool) -> Layout:
    """bitsandbytes with 4 bits; nested scales are codes, too ("double quantization")."""
    table = torch.tensor(NF4 if name == "nf4" else FP4)

    def encode(weight: torch.Tensor) -> Encoded:
        blocks = weight.reshape(-1, block_size)
        scales = blocks.abs().amax(1)
        state: dict[str, Any] = {"quant_type": name, "blocksize": block_size, "dtype": "float32"}
        parts = {"weight.absmax": scales, "weight.quant_map": table.clone()}
        if is_nested:
            parts, scales, extra = _nest(scales)
            parts["weight.quant_map"] = table.clone()
            state |= extra
        distance = (blocks / scales[:, None]).unsqueeze(2) - table
        codes = distance.abs().argmin(2)
        pairs = codes.flatten().view(-1, 2)
        text = json.dumps(state | {"shape": list(weight.shape)}).encode()
        parts[f"weight.quant_state.bitsandbytes__{name}"] = torch.tensor(list(text)).to(torch.uint8)
        parts["weight"] = (pairs[:, :1] * 16 + pairs[:, 1:]).to(torch.uint8)
        return parts, (table[codes] * scales[:, None]).view(weight.shape)

    settings = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": name,
        "bnb_4bit_use_double_quant": is_nested,
        "bnb_4bit_quant_storage": "uint8",
    }
    nested = "_nested" if is_nested else ""
    return Layout(f"bitsandbytes_{name}{nested}", settings, encode, f"bitsandbytes {name}")


def _nest(scales: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor, dict[str, Any]]:
    """Return the tensors of scales that are codes, the scales, and what a layer states of them."""
    size, offset = 256, float(scales.mean())
    padded = torch.nn.functional.pad(scales - offset, (0, -len(scales) % size)).view(-1, size)
    greatest = padded.abs().amax(1)
    places = torch.linspace(-1.0, 1.0, 256)
    codes = ((padded / greatest[:, None] + 1.0) * 127.5).round().clamp(0, 255)
    codes = codes.flatten()[: len(scales)].to(torch.uint8)
    values = places[codes.int()] * greatest.repeat_interleave(size)[: len(scales)] + offset
    parts = {
        "weight.absmax": codes,
        "weight.nested_absmax": greatest,
        "weight.nested_quant_map": places,
    }
    state = {"nested_blocksize": size, "nested_dtype": "float32", "nested_offset": offset}
    return parts, values, state

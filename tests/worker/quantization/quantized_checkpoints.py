"""Writes small quantized checkpoints, in the layouts of the libraries that make them.

Weights are rounded to the nearest code, group by group; every layout is packed word by word, as its
description in worker_proc/quantization states it, and by other code than it is read with.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, PretrainedConfig

from tests.worker.checkpoints import SHAPE, build_checkpoint

Encoded = tuple[dict[str, torch.Tensor], torch.Tensor]
"""The tensors of a layer, and the weight that they stand for, in float64."""
WIDE: dict[str, Any] = SHAPE | {"hidden_size": 128, "intermediate_size": 256}
"""Inputs of every layer are whole groups of 128, or half a group."""


@dataclass(frozen=True)
class Layout:
    """A format, its settings in config.json, and how it stores a weight."""

    name: str
    settings: dict[str, Any]
    encode: Callable[[torch.Tensor], Encoded]
    description: str = ""
    """As readiness names it."""


@dataclass(frozen=True)
class Grouped:
    """Codes from 0 on, `[outputs, inputs]`, and what the groups of inputs have in common."""

    codes: torch.Tensor
    scales: torch.Tensor  # [outputs, groups]
    zeros: torch.Tensor  # [outputs, groups]
    group_of: torch.Tensor  # of each input

    @property
    def values(self) -> torch.Tensor:
        shifted = self.codes - self.zeros[:, self.group_of]
        return shifted.double() * self.scales.double()[:, self.group_of]


def group_codes(
    weight: torch.Tensor,
    num_bits: int,
    group_size: int,
    *,
    is_symmetric: bool,
    scale_dtype: torch.dtype,
    group_of: torch.Tensor | None = None,
) -> Grouped:
    """Round a weight; -1 stands for one group of all inputs."""
    num_inputs = weight.shape[1]
    if group_of is None:
        group_of = torch.arange(num_inputs) // (num_inputs if group_size == -1 else group_size)
    most = 2**num_bits - 1
    scales, zeros = [], []
    for group in range(int(group_of.max()) + 1):
        part = weight[:, group_of == group]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        if is_symmetric:
            scale = torch.maximum(-low, high) * 2 / most
            zero = torch.full_like(scale, 2 ** (num_bits - 1))
        else:
            scale = (high - low) / most
            zero = (-low / scale).round().clamp(0, most)
        scales.append(scale.to(scale_dtype))
        zeros.append(zero.int())
    scale_of, zero_of = torch.stack(scales, 1), torch.stack(zeros, 1)
    codes = (weight / scale_of.float()[:, group_of]).round() + zero_of[:, group_of]
    return Grouped(codes.clamp(0, most).int(), scale_of, zero_of, group_of)


def pack_words(codes: torch.Tensor, num_bits: int, order: Sequence[int] = ()) -> torch.Tensor:
    """Pack rows of codes into int32, the first one of each word in its lowest bits.

    `order` states which code of each word comes first, second and further.
    """
    per_word = 32 // num_bits
    words = codes.long().unflatten(1, (-1, per_word))
    packed = torch.zeros(words.shape[:2], dtype=torch.int64)
    for place, code in enumerate(order or range(per_word)):
        packed |= words[:, :, code] << num_bits * place
    return (packed - (packed >> 31 << 32)).int()  # the highest bit is the sign


def gptq(
    num_bits: int, group_size: int, *, is_symmetric: bool, has_order: bool = False, version: int = 1
) -> Layout:
    """GPTQ; `has_order`: inputs of a group are not consecutive (desc_act)."""

    def encode(weight: torch.Tensor) -> Encoded:
        group_of = None
        if has_order:
            generator = torch.Generator().manual_seed(weight.shape[1])
            group_of = torch.randperm(weight.shape[1], generator=generator) // group_size
        found = group_codes(
            weight,
            num_bits,
            group_size,
            is_symmetric=is_symmetric,
            scale_dtype=torch.float16,
            group_of=group_of,
        )
        stored_zeros = (found.zeros - int(version == 1)) % 2**num_bits
        parts = {
            "qweight": pack_words(found.codes, num_bits).t(),
            "qzeros": pack_words(stored_zeros.t(), num_bits),
            "scales": found.scales.t(),
            "g_idx": found.group_of.int(),
        }
        return parts, found.values

    settings = {
        "quant_method": "gptq",
        "bits": num_bits,
        "group_size": group_size,
        "desc_act": has_order,
        "sym": is_symmetric,
    }
    if version == 2:
        settings["checkpoint_format"] = "gptq_v2"
    order = "_order" if has_order else ""
    name = f"gptq{num_bits}_{group_size}_{'sym' if is_symmetric else 'asym'}{order}_v{version}"
    return Layout(name, settings, encode, f"gptq int{num_bits}")


def awq(group_size: int) -> Layout:
    """AWQ in the layout "gemm"."""

    def encode(weight: torch.Tensor) -> Encoded:
        found = group_codes(weight, 4, group_size, is_symmetric=False, scale_dtype=torch.float16)
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        parts = {
            "qweight": pack_words(found.codes.t(), 4, order),
            "qzeros": pack_words(found.zeros.t(), 4, order),
            "scales": found.scales.t(),
        }
        return parts, found.values

    settings = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group_size,
        "version": "gemm",
        "zero_point": True,
    }
    return Layout(f"awq_{group_size}", settings, encode, "awq int4")


def _compressed(format: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> Any:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def pack_quantized(num_bits: int, group_size: int, *, is_symmetric: bool) -> Layout:
    """compressed-tensors, packed whole numbers."""

    def encode(weight: torch.Tensor) -> Encoded:
        found = group_codes(
            weight, num_bits, group_size, is_symmetric=is_symmetric, scale_dtype=torch.bfloat16
        )
        parts = {
            "weight_packed": pack_words(found.codes, num_bits),
            "weight_shape": torch.tensor(weight.shape),
            "weight_scale": found.scales,
        }
        if not is_symmetric:
            parts["weight_zero_point"] = pack_words(found.zeros.t(), num_bits).t()
        return parts, found.values

    strategy = "channel" if group_size == -1 else "group"
    weights = {
        "num_bits": num_bits,
        "type": "int",
        "symmetric": is_symmetric,
        "strategy": strategy,
        "group_size": None if group_size == -1 else group_size,
    }
    kind = "sym" if is_symmetric else "asym"
    name = f"pack_quantized{num_bits}_{group_size}_{kind}"
    settings = _compressed("pack-quantized", weights)
    return Layout(name, settings, encode, f"compressed-tensors int{num_bits}")


def int_quantized(*, codes_rows: bool) -> Layout:
    """compressed-tensors, int8 by output; with `codes_rows` inputs are rounded, too."""

    def encode(weight: torch.Tensor) -> Encoded:
        found = group_codes(weight, 8, -1, is_symmetric=True, scale_dtype=torch.bfloat16)
        parts = {"weight": (found.codes - 128).to(torch.int8), "weight_scale": found.scales}
        return parts, found.values

    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    settings = _compressed("int-quantized", weights, inputs if codes_rows else None)
    name = f"int_quantized_{'w8a8' if codes_rows else 'w8a16'}"
    return Layout(name, settings, encode, "compressed-tensors int8")


def _fp8(weight: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes with scales of the weight's shape, and what they stand for."""
    codes = (weight / scales.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes, codes.double() * scales.double()


def float_quantized(strategy: str) -> Layout:
    """compressed-tensors, e4m3 by output ("channel"), or by weight ("tensor")."""

    def encode(weight: torch.Tensor) -> Encoded:
        greatest = (
            weight.abs().amax(1, keepdim=True) if strategy == "channel" else weight.abs().max()
        )
        scale = (greatest / 448).bfloat16()
        codes, values = _fp8(weight, scale.expand_as(weight))
        stored = scale if strategy == "channel" else scale.reshape(1)
        parts = {"weight": codes, "weight_scale": stored}
        if strategy == "tensor":
            parts["input_scale"] = torch.tensor([0.5])
        return parts, values

    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy}
    settings = _compressed("float-quantized", weights)
    return Layout(f"float_quantized_{strategy}", settings, encode, "compressed-tensors fp8")


def fp8_blocks() -> Layout:
    """FP8 with scales of blocks, as of DeepSeek and Qwen."""

    def encode(weight: torch.Tensor) -> Encoded:
        rows, columns = -(-weight.shape[0] // 128), -(-weight.shape[1] // 128)
        scales = torch.empty(rows, columns)
        for row in range(rows):
            for column in range(columns):
                block = weight[128 * row : 128 * (row + 1), 128 * column : 128 * (column + 1)]
                scales[row, column] = block.abs().max() / 448
        of_each = scales[torch.arange(weight.shape[0]) // 128][
            :, torch.arange(weight.shape[1]) // 128
        ]
        codes, values = _fp8(weight, of_each)
        return {"weight": codes, "weight_scale_inv": scales}, values

    settings = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head"],
    }
    return Layout("fp8_blocks", settings, encode, "fp8")


def fp8_tensor() -> Layout:
    """FP8 with one scale of a weight."""

    def encode(weight: torch.Tensor) -> Encoded:
        scale = weight.abs().max() / 448
        codes, values = _fp8(weight, scale.expand_as(weight))
        return {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(0.5)}, values

    settings = {"quant_method": "fp8", "activation_scheme": "static"}
    return Layout("fp8_tensor", settings, encode, "fp8")


def fp8_number(name: str) -> Layout:
    """FP8 with one scale of a weight, under a name that some models give it."""

    def encode(weight: torch.Tensor) -> Encoded:
        scale = (weight.abs().max() / 448).bfloat16()
        codes, values = _fp8(weight, scale.expand_as(weight))
        unused = {"activation_scale": torch.tensor(0.5), "qscale_act": torch.tensor(0.5)}
        return {"weight": codes, name: scale, **unused}, values

    settings = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
    return Layout(f"fp8_{name}", settings, encode, "fp8")


def fbgemm_fp8() -> Layout:
    """FP8 with a scale of each output, as of FBGEMM."""

    def encode(weight: torch.Tensor) -> Encoded:
        scale = weight.abs().amax(1, keepdim=True) / 448
        codes, values = _fp8(weight, scale.expand_as(weight))
        unused = torch.tensor(1200.0)
        return {"weight": codes, "weight_scale": scale, "input_scale_ub": unused}, values

    settings = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}
    return Layout("fbgemm_fp8", settings, encode, "fbgemm_fp8 fp8")


_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _round_to_e2m1(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the nearest numbers of 4 bits, two codes in a byte, and their values."""
    sizes = torch.tensor(_E2M1)
    places = (numbers.abs().unsqueeze(-1) - sizes).abs().argmin(-1)
    codes = places + 8 * (numbers < 0)
    pairs = codes.flatten().view(-1, 2)
    packed = (pairs[:, 0] + 16 * pairs[:, 1]).to(torch.uint8).view(len(numbers), -1)
    return packed, sizes[places].double() * numbers.sign().double()


def _encode_nvfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, float, torch.Tensor]:
    """Return codes, scales in e4m3, the factor of all of them, a power of two, and the values."""
    groups = weight.unflatten(1, (-1, 16))
    needed = groups.abs().amax(2) / 6
    factor = 2.0 ** float((needed.max() / 448).log2().ceil())
    scales = (needed / factor).to(torch.float8_e4m3fn)
    of_each = (scales.double() * factor).repeat_interleave(16, 1)
    packed, values = _round_to_e2m1((weight / of_each).nan_to_num(0.0).float())
    return packed, scales, factor, values * of_each


def nvfp4_pack_quantized() -> Layout:
    """compressed-tensors, numbers of 4 bits with scales in e4m3 of 16 inputs."""

    def encode(weight: torch.Tensor) -> Encoded:
        packed, scales, factor, values = _encode_nvfp4(weight)
        parts = {"weight_packed": packed, "weight_scale": scales}
        parts["weight_global_scale"] = torch.tensor([1 / factor])
        return parts | {"input_global_scale": torch.tensor([300.0])}, values

    weights = {
        **{"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group"},
        "group_size": 16,
    }
    inputs = weights | {"dynamic": "local"}
    settings = _compressed("nvfp4-pack-quantized", weights, inputs)
    return Layout("nvfp4_pack_quantized", settings, encode, "compressed-tensors fp4")


def mxfp4_pack_quantized() -> Layout:
    """compressed-tensors, numbers of 4 bits with powers of two of 32 inputs."""

    def encode(weight: torch.Tensor) -> Encoded:
        exponents = (weight.unflatten(1, (-1, 32)).abs().amax(2) / 6).log2().ceil()
        of_each = (2.0 ** exponents.double()).repeat_interleave(32, 1)
        packed, values = _round_to_e2m1((weight / of_each).float())
        parts = {"weight_packed": packed, "weight_scale": (exponents + 127).to(torch.uint8)}
        return parts, values * of_each

    weights = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group"}
    weights |= {"group_size": 32, "scale_dtype": "torch.uint8"}
    settings = _compressed("mxfp4-pack-quantized", weights)
    return Layout("mxfp4_pack_quantized", settings, encode, "compressed-tensors fp4")


def _encode_mxfp8(weight: torch.Tensor) -> Encoded:
    exponents = (weight.unflatten(1, (-1, 32)).abs().amax(2) / 448).log2().ceil()
    codes, values = _fp8(weight, (2.0**exponents).repeat_interleave(32, 1))
    return {"weight": codes, "weight_scale": (exponents + 127).to(torch.uint8)}, values


def mxfp8_quantized() -> Layout:
    """compressed-tensors, e4m3 with powers of two of 32 inputs."""
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "group"}
    weights |= {"group_size": 32, "scale_dtype": "torch.uint8"}
    settings = _compressed("mxfp8-quantized", weights)
    return Layout("mxfp8_quantized", settings, _encode_mxfp8, "compressed-tensors fp8")


def modelopt(algorithm: str) -> Layout:
    """Model Optimizer: "NVFP4", "FP8" or "MXFP8"."""

    def encode(weight: torch.Tensor) -> Encoded:
        if algorithm == "MXFP8":
            return _encode_mxfp8(weight)
        if algorithm == "FP8":
            scale = weight.abs().max() / 448
            codes, values = _fp8(weight, scale.expand_as(weight))
            return {"weight": codes, "weight_scale": scale, "k_scale": torch.tensor(1.0)}, values
        packed, scales, factor, values = _encode_nvfp4(weight)
        parts = {"weight": packed, "weight_scale": scales, "input_scale": torch.tensor(0.1)}
        return parts | {"weight_scale_2": torch.tensor(factor)}, values

    settings = {
        **{"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"]},
        "producer": {"name": "modelopt", "version": "0.47.0"},
    }
    kind = "fp4" if "NVFP4" in algorithm else "fp8"
    return Layout(f"modelopt_{algorithm}", settings, encode, f"modelopt {kind}")


def auto_round(stored_as: Layout) -> Layout:
    """AutoRound, which has the tensors of GPTQ or AWQ."""
    packing = {"gptq": "auto_round:auto_gptq", "awq": "auto_round:auto_awq"}
    settings = {key: stored_as.settings[key] for key in ("bits", "group_size")}
    settings |= {
        "quant_method": "auto-round",
        "packing_format": packing[stored_as.settings["quant_method"]],
        "extra_config": {"model.layers.0.mlp.gate": {"bits": 16, "data_type": "fp"}},
    }
    if stored_as.settings.get("checkpoint_format") == "gptq_v2":
        settings["packing_format"] = "auto_round"
    name = f"auto_round_{stored_as.name}"
    return Layout(name, settings, stored_as.encode, f"auto-round int{settings['bits']}")


def auto_round_float(stored_as: Layout) -> Layout:
    """AutoRound, which has the tensors of compressed-tensors for numbers in floating point."""
    kind = "fp4" if "fp4" in stored_as.name else "fp8"
    settings: dict[str, Any] = {"quant_method": "auto-round", "bits": int(kind[2:])}
    if stored_as.name.startswith("float_quantized"):
        settings |= {"packing_format": "auto_round:fp8_static", "data_type": "fp"}
        settings |= {"group_size": -1}
    else:
        is_nv = stored_as.name.startswith("nv")
        settings |= {"packing_format": "auto_round:llm_compressor", "act_bits": int(kind[2:])}
        settings |= {"data_type": "nv_fp" if is_nv else "mx_fp", "group_size": 16 if is_nv else 32}
    name = f"auto_round_{stored_as.name}"
    return Layout(name, settings, stored_as.encode, f"auto-round {kind}")


def bitnet(linear_class: str) -> Layout:
    """BitNet's weights of -1, 0 and 1; a byte has those of four outputs that lie far apart."""

    def encode(weight: torch.Tensor) -> Encoded:
        mean = weight.abs().mean().bfloat16()
        codes = (weight / mean).round().clamp(-1, 1)
        if linear_class == "bitlinear":  # the scale is a divisor
            stored = 1 / mean.float()
            factor = 1 / stored
        else:
            stored, factor = mean, mean.float()
        outputs = (codes + 1).to(torch.uint8)
        quarter = len(outputs) // 4
        packed = torch.zeros_like(outputs[:quarter])
        for output, row in enumerate(outputs):
            packed[output % quarter] |= row << 2 * (output // quarter)
        return {"weight": packed, "weight_scale": stored.view(1)}, codes * factor

    settings = {"quant_method": "bitnet", "linear_class": linear_class}
    return Layout(f"bitnet_{linear_class}", settings, encode, "bitnet int4")


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

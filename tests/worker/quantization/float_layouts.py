"""Layouts of codes in floating point, with 8 bits (FP8, MXFP8) and 4 bits (NVFP4, MXFP4)."""

from typing import Any

import torch

from tests.worker.quantization.layouts import Encoded, Layout, compressed_settings


def fp8_codes(weight: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
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
        codes, values = fp8_codes(weight, scale.expand_as(weight))
        stored = scale if strategy == "channel" else scale.reshape(1)
        parts = {"weight": codes, "weight_scale": stored}
        if strategy == "tensor":
            parts["input_scale"] = torch.tensor([0.5])
        return parts, values

    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy}
    settings = compressed_settings("float-quantized", weights)
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
        codes, values = fp8_codes(weight, of_each)
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
        codes, values = fp8_codes(weight, scale.expand_as(weight))
        return {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(0.5)}, values

    settings = {"quant_method": "fp8", "activation_scheme": "static"}
    return Layout("fp8_tensor", settings, encode, "fp8")


def fp8_number(name: str) -> Layout:
    """FP8 with one scale of a weight, under a name that some models give it."""

    def encode(weight: torch.Tensor) -> Encoded:
        scale = (weight.abs().max() / 448).bfloat16()
        codes, values = fp8_codes(weight, scale.expand_as(weight))
        unused = {"activation_scale": torch.tensor(0.5), "qscale_act": torch.tensor(0.5)}
        return {"weight": codes, name: scale, **unused}, values

    settings = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
    return Layout(f"fp8_{name}", settings, encode, "fp8")


def fbgemm_fp8() -> Layout:
    """FP8 with a scale of each output, as of FBGEMM."""

    def encode(weight: torch.Tensor) -> Encoded:
        scale = weight.abs().amax(1, keepdim=True) / 448
        codes, values = fp8_codes(weight, scale.expand_as(weight))
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
    settings = compressed_settings("nvfp4-pack-quantized", weights, inputs)
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
    settings = compressed_settings("mxfp4-pack-quantized", weights)
    return Layout("mxfp4_pack_quantized", settings, encode, "compressed-tensors fp4")


def _encode_mxfp8(weight: torch.Tensor) -> Encoded:
    exponents = (weight.unflatten(1, (-1, 32)).abs().amax(2) / 448).log2().ceil()
    codes, values = fp8_codes(weight, (2.0**exponents).repeat_interleave(32, 1))
    return {"weight": codes, "weight_scale": (exponents + 127).to(torch.uint8)}, values


def mxfp8_quantized() -> Layout:
    """compressed-tensors, e4m3 with powers of two of 32 inputs."""
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "group"}
    weights |= {"group_size": 32, "scale_dtype": "torch.uint8"}
    settings = compressed_settings("mxfp8-quantized", weights)
    return Layout("mxfp8_quantized", settings, _encode_mxfp8, "compressed-tensors fp8")


def modelopt(algorithm: str) -> Layout:
    """Model Optimizer: "NVFP4", "FP8" or "MXFP8"."""

    def encode(weight: torch.Tensor) -> Encoded:
        if algorithm == "MXFP8":
            return _encode_mxfp8(weight)
        if algorithm == "FP8":
            scale = weight.abs().max() / 448
            codes, values = fp8_codes(weight, scale.expand_as(weight))
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

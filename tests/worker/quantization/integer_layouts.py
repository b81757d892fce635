"""Layouts of integer codes: GPTQ, AWQ, compressed-tensors, AutoRound and BitNet."""

import torch

from tests.worker.quantization.layouts import (
    Encoded,
    Layout,
    compressed_settings,
    group_codes,
    pack_words,
)


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
    settings = compressed_settings("pack-quantized", weights)
    return Layout(name, settings, encode, f"compressed-tensors int{num_bits}")


def int_quantized(*, codes_rows: bool) -> Layout:
    """compressed-tensors, int8 by output; with `codes_rows` inputs are rounded, too."""

    def encode(weight: torch.Tensor) -> Encoded:
        found = group_codes(weight, 8, -1, is_symmetric=True, scale_dtype=torch.bfloat16)
        parts = {"weight": (found.codes - 128).to(torch.int8), "weight_scale": found.scales}
        return parts, found.values

    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    settings = compressed_settings("int-quantized", weights, inputs if codes_rows else None)
    name = f"int_quantized_{'w8a8' if codes_rows else 'w8a16'}"
    return Layout(name, settings, encode, "compressed-tensors int8")


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

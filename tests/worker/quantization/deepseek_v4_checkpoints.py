"""Small checkpoints of DeepSeek-V4 with the names, types and settings of the published ones."""

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from tests.worker.checkpoints import SHAPE, WINDOW, build_checkpoint
from worker_proc.quantization.mxfp4 import E2M1_GROUP, E2M1_VALUES

Tensors = dict[str, torch.Tensor]
BLOCK = 128
SETTINGS: dict[str, Any] = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "scale_fmt": "ue8m0",
    "weight_block_size": [BLOCK, BLOCK],
}
_HEAD_DIM, _ROTATED = 48, 16
CONFIG: dict[str, Any] = {
    **{key: SHAPE[key] for key in ("vocab_size", "num_attention_heads", "bos_token_id")},
    **{key: SHAPE[key] for key in ("eos_token_id", "max_position_embeddings")},
    **{"architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4"},
    **{"num_key_value_heads": 1, "head_dim": _HEAD_DIM, "qk_rope_head_dim": _ROTATED},
    **{"hidden_size": 160, "moe_intermediate_size": 96, "q_lora_rank": 64, "hidden_act": "silu"},
    **{"o_groups": 2, "o_lora_rank": 80, "index_n_heads": 16, "index_head_dim": 32},
    **{"index_topk": 16, "sliding_window": WINDOW},
    **{"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    **{"num_hidden_layers": 4, "num_hash_layers": 1, "num_nextn_predict_layers": 1},
    **{"compress_ratios": [0, 4, 128, 4, 0], "compress_rope_theta": 160000},
    **{"hc_mult": 2, "hc_sinkhorn_iters": 4, "hc_eps": 1e-6, "norm_topk_prob": True},
    **{"rms_norm_eps": 1e-6, "routed_scaling_factor": 1.5, "scoring_func": "sqrtsoftplus"},
    **{"swiglu_limit": 10.0, "tie_word_embeddings": False, "topk_method": "noaux_tc"},
    "rope_theta": 10000,
    "rope_scaling": {
        **{"beta_fast": 32, "beta_slow": 1, "factor": 16, "type": "yarn"},
        "original_max_position_embeddings": 64,
    },
    "torch_dtype": "bfloat16",
    "expert_dtype": "fp4",
    "quantization_config": SETTINGS,
}
"""As in the published config.json; the last of `compress_ratios` is of the layer for drafts."""
_NAMES = (
    (r"^model\.", ""),
    (r"^embed_tokens\.", "embed."),
    (r"^hc_head\.hc_", "hc_head_"),
    (r"\.attn\.norm\.", ".attn.kv_norm."),
)
"""What transformers saves under other names than the published ones."""
_EXPERT = re.compile(r"\.experts\.\d+\.w\d\.weight$")
_CODES = re.compile(r"\.(attn|indexer)\.w[qkvo]_?[abkv]*\.weight$|\.shared_experts\.w\d\.weight$")
_FLOATS = re.compile(r"hc_|attn_sink|\.ape$|gate\.bias$")


def to_e8m0(scales: torch.Tensor) -> torch.Tensor:
    """Return powers of two as their exponents."""
    return (scales.log2().round() + 127).to(torch.uint8).view(torch.float8_e8m0fnu)


def encode_fp8(weight: torch.Tensor, *, has_exponents: bool) -> tuple[Tensors, torch.Tensor]:
    """Return the tensors of a weight with scales of blocks, and what they stand for."""
    rows, columns = (-(-size // BLOCK) for size in weight.shape)
    padded = torch.zeros(rows * BLOCK, columns * BLOCK)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    blocks = padded.view(rows, BLOCK, columns, BLOCK)
    scales = blocks.abs().amax((1, 3)) / 448
    if has_exponents:
        scales = scales.log2().ceil().exp2()
    of_each = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    of_each = of_each[: weight.shape[0], : weight.shape[1]]
    codes = (weight / of_each).clamp(-448, 448).to(torch.float8_e4m3fn)
    stored = to_e8m0(scales) if has_exponents else scales
    return {"weight": codes, "scale": stored}, codes.float() * of_each


def encode_fp4(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Return the tensors of an expert's weight in MXFP4, and what they stand for."""
    groups = weight.unflatten(1, (-1, E2M1_GROUP))
    scales = (groups.abs().amax(-1) / 6).log2().ceil().exp2()
    table = torch.tensor(E2M1_VALUES)
    codes = ((groups / scales.unsqueeze(-1)).unsqueeze(-1) - table).abs().argmin(-1)
    values = (table[codes] * scales.unsqueeze(-1)).flatten(1)
    pairs = codes.flatten(1).to(torch.uint8).unflatten(1, (-1, 2))
    packed = (pairs[..., 0] | pairs[..., 1] << 4).view(torch.int8)
    return {"weight": packed, "scale": to_e8m0(scales)}, values


def write_published(directory: Path, *, has_fp4: bool = True) -> Path:
    """Write a checkpoint, and beside it a plain one in float32 with the weights it stands for.

    Without FP4, experts are in FP8, too, and scales in float32, as in the base models.
    """
    coded, dense = directory / "coded", directory / "dense"
    config = {**CONFIG, "expert_dtype": "fp4" if has_fp4 else "fp8"}
    plain = {key: value for key, value in config.items() if "dtype" not in key}
    del plain["quantization_config"]
    coded.mkdir()
    (coded / "config.json").write_text(json.dumps(config))
    dense.mkdir()
    (dense / "config.json").write_text(json.dumps(plain))
    build_checkpoint(dense, AutoConfig.from_pretrained(dense))
    tensors: Tensors = {}
    values = load_file(dense / "model.safetensors")
    for saved, weight in values.items():
        name = saved
        for pattern, published in _NAMES:
            name = re.sub(pattern, published, name)
        layer = name.removesuffix("weight")
        if _EXPERT.search(name) and has_fp4:
            parts, values[saved] = encode_fp4(weight)
            tensors |= {layer + part: tensor for part, tensor in parts.items()}
        elif _EXPERT.search(name) or _CODES.search(name):
            parts, values[saved] = encode_fp8(weight, has_exponents=has_fp4)
            tensors |= {layer + part: tensor for part, tensor in parts.items()}
        elif not weight.is_floating_point() or _FLOATS.search(name):
            tensors[name] = weight
        else:
            tensors[name] = weight.bfloat16()
            values[saved] = tensors[name].float()
    for name in [name for name in tensors if name.startswith("layers.3.")]:
        tensors[name.replace("layers.3.", "mtp.0.")] = tensors[name].clone()  # for drafts
    save_file(values, dense / "model.safetensors", {"format": "pt"})
    save_file(tensors, coded / "model.safetensors", {"format": "pt"})
    return coded

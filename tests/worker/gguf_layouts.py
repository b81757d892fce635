"""How llama.cpp's converter lays out the weights of models with layers of several kinds.

`apart` returns what is written of the weights of a checkpoint, under names that the `gguf` package
knows; `together` returns the weights of what was written, after its values were rounded.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from transformers import PretrainedConfig

Weights = Mapping[str, torch.Tensor]


class Layout(NamedTuple):
    """What is done with the weights of one type of model."""

    apart: Callable[[Weights, PretrainedConfig], dict[str, torch.Tensor]]
    together: Callable[[Weights, PretrainedConfig], dict[str, torch.Tensor]]


def _renamed(weights: Weights, names: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """Return weights of which ends of names have changed."""
    changed = {}
    for name, tensor in weights.items():
        old = next((old for old in names if name.endswith(old)), None)
        changed[name if old is None else name.removesuffix(old) + names[old]] = tensor
    return changed


def _inverse(names: Mapping[str, str]) -> dict[str, str]:
    return {new: old for old, new in names.items()}


def _split_experts(weights: Weights) -> dict[str, torch.Tensor]:
    """Return weights with gates and factors of all experts, and what follows, as matrices."""
    parts: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        base = name.rpartition(".")[0]
        if name.endswith("experts.gate_up_proj"):
            gates, factors = tensor.chunk(2, 1)
            parts[f"{base}.gate_proj.weight"] = gates.contiguous()
            parts[f"{base}.up_proj.weight"] = factors.contiguous()
        elif name.endswith("experts.down_proj"):
            parts[f"{name}.weight"] = tensor
        else:
            parts[name] = tensor
    return parts


def _join_experts(parts: Weights) -> dict[str, torch.Tensor]:
    weights = {}
    for name, tensor in parts.items():
        if name.endswith(".experts.gate_proj.weight"):
            both = torch.cat((tensor, parts[name.replace("gate_proj", "up_proj")]), 1)
            weights[name.replace("gate_proj.weight", "gate_up_proj")] = both
        elif name.endswith(".experts.down_proj.weight"):
            weights[name.removesuffix(".weight")] = tensor
        elif not name.endswith(".experts.up_proj.weight"):
            weights[name] = tensor
    return weights


_DELTA_NAMES = {"linear_attn.dt_bias": "linear_attn.dt_proj.bias"}


def _scaled_norm(name: str) -> bool:
    return name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight")


def _heads_apart(values: torch.Tensor, config: PretrainedConfig, size: int) -> torch.Tensor:
    """Return rows of heads of values in the order of files: first the first of each key."""
    num_keys = config.linear_num_key_heads
    heads = values.view(num_keys, -1, size, *values.shape[1:])
    return heads.transpose(0, 1).reshape(values.shape)


def _heads_together(values: torch.Tensor, config: PretrainedConfig, size: int) -> torch.Tensor:
    heads = values.view(-1, config.linear_num_key_heads, size, *values.shape[1:])
    return heads.transpose(0, 1).reshape(values.shape)


def _in_order(
    name: str,
    tensor: torch.Tensor,
    config: PretrainedConfig,
    move: Callable[[torch.Tensor, PretrainedConfig, int], torch.Tensor],
) -> torch.Tensor:
    """Return a tensor of DeltaNet with its heads of values moved."""
    size = config.linear_value_head_dim
    match name.rpartition("linear_attn.")[2]:
        case "in_proj_qkv.weight" | "conv1d.weight":
            num_before = 2 * config.linear_num_key_heads * config.linear_key_head_dim
            return torch.cat((tensor[:num_before], move(tensor[num_before:], config, size)))
        case "in_proj_z.weight":
            return move(tensor, config, size)
        case "in_proj_b.weight" | "in_proj_a.weight" | "A_log" | "dt_bias":
            return move(tensor, config, 1)
        case "out_proj.weight":
            return move(tensor.t().contiguous(), config, size).t().contiguous()
    return tensor


def _delta_apart(weights: Weights, config: PretrainedConfig) -> dict[str, torch.Tensor]:
    is_next = config.model_type == "qwen3_next"
    parts = {}
    for name, tensor in weights.items():
        moved = tensor if is_next else _in_order(name, tensor, config, _heads_apart)
        if name.endswith("A_log"):
            moved = -moved.exp()
        elif name.endswith("conv1d.weight"):
            moved = moved.squeeze(1)
        elif _scaled_norm(name):
            moved = moved + 1
        if name.endswith("in_proj_qkvz.weight"):
            of_heads = moved.view(config.linear_num_key_heads, -1, moved.shape[1])
            sizes = _qkvz_sizes(config)
            q, k, v, z = (part.flatten(0, 1) for part in of_heads.split(sizes, 1))
            parts[name.replace("qkvz", "qkv")] = torch.cat((q, k, v))
            parts[name.replace("qkvz", "z")] = z.contiguous()
        else:
            parts[name] = moved
    return _renamed(parts, _DELTA_NAMES)


def _delta_together(parts: Weights, config: PretrainedConfig) -> dict[str, torch.Tensor]:
    is_next = config.model_type == "qwen3_next"
    weights = {}
    for name, tensor in _renamed(parts, _inverse(_DELTA_NAMES)).items():
        if is_next and name.endswith("in_proj_qkv.weight"):
            num_keys = config.linear_num_key_heads
            q, k, v = tensor.split([num_keys * size for size in _qkvz_sizes(config)[:3]])
            z = parts[name.replace("qkv", "z")]
            of_heads = torch.cat([part.view(num_keys, -1, z.shape[1]) for part in (q, k, v, z)], 1)
            weights[name.replace("qkv", "qkvz")] = of_heads.flatten(0, 1)
            continue
        if is_next and name.endswith("in_proj_z.weight"):
            continue
        read = _of_state(name, tensor - 1 if _scaled_norm(name) else tensor)
        weights[name] = read if is_next else _in_order(name, read, config, _heads_together)
    return weights


def _of_state(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return rates of decay and kernels of convolutions as a checkpoint has them."""
    if name.endswith("A_log"):
        return (-tensor).log().flatten()
    return tensor.unsqueeze(1) if name.endswith("conv1d.weight") else tensor


def _qkvz_sizes(config: PretrainedConfig) -> list[int]:
    """Return the rows that each head of keys has of queries, keys, values and gates."""
    per_key = config.linear_num_value_heads // config.linear_num_key_heads
    size = per_key * config.linear_value_head_dim
    return [config.linear_key_head_dim, config.linear_key_head_dim, size, size]


_DELTA = Layout(_delta_apart, _delta_together)
LAYOUTS: Mapping[str, Layout] = {
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _DELTA),
}
"""By `model_type`."""

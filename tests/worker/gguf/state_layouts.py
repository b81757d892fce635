"""The layouts of models with recurrent states: delta nets, Mamba and Kimi-Linear."""

from collections.abc import Callable

import torch
from transformers import PretrainedConfig

from tests.worker.gguf.layout import Layout, Weights, inverse, named, renamed, then

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
    return renamed(parts, _DELTA_NAMES)


def _delta_together(parts: Weights, config: PretrainedConfig) -> dict[str, torch.Tensor]:
    is_next = config.model_type == "qwen3_next"
    weights = {}
    for name, tensor in renamed(parts, inverse(_DELTA_NAMES)).items():
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


def _is_mamba(config: PretrainedConfig) -> bool:
    """Return whether layers are those of Mamba, and not of Mamba-2."""
    return config.model_type.endswith("mamba") or config.model_type == "jamba"


def _states_apart(weights: Weights, config: PretrainedConfig) -> dict[str, torch.Tensor]:
    """Return tensors of Mamba and Mamba-2 as files have them."""
    groups = getattr(config, "mamba_n_groups", None) or getattr(config, "n_groups", 1)
    parts = {}
    for name, tensor in weights.items():
        if name.endswith("A_log"):
            rates = -tensor.exp()
            parts[name] = rates if rates.ndim == 2 else rates.view(-1, 1)
        elif name.endswith((".D", "dt_bias")) and "dt_proj" not in name:
            is_matrix = name.endswith(".D") and not _is_mamba(config)
            parts[name] = tensor.view(-1, 1) if is_matrix else tensor
        elif name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
            parts[name] = tensor.view(groups, -1)
        elif name.endswith("conv1d.weight"):
            parts[name] = tensor.squeeze(1)
        else:
            parts[name] = tensor
    return parts


def _states_together(parts: Weights, config: PretrainedConfig) -> dict[str, torch.Tensor]:
    weights = {}
    for name, tensor in parts.items():
        if name.endswith("A_log"):
            rates = (-tensor).log()
            weights[name] = rates if _is_mamba(config) else rates.flatten()
        elif name.endswith((".D", "mamba.norm.weight", "mixer.norm.weight")):
            weights[name] = tensor.flatten()
        else:
            is_kernel = name.endswith("conv1d.weight")
            weights[name] = tensor.unsqueeze(1) if is_kernel else tensor
    return weights


def _kimi_apart(weights: Weights, config: PretrainedConfig) -> dict[str, torch.Tensor]:
    """Return tensors of Kimi-Linear as files have them; its dense layers get their usual names."""
    parts = {}
    for name, tensor in weights.items():
        if name.endswith("A_log"):
            parts[name] = -tensor.exp()
        elif "_conv1d." in name:
            parts[name] = tensor.view(1, len(tensor), 1, -1)
        elif name.split(".")[-2] in ("gate_proj", "up_proj", "down_proj") and "experts" not in name:
            parts[name.replace("block_sparse_moe", "mlp")] = tensor
        else:
            parts[name] = tensor
    return parts


def _kimi_together(parts: Weights, config: PretrainedConfig) -> dict[str, torch.Tensor]:
    weights = {}
    for name, tensor in parts.items():
        if name.endswith("A_log"):
            weights[name] = (-tensor).log()
        else:
            is_kernel = "_conv1d." in name
            weights[name] = tensor.view(-1, 1, tensor.shape[-1]) if is_kernel else tensor
    return weights


_STATE_NAMES = {".mamba.dt_bias": ".mamba.dt_proj.bias", ".mixer.dt_bias": ".mixer.dt_proj.bias"}
MAMBA = Layout(_states_apart, _states_together)
STATES = then(MAMBA, named(_STATE_NAMES))
DELTA = Layout(_delta_apart, _delta_together)
KIMI = then(
    Layout(_kimi_apart, _kimi_together), named({"self_attn.dt_bias": "self_attn.dt_proj.bias"})
)

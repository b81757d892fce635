"""GGUF architectures with gated DeltaNet: Qwen3-Next, Qwen3.5 and, in its own form, Kimi-Linear."""

from collections.abc import Mapping

import torch

from worker_proc.gguf.architecture import (
    EXPERTS,
    KV_HEADS,
    NORM_BEHIND,
    NORMALIZED,
    SHARED,
    Architecture,
    Config,
    check_sigmoid,
    partly_rotated,
    qwen_experts,
    routed,
)
from worker_proc.gguf.changes import UNCHANGED, Change, as_channels, flat_logarithm, logarithm
from worker_proc.gguf.joins import LATENT, Rows
from worker_proc.gguf.latent import ATTENTION
from worker_proc.gguf.mapped import MappedFiles
from worker_proc.gguf.metadata import Metadata

_INTERVAL = "full_attention_interval"
_RECURRENT = "attention.recurrent_layers"
_STATE, _INNER = "ssm.state_size", "ssm.inner_size"
_KEY_HEADS, _VALUE_HEADS = "ssm.group_count", "ssm.time_step_rank"
_SECTIONS = "rope.dimension_sections"


def _num_heads(metadata: Metadata) -> tuple[int, int]:
    """Return the heads of keys, and those of values, of which as many share each key."""
    num_keys, num_values = metadata.integer(_KEY_HEADS), metadata.integer(_VALUE_HEADS)
    if num_values % num_keys:
        raise metadata.unsupported(_VALUE_HEADS, f"a multiple of {_KEY_HEADS}, {num_keys}")
    return num_keys, num_values


def _linear(metadata: Metadata) -> Config:
    """Return the head sizes of gated DeltaNet; keys and values have the same size."""
    size = metadata.integer(_STATE)
    num_keys, num_values = _num_heads(metadata)
    if metadata.integer(_INNER) != size * num_values:
        raise metadata.unsupported(_INNER, f"{size * num_values}, the values of all heads")
    return {
        "linear_conv_kernel_dim": metadata.integer("ssm.conv_kernel"),
        "linear_key_head_dim": size,
        "linear_value_head_dim": size,
        "linear_num_key_heads": num_keys,
        "linear_num_value_heads": num_values,
    }


def _layer_types(metadata: Metadata, num_layers: int) -> list[str]:
    """Return the layer types as stated, or else with attention in every `_INTERVAL`-th layer."""
    stated = metadata.get(_RECURRENT)
    interval = metadata.integer(_INTERVAL, 4)
    if stated is None:
        stated = [(number + 1) % interval != 0 for number in range(num_layers)]
    is_list = isinstance(stated, list) and len(stated) >= num_layers
    if not is_list or not all(isinstance(one, bool) for one in stated[:num_layers]):
        raise metadata.unsupported(_RECURRENT, f"true or false for each of {num_layers} layers")
    return ["linear_attention" if one else "full_attention" for one in stated[:num_layers]]


def _common(metadata: Metadata, file: MappedFiles) -> Config:
    num_layers = _QWEN35.num_layers(metadata)
    return {
        **partly_rotated(metadata, file),
        "layer_types": _layer_types(metadata, num_layers),
        "attention_bias": False,
        **_linear(metadata),
    }


def _qwen35(metadata: Metadata, file: MappedFiles) -> Config:
    """Return the configuration of a text model, whose three rows of positions are equal."""
    config = _common(metadata, file)
    sections = metadata.get(_SECTIONS)
    is_list = isinstance(sections, list) and len(sections) in (3, 4)
    num_angles = metadata.integer("rope.dimension_count", config["head_dim"]) // 2
    if not is_list or not all(type(one) is int for one in sections) or sum(sections) != num_angles:
        raise metadata.unsupported(_SECTIONS, f"a list of numbers whose sum is {num_angles}")
    config["rope_parameters"] |= {"mrope_section": sections[:3], "mrope_interleaved": True}
    return config


def _experts(metadata: Metadata) -> Config:
    shared = metadata.integer("expert_shared_feed_forward_length")
    return qwen_experts(metadata) | {
        "shared_expert_intermediate_size": shared,
        "norm_topk_prob": True,
    }


def _qwen35moe(metadata: Metadata, file: MappedFiles) -> Config:
    return _qwen35(metadata, file) | _experts(metadata)


def _qwen3next(metadata: Metadata, file: MappedFiles) -> Config:
    return _common(metadata, file) | _experts(metadata)


def _of_heads(metadata: Metadata, size: int) -> torch.Tensor:
    """Return the file's row for each value: there, heads that share a key are not adjacent."""
    num_keys, num_values = _num_heads(metadata)
    metadata.check_num_rows(num_values * size)
    places = torch.arange(num_values * size)
    return places.view(num_values // num_keys, num_keys, size).transpose(0, 1).flatten()


def _behind_keys(metadata: Metadata) -> torch.Tensor:
    """Return the row order of merged queries, keys and values; only the values are reordered."""
    size = metadata.integer(_STATE)
    num_before = 2 * size * metadata.integer(_KEY_HEADS)
    metadata.check_num_rows(num_before)
    return torch.cat((torch.arange(num_before), num_before + _of_heads(metadata, size)))


def _next_changes(metadata: Metadata) -> Mapping[str, Change]:
    return {"ssm_a": Change(values=flat_logarithm), "ssm_norm.weight": UNCHANGED}


def _changes(metadata: Metadata) -> Mapping[str, Change]:
    heads, values = _of_heads(metadata, 1), _of_heads(metadata, metadata.integer(_STATE))
    mixed = _behind_keys(metadata)
    return {
        "attn_qkv.weight": Change(rows=mixed),
        "attn_gate.weight": Change(rows=values),
        "ssm_conv1d.weight": Change(rows=mixed, values=as_channels),
        "ssm_beta.weight": Change(rows=heads),
        "ssm_alpha.weight": Change(rows=heads),
        "ssm_a": Change(rows=heads, values=flat_logarithm),
        "ssm_dt.bias": Change(rows=heads),
        "ssm_norm.weight": UNCHANGED,
        "ssm_out.weight": Change(inputs=values),
    }


def _by_key_heads(metadata: Metadata) -> torch.Tensor:
    """Return the row order that groups query, key, values and gates by key head."""
    size = metadata.integer(_STATE)
    num_keys, num_values = _num_heads(metadata)
    counts = (num_keys * size, num_keys * size, num_values * size, num_values * size)
    metadata.check_num_rows(sum(counts))
    parts = torch.arange(sum(counts)).split(counts)
    return torch.cat([part.view(num_keys, -1) for part in parts], 1).flatten()


def _kimi_linear(metadata: Metadata, file: MappedFiles) -> Config:
    """Return what Kimi-Linear has; layers with attention have no rotary embedding."""
    check_sigmoid(metadata)
    count = metadata.integer("block_count")
    heads = metadata.per_layer(KV_HEADS, count)
    experts = routed(metadata)
    dense = experts.pop("first_k_dense_replace")
    num_experts = experts.pop("n_routed_experts")
    experts.pop("norm_topk_prob")
    metadata.get("vocab_size")
    rank = "attention.q_lora_rank"
    size, rotated = metadata.latent_size("key_length"), metadata.integer("rope.dimension_count")
    if rotated >= size:
        raise metadata.unsupported("rope.dimension_count", f"less than {size}, the values of a key")
    return experts | {
        "num_key_value_heads": metadata.integer("attention.head_count"),
        "num_experts": num_experts,
        "moe_renormalize": metadata.flag(NORMALIZED, default=True),
        "layer_types": ["full_attention" if one else "linear_attention" for one in heads],
        "mlp_layer_types": ["dense" if number < dense else "sparse" for number in range(count)],
        "kv_lora_rank": metadata.integer("attention.kv_lora_rank"),
        "q_lora_rank": None if metadata.get(rank) is None else metadata.integer(rank),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": size - rotated,
        "v_head_dim": metadata.latent_size("value_length"),
        "linear_head_dim": metadata.integer("kda.head_dim"),
        "linear_num_heads": metadata.integer("attention.head_count"),
        "linear_conv_kernel_dim": metadata.integer("ssm.conv_kernel"),
        "attention_bias": False,
    }


def _kernels(values: torch.Tensor) -> torch.Tensor:
    """Return the kernels of a convolution, of which files may have further dimensions."""
    return values.view(-1, 1, values.shape[-1])


def _rates(values: torch.Tensor) -> torch.Tensor:
    return logarithm(values).view(1, 1, -1, 1)


def _kimi_changes(metadata: Metadata) -> Mapping[str, Change]:
    kernels = {f"ssm_conv1d_{part}.weight": Change(values=_kernels) for part in "qkv"}
    return kernels | {"ssm_a": Change(values=_rates)}


_NAMES = NORM_BEHIND | {
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_QWEN35_NAMES = _NAMES | {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
}
_QKVZ = Rows(
    "linear_attn.in_proj_qkvz.weight",
    ("attn_qkv.weight", "attn_gate.weight"),
    order=_by_key_heads,
)
_QWEN35 = Architecture(
    "qwen3_5_text",
    "Qwen3_5ForCausalLM",
    _qwen35,
    _QWEN35_NAMES,
    norm_offset=1.0,
    changes=_changes,
    drops_drafts=True,
)
_QWEN35MOE = Architecture(
    "qwen3_5_moe_text",
    "Qwen3_5MoeForCausalLM",
    _qwen35moe,
    _QWEN35_NAMES | EXPERTS | SHARED,
    norm_offset=1.0,
    changes=_changes,
    drops_drafts=True,
)
_QWEN3NEXT = Architecture(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    _qwen3next,
    _NAMES
    | EXPERTS
    | SHARED
    | {
        "ssm_in": "linear_attn.in_proj_qkvz",
        "ssm_ba": "linear_attn.in_proj_ba",
    },
    norm_offset=1.0,
    joins=(_QKVZ,),
    changes=_next_changes,
    drops_drafts=True,
)
_KIMI_LINEAR = Architecture(
    "kimi_linear",
    "KimiLinearForCausalLM",
    _kimi_linear,
    {
        **ATTENTION,
        **{f"ssm_conv1d_{part}": f"self_attn.{part}_conv1d" for part in "qkv"},
        **{f"ssm_{part}": f"self_attn.{part}_proj" for part in ("f_a", "f_b", "g_a", "g_b")},
        "ssm_beta": "self_attn.b_proj",
        "ssm_a": "self_attn.A_log",
        "ssm_dt.bias": "self_attn.dt_bias",
        "ssm_norm": "self_attn.o_norm",
        "ffn_gate_inp": "block_sparse_moe.gate",
        "exp_probs_b.bias": "block_sparse_moe.gate.e_score_correction_bias",
        "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
        "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
        "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
        **{
            f"ffn_{part}_shexp": f"block_sparse_moe.shared_experts.{part}_proj"
            for part in ("gate", "up", "down")
        },
    },
    joins=LATENT,
    changes=_kimi_changes,
    rotates=False,
)
DELTA_NETS: Mapping[str, Architecture] = {
    "kimi-linear": _KIMI_LINEAR,
    "qwen35": _QWEN35,
    "qwen35moe": _QWEN35MOE,
    "qwen3next": _QWEN3NEXT,
}
"""The architectures, by `general.architecture`."""

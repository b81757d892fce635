"""GGUF architectures with the layers of Mamba and Mamba-2, alone or beside attention."""

from collections.abc import Mapping, Sequence

import torch

from worker_proc.errors import UnsupportedModel
from worker_proc.gguf.architecture import (
    FINETUNED,
    KV_HEADS,
    NORMALIZED,
    RMS_NORM_EPSILON,
    Architecture,
    Config,
    before_drafts,
    check_head_size,
    has_bias,
    rotated_heads,
    scales,
    used_experts,
)
from worker_proc.gguf.changes import Change, flat_logarithm, logarithm
from worker_proc.gguf.joins import GRANITE, GRANITE_DENSE
from worker_proc.gguf.mapped import MappedFiles
from worker_proc.gguf.metadata import Metadata
from worker_proc.gguf.mixtures import GRANITE_NAMES

_STATE = "linear_attention"
_KINDS = {
    "attn_q.weight": "full_attention",
    "ffn_gate_inp.weight": "moe",
    "ffn_up.weight": "mlp",
}
"""The kinds of Nemotron-H's layers, by tensors that only they have; others have a state."""
_INNER, _HEADS = "ssm.inner_size", "ssm.time_step_rank"
NORMED_STEPS = "ssm.dt_b_c_rms"


def _inner_size(metadata: Metadata, divisor: int, what: str) -> int:
    size = metadata.integer(_INNER)
    if size % divisor:
        raise metadata.unsupported(_INNER, f"a multiple of {divisor}, {what}")
    return size


def _expansion(metadata: Metadata) -> int:
    """Return how many times as wide as the model its inner layers are."""
    width = metadata.integer("embedding_length")
    return _inner_size(metadata, width, "the values of an embedding") // width


def _sizes(metadata: Metadata, file: MappedFiles, before: str = "mamba_") -> Config:
    """Return the sizes of Mamba-2's layers, whose names begin with `before`."""
    heads = metadata.integer(_HEADS)
    return {
        f"{before}n_heads": heads,
        f"{before}d_head": _inner_size(metadata, heads, "the heads") // heads,
        f"{before}d_state": metadata.integer("ssm.state_size"),
        f"{before}n_groups": metadata.integer("ssm.group_count"),
        f"{before}d_conv": metadata.integer("ssm.conv_kernel"),
        f"{before}conv_bias": _has_any(file, "ssm_conv1d.bias"),
        f"{before}proj_bias": False,
    }


def _has_any(file: MappedFiles, tensor: str) -> bool:
    """Return whether any layer has a tensor."""
    return any(name.endswith(f".{tensor}") for name in file.header.tensors)


def _granitehybrid(metadata: Metadata, file: MappedFiles) -> Config:
    """Return what Granite-4 has; those with layers of Mamba-2 have no rotary embedding."""
    tensors = file.header.tensors
    heads = metadata.per_layer(KV_HEADS, metadata.integer("block_count"))
    has_experts = metadata.integer("expert_count", 0, min_value=0) > 0
    shared = tensors.get("blk.0.ffn_up_shexp.weight" if has_experts else "blk.0.ffn_up.weight")
    is_rotated = metadata.flag(FINETUNED, default=True)
    return {
        **rotated_heads(metadata),
        **scales(metadata),
        **_sizes(metadata, file),
        "mamba_expand": _expansion(metadata),
        "layer_types": ["full_attention" if one else _STATE for one in heads],
        "position_embedding_type": "rope" if is_rotated else None,
        "num_local_experts": metadata.integer("expert_count", 0, min_value=0),
        "num_experts_per_tok": metadata.integer("expert_used_count", 0, min_value=0),
        "shared_intermediate_size": 0 if shared is None else shared.shape[0],
        "attention_bias": _has_any(file, "attn_q.bias"),
    }


def _falcon_h1(metadata: Metadata, file: MappedFiles) -> Config:
    """Return what Falcon-H1 has; files have its multipliers within the weights."""
    return {
        **rotated_heads(metadata),
        **_sizes(metadata, file),
        "mamba_d_ssm": metadata.integer(_INNER),
        "mamba_rms_norm": _has_any(file, "ssm_norm.weight"),
        "mamba_norm_before_gate": False,
        "attention_bias": has_bias(file, "attn_q"),
        "mlp_bias": has_bias(file, "ffn_up"),
    }


def _nemotron_h(metadata: Metadata, file: MappedFiles) -> Config:
    """Return what Nemotron-H has: the tensors of a layer show of which kind it is."""
    tensors = file.header.tensors
    kinds = [
        next((kind for part, kind in _KINDS.items() if f"blk.{number}.{part}" in tensors), _STATE)
        for number in range(before_drafts(metadata))
    ]
    sizes = _sizes(metadata, file, "")
    return {
        "head_dim": metadata.head_size(),
        "layers_block_type": kinds,
        "intermediate_size": max(metadata.per_layer("feed_forward_length", len(kinds))),
        "mamba_num_heads": sizes["n_heads"],
        "mamba_head_dim": sizes["d_head"],
        "ssm_state_size": sizes["d_state"],
        "n_groups": sizes["n_groups"],
        "conv_kernel": sizes["d_conv"],
        "use_conv_bias": sizes["conv_bias"],
        "layer_norm_epsilon": metadata.number(RMS_NORM_EPSILON),
        "attention_bias": _has_any(file, "attn_q.bias"),
        "mlp_bias": _has_any(file, "ffn_up.bias"),
        **(_nemotron_experts(metadata) if "moe" in kinds else {}),
    }


def _nemotron_experts(metadata: Metadata) -> Config:
    shared = metadata.integer("expert_shared_feed_forward_length")
    latent = metadata.integer("moe_latent_size", 0, min_value=0)
    return {
        **used_experts(metadata),
        "n_routed_experts": metadata.integer("expert_count"),
        "n_shared_experts": metadata.integer("expert_shared_count"),
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": shared,
        "moe_latent_size": latent or None,
        "norm_topk_prob": metadata.flag(NORMALIZED, default=True),
        "routed_scaling_factor": metadata.number_or_none("expert_weights_scale") or 1.0,
        "n_group": metadata.integer("expert_group_count", 1),
        "topk_group": metadata.integer("expert_group_used_count", 1),
    }


def _mamba2(metadata: Metadata, file: MappedFiles) -> Config:
    sizes = _sizes(metadata, file, "")
    return {
        "num_heads": sizes["n_heads"],
        "head_dim": sizes["d_head"],
        "state_size": sizes["d_state"],
        "n_groups": sizes["n_groups"],
        "conv_kernel": sizes["d_conv"],
        "use_conv_bias": sizes["conv_bias"],
        "expand": _expansion(metadata),
        "layer_norm_epsilon": metadata.number(RMS_NORM_EPSILON),
    }


def _mamba(metadata: Metadata, file: MappedFiles) -> Config:
    metadata.flag(NORMED_STEPS, default=False)
    return {
        "intermediate_size": metadata.integer(_INNER),
        "time_step_rank": metadata.integer(_HEADS),
        "state_size": metadata.integer("ssm.state_size"),
        "conv_kernel": metadata.integer("ssm.conv_kernel"),
        "use_conv_bias": _has_any(file, "ssm_conv1d.bias"),
        "expand": _expansion(metadata),
        "layer_norm_epsilon": metadata.number(RMS_NORM_EPSILON),
    }


def _jamba(metadata: Metadata, file: MappedFiles) -> Config:
    """Return what Jamba has: layers with attention, and those with experts, at equal distances."""
    check_head_size(metadata)
    count = metadata.integer("block_count")
    heads = metadata.per_layer(KV_HEADS, count)
    tensors = file.header.tensors
    attends = [bool(one) for one in heads]
    mixes = [f"blk.{number}.ffn_gate_inp.weight" in tensors for number in range(count)]
    for key in ("expert_count", "expert_used_count"):
        metadata.get(key)
    found: Config = {}
    for name, has_it in (("attn_layer", attends), ("expert_layer", mixes)):
        period, offset = _distance(has_it)
        if has_it != [number % period == offset for number in range(count)]:
            raise UnsupportedModel(
                f"{file.header.path}: layers with attention and layers with experts must lie at"
                " equal distances"
            )
        found |= {f"{name}_period": period, f"{name}_offset": offset}
    return {
        **found,
        "num_experts": metadata.integer("expert_count") if any(mixes) else 1,
        "num_experts_per_tok": metadata.integer("expert_used_count") if any(mixes) else 1,
        "mamba_expand": _expansion(metadata),
        "mamba_dt_rank": metadata.integer(_HEADS),
        "mamba_d_state": metadata.integer("ssm.state_size"),
        "mamba_d_conv": metadata.integer("ssm.conv_kernel"),
        "mamba_conv_bias": _has_any(file, "ssm_conv1d.bias"),
        "mamba_proj_bias": False,
    }


def _distance(has_it: Sequence[bool]) -> tuple[int, int]:
    """Return after how many layers one follows that has something, and the first that has."""
    places = [number for number, one in enumerate(has_it) if one]
    if not places:
        return len(has_it) + 1, len(has_it)
    return (places[1] - places[0] if len(places) > 1 else len(has_it)), places[0]


def _changes(metadata: Metadata) -> Mapping[str, Change]:
    """Return what is done with tensors of Mamba-2, whose heads files have as matrices."""
    return {
        "ssm_a": Change(values=flat_logarithm),
        "ssm_d": Change(values=torch.flatten),
        "ssm_norm.weight": Change(values=torch.flatten),
    }


def _mamba_changes(metadata: Metadata) -> Mapping[str, Change]:
    return {"ssm_a": Change(values=logarithm)}


def _names(mixer: str) -> dict[str, str]:
    """Return the names of tensors of a layer of Mamba-2 within a module."""
    return {
        "ssm_in": f"{mixer}.in_proj",
        "ssm_conv1d": f"{mixer}.conv1d",
        "ssm_a": f"{mixer}.A_log",
        "ssm_d": f"{mixer}.D",
        "ssm_dt.bias": f"{mixer}.dt_bias",
        "ssm_norm": f"{mixer}.norm",
        "ssm_out": f"{mixer}.out_proj",
    }


_GRANITE_HYBRID = GRANITE_NAMES | _names("mamba") | {"ffn_down": "shared_mlp.output_linear"}
_FALCON_H1 = _names("mamba") | {
    "ffn_norm": "pre_ff_layernorm.weight",
    "ffn_norm.weight": "pre_ff_layernorm.weight",
    "ffn_gate": "feed_forward.gate_proj",
    "ffn_up": "feed_forward.up_proj",
    "ffn_down": "feed_forward.down_proj",
}
_BACKBONE = {
    "token_embd": "backbone.embeddings",
    "output_norm": "backbone.norm_f",
}
_MAMBA2 = _names("mixer") | {"attn_norm": "norm"}
_MAMBA = {
    **{key: name for key, name in _MAMBA2.items() if key != "ssm_dt.bias"},
    "ssm_dt": "mixer.dt_proj",
    "ssm_x": "mixer.x_proj",
}
_JAMBA = _names("mamba") | {
    "ssm_dt": "mamba.dt_proj",
    "ssm_dt.bias": "mamba.dt_proj.bias",
    "ssm_x": "mamba.x_proj",
    **{f"ssm_{part}_norm": f"mamba.{part}_layernorm" for part in ("dt", "b", "c")},
    "ffn_norm": "pre_ff_layernorm",
    **{f"ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
    "ffn_gate_inp": "feed_forward.router",
    **{
        f"ffn_{part}_exps": f"feed_forward.experts.{{}}.{part}_proj"
        for part in ("gate", "up", "down")
    },
}
_NEMOTRON = _MAMBA2 | {
    "attn_q": "mixer.q_proj",
    "attn_k": "mixer.k_proj",
    "attn_v": "mixer.v_proj",
    "attn_output": "mixer.o_proj",
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
    "ffn_gate_inp": "mixer.gate",
    "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
    "ffn_up_exps": "mixer.experts.{}.up_proj",
    "ffn_down_exps": "mixer.experts.{}.down_proj",
    "ffn_up_shexp": "mixer.shared_experts.up_proj",
    "ffn_down_shexp": "mixer.shared_experts.down_proj",
    "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
}

_NEMOTRON_H = Architecture(
    "nemotron_h",
    "NemotronHForCausalLM",
    _nemotron_h,
    _NEMOTRON,
    changes=_changes,
    prefix="backbone",
    top=_BACKBONE,
    drops_drafts=True,
    rotates=False,
)
FALCON_MAMBA = Architecture(
    "falcon_mamba",
    "FalconMambaForCausalLM",
    _mamba,
    _MAMBA,
    changes=_mamba_changes,
    prefix="backbone",
    top=_BACKBONE,
    attends=False,
)
"""Files state mamba, and norms of steps."""
MAMBAS: Mapping[str, Architecture] = {
    "falcon-h1": Architecture(
        "falcon_h1",
        "FalconH1ForCausalLM",
        _falcon_h1,
        _FALCON_H1,
        changes=_changes,
        top={"output_norm": "model.final_layernorm"},
    ),
    "granitehybrid": Architecture(
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        _granitehybrid,
        _GRANITE_HYBRID,
        permutes=True,
        joins=(*GRANITE, *GRANITE_DENSE),
        changes=_changes,
    ),
    "jamba": Architecture(
        "jamba",
        "JambaForCausalLM",
        _jamba,
        _JAMBA,
        changes=_mamba_changes,
        top={"output_norm": "model.final_layernorm"},
        rotates=False,
    ),
    "mamba": FALCON_MAMBA._replace(model_type="mamba", model_class="MambaForCausalLM"),
    "mamba2": Architecture(
        "mamba2",
        "Mamba2ForCausalLM",
        _mamba2,
        _MAMBA2,
        changes=_changes,
        prefix="backbone",
        top=_BACKBONE,
        attends=False,
    ),
    "nemotron_h": _NEMOTRON_H,
    "nemotron_h_moe": _NEMOTRON_H,
}
"""The architectures, by `general.architecture`."""

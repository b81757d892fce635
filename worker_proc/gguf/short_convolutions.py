"""GGUF architectures with short convolutions: LFM2 and its mixtures."""

from collections.abc import Mapping

from worker_proc.gguf.architecture import (
    KV_HEADS,
    NORMALIZED,
    RMS_NORM_EPSILON,
    Architecture,
    Config,
    check_sigmoid,
    rotated_heads,
    used_experts,
)
from worker_proc.gguf.mapped import MappedFiles
from worker_proc.gguf.metadata import Metadata


def _common(metadata: Metadata) -> Config:
    """Return what both have: those layers attend that have keys and values."""
    count = metadata.integer("block_count")
    if not isinstance(metadata.get(KV_HEADS), list):
        raise metadata.unsupported(KV_HEADS, f"a number for each of {count} layers")
    size = metadata.integer("embedding_length") // metadata.integer("attention.head_count")
    if rotated_heads(metadata)["head_dim"] != size:
        raise metadata.unsupported("attention.key_length", str(size))
    heads = metadata.per_layer(KV_HEADS, count)
    return {
        "layer_types": ["full_attention" if one else "conv" for one in heads],
        "conv_L_cache": metadata.integer("shortconv.l_cache"),
        "conv_bias": False,
        "norm_eps": metadata.number(RMS_NORM_EPSILON),
    }


def _lfm2(metadata: Metadata, file: MappedFiles) -> Config:
    return _common(metadata) | {"block_auto_adjust_ff_dim": False}


def _lfm2moe(metadata: Metadata, file: MappedFiles) -> Config:
    check_sigmoid(metadata)
    return {
        **_common(metadata),
        **used_experts(metadata),
        "num_experts": metadata.integer("expert_count"),
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
        "num_dense_layers": metadata.integer("leading_dense_block_count", 0, min_value=0),
        "routed_scaling_factor": metadata.number_or_none("expert_weights_scale") or 1.0,
        "norm_topk_prob": metadata.flag(NORMALIZED, default=True),
        "use_expert_bias": any("exp_probs_b" in name for name in file.header.tensors),
    }


_LFM2 = {
    "attn_norm": "operator_norm",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
}
_LFM2MOE = _LFM2 | {
    "ffn_gate_inp": "feed_forward.gate",
    "ffn_gate_exps": "feed_forward.experts.{}.w1",
    "ffn_up_exps": "feed_forward.experts.{}.w3",
    "ffn_down_exps": "feed_forward.experts.{}.w2",
    "exp_probs_b.bias": "feed_forward.expert_bias",
}
SHORT_CONVOLUTIONS: Mapping[str, Architecture] = {
    "lfm2": Architecture("lfm2", "Lfm2ForCausalLM", _lfm2, _LFM2),
    "lfm2moe": Architecture("lfm2_moe", "Lfm2MoeForCausalLM", _lfm2moe, _LFM2MOE),
}
"""The architectures, by `general.architecture`."""

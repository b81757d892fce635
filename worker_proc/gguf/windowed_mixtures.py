"""GGUF architectures of mixtures of experts with full attention and windows or chunks."""

from collections.abc import Mapping

from worker_proc.gguf.architecture import (
    EXPERTS,
    KV_HEADS,
    LAYER_NORM_EPSILON,
    LOCAL_BASE,
    NORM_BEHIND,
    NORMALIZED,
    RMS_NORM_EPSILON,
    ROUTED,
    WINDOW,
    Architecture,
    Config,
    before_drafts,
    check_sigmoid,
    has_bias,
    rotated_heads,
    routed,
    used_experts,
    window_layers,
)
from worker_proc.gguf.changes import Change
from worker_proc.gguf.joins import GPT_OSS, LLAMA4
from worker_proc.gguf.layer_norms import projections, rows_of_parts
from worker_proc.gguf.mapped import MappedFiles
from worker_proc.gguf.metadata import Metadata
from worker_proc.gguf.rotary import rope_parameters

_PATTERN = "attention.sliding_window_pattern"
_MIMO_VALUE_SCALE = 0.707
"""The scale of values in MiMo-V2-Flash, whose older files do not state it."""
_LLAMA4_CHUNK = 8192
"""The number of tokens of a chunk, and the number of tokens after which queries are scaled. Files
state neither."""
_UNNORMED_EXPERTS = 128
"""The number of experts of Llama-4 Maverick, whose queries and keys have no norms; those of Scout
have."""


def _gpt_oss(metadata: Metadata, file: MappedFiles) -> Config:
    """Return the configuration; limit and slope of the activation are transformers' defaults."""
    rope = rope_parameters(metadata, file)
    if rope["rope_type"] == "yarn":
        rope["truncate"] = False
    return {
        **rotated_heads(metadata),
        **used_experts(metadata),
        **window_layers(metadata, 2),
        "num_local_experts": metadata.integer("expert_count"),
        "intermediate_size": metadata.integer("expert_feed_forward_length"),
        "sliding_window": metadata.integer(WINDOW),
        "attention_bias": has_bias(file, "attn_q"),
        "rope_parameters": rope,
    }


def _mellum(metadata: Metadata, file: MappedFiles) -> Config:
    """Return the configuration of Mellum-2; only layers with full attention scale angles."""
    rope = rope_parameters(metadata, file)
    base = metadata.number(LOCAL_BASE, rope["rope_theta"])
    window = metadata.integer(WINDOW, 0, min_value=0)
    count = metadata.integer("block_count")
    kinds = window_layers(metadata, 4) if window else {"layer_types": ["full_attention"] * count}
    return {
        **rotated_heads(metadata),
        **used_experts(metadata),
        **kinds,
        "num_experts": metadata.integer("expert_count"),
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
        "norm_topk_prob": metadata.flag(NORMALIZED, default=True),
        "attention_bias": has_bias(file, "attn_q"),
        "sliding_window": window or None,
        "rope_parameters": {
            "full_attention": rope,
            "sliding_attention": {"rope_type": "default", "rope_theta": base},
        },
    }


def _exaone_moe(metadata: Metadata, file: MappedFiles) -> Config:
    check_sigmoid(metadata)
    own = routed(metadata)
    own |= {"num_experts": own.pop("n_routed_experts")}
    own |= {"num_shared_experts": own.pop("n_shared_experts")}
    return {
        **rotated_heads(metadata),
        **window_layers(metadata, 4, before_drafts(metadata)),
        **own,
        "sliding_window": metadata.integer(WINDOW),
    }


def _afmoe(metadata: Metadata, file: MappedFiles) -> Config:
    """Return the configuration of Trinity, whose embeddings are scaled, as in llama.cpp."""
    check_sigmoid(metadata)
    if not metadata.flag(NORMALIZED, default=True):
        raise metadata.unsupported(NORMALIZED, "true")
    return {
        **rotated_heads(metadata),
        **window_layers(metadata, 4),
        **used_experts(metadata),
        "sliding_window": metadata.integer(WINDOW),
        "num_experts": metadata.integer("expert_count"),
        "num_shared_experts": metadata.integer("expert_shared_count", 0, min_value=0),
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
        "num_dense_layers": metadata.integer("leading_dense_block_count", 0, min_value=0),
        "route_scale": metadata.number_or_none("expert_weights_scale") or 1.0,
        "mup_enabled": True,
        "attention_bias": False,
    }


def _llama4(metadata: Metadata, file: MappedFiles) -> Config:
    if metadata.get(WINDOW) == 0:
        raise metadata.unsupported(WINDOW, f"none, or {_LLAMA4_CHUNK}")
    num_experts = metadata.integer("expert_count")
    return {
        **rotated_heads(metadata),
        **used_experts(metadata),
        "num_local_experts": num_experts,
        "intermediate_size": metadata.integer("expert_feed_forward_length"),
        "intermediate_size_mlp": metadata.integer("feed_forward_length"),
        "interleave_moe_layer_step": metadata.integer("interleave_moe_layer_step"),
        "use_qk_norm": num_experts != _UNNORMED_EXPERTS,
        "attention_chunk_size": _LLAMA4_CHUNK,
        "floor_scale": _LLAMA4_CHUNK,
        "attn_scale": 0.1,
        "attn_temperature_tuning": True,
        "attention_bias": has_bias(file, "attn_q"),
        "rope_parameters": rope_parameters(metadata, file),
    }


def _mimo2(metadata: Metadata, file: MappedFiles) -> Config:
    """Return the configuration of MiMo-V2.

    Layers with windows must have twice as many heads of keys as the others. Files state a window
    that is smaller by one token, and older files do not state the scale of values.
    """
    check_sigmoid(metadata)
    metadata.get("leading_dense_block_count")  # tensors show which layers have experts
    count = before_drafts(metadata)
    pattern = metadata.get(_PATTERN)
    if not isinstance(pattern, list) or len(pattern) < count:
        raise metadata.unsupported(_PATTERN, f"true or false for each of {count} layers")
    is_local = [bool(one) for one in pattern[:count]]
    heads = metadata.per_layer(KV_HEADS, count)
    num_keys = min(heads)
    if heads != [num_keys * (1 + one) for one in is_local]:
        raise metadata.unsupported(KV_HEADS, "twice as many in layers with windows as in others")
    size, value_size = _mimo2_sizes(metadata)
    rope = rope_parameters(metadata, file)
    rope["partial_rotary_factor"] = metadata.rotated_share(size)
    base = metadata.number(LOCAL_BASE, rope["rope_theta"])
    tensors = file.header.tensors
    return {
        **used_experts(metadata),
        "head_dim": size,
        "v_head_dim": value_size,
        "num_key_value_heads": num_keys,
        "layer_types": ["sliding_attention" if one else "full_attention" for one in is_local],
        "sliding_window": metadata.integer(WINDOW) + 1,
        "rope_parameters": {
            "full_attention": rope,
            "sliding_attention": rope | {"rope_theta": base},
        },
        "attention_value_scale": metadata.number("attention.value_scale", _MIMO_VALUE_SCALE),
        "mlp_layer_types": [
            "sparse" if f"blk.{number}.ffn_gate_inp.weight" in tensors else "dense"
            for number in range(count)
        ],
        "n_routed_experts": metadata.integer("expert_count"),
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
        "routed_scaling_factor": metadata.number_or_none("expert_weights_scale") or 1.0,
        "norm_topk_prob": metadata.flag(NORMALIZED, default=True),
        "attention_bias": has_bias(file, "attn_q") or has_bias(file, "attn_qkv"),
    }


def _mimo2_sizes(metadata: Metadata) -> tuple[int, int]:
    """Return the dimensions of keys and of values."""
    size = metadata.integer("attention.key_length")
    return size, metadata.integer("attention.value_length", size)


def _split_mimo2(metadata: Metadata) -> Mapping[str, Mapping[str, Change]]:
    """Return the changes that split the tensor of queries, keys and values in newer files."""
    if "blk.0.attn_qkv.weight" not in metadata.header.tensors:
        return {}
    size, value_size = _mimo2_sizes(metadata)
    num_queries = metadata.integer("attention.head_count") * size
    heads = metadata.per_layer(KV_HEADS, before_drafts(metadata))
    if len(set(heads)) > 2:  # with and without windows
        raise metadata.unsupported(KV_HEADS, "two numbers of heads")
    changes = {
        one: projections(rows_of_parts(metadata, num_queries, one * size, one * value_size))
        for one in set(heads)
    }
    return {f"{layer}.attn_qkv": changes[one] for layer, one in enumerate(heads)}


def _cohere2moe(metadata: Metadata, file: MappedFiles) -> Config:
    """Return the configuration of North Mini Code and Command A+.

    As in llama.cpp, all dense layers have a rotary embedding, shared experts count half, and norms
    are RMS norms if their epsilon is stated.
    """
    check_sigmoid(metadata)
    count = before_drafts(metadata)
    if not isinstance(metadata.get(_PATTERN), list):
        raise metadata.unsupported(_PATTERN, f"true or false for each of {count} layers")
    num_dense = metadata.integer("leading_dense_block_count", 0, min_value=0)
    width = metadata.integer("expert_feed_forward_length")
    num_shared = metadata.integer("expert_shared_count", 0, min_value=0)
    if num_shared:
        key, stated = "expert_shared_feed_forward_length", num_shared * width
        if metadata.integer(key, stated) != stated:
            raise metadata.unsupported(key, f"{stated}, the widths of {num_shared} experts")
    epsilon = metadata.number_or_none(RMS_NORM_EPSILON)
    norms = {"layer_norm_eps": metadata.number(LAYER_NORM_EPSILON)} if epsilon is None else {}
    return {
        **rotated_heads(metadata),
        **window_layers(metadata, 4, count),
        **used_experts(metadata),
        **norms,
        "rms_norm_eps": epsilon,
        "sliding_window": metadata.integer(WINDOW),
        "mlp_layer_types": ["dense" if one < num_dense else "sparse" for one in range(count)],
        "prefix_dense_intermediate_size": metadata.integer("feed_forward_length"),
        "intermediate_size": width,
        "num_experts": metadata.integer("expert_count"),
        "num_shared_experts": num_shared,
        "shared_expert_combination_strategy": "average",
        "expert_selection_fn": "sigmoid",
        "norm_topk_prob": metadata.flag(NORMALIZED, default=False),
        "logit_scale": metadata.number("logit_scale"),
        "attention_bias": False,
    }


_GPT_OSS = NORM_BEHIND | {
    "attn_sinks.weight": "self_attn.sinks",
    "ffn_gate_inp": "mlp.router",
    "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
}
_LLAMA4 = {
    **{f"ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
    **{
        f"ffn_{part}_shexp": f"feed_forward.shared_expert.{part}_proj"
        for part in ("gate", "up", "down")
    },
    "ffn_gate_inp": "feed_forward.router",
}
_MIMO2 = ROUTED | {"attn_sinks.weight": "self_attn.attention_sink_bias"}
_EXAONE_MOE = ROUTED | {"exp_probs_b.bias": "mlp.e_score_correction_bias"}
_AFMOE = ROUTED | {
    "attn_gate": "self_attn.gate_proj",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_mlp_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
    "ffn_gate_inp": "mlp.router.gate",
    "exp_probs_b.bias": "mlp.expert_bias",
}

WINDOWED_MIXTURES: Mapping[str, Architecture] = {
    "afmoe": Architecture("afmoe", "AfmoeForCausalLM", _afmoe, _AFMOE),
    "cohere2moe": Architecture(
        "cohere2_moe",
        "Cohere2MoeForCausalLM",
        _cohere2moe,
        ROUTED,
        drops_drafts=True,
        has_rms_norms=False,
    ),
    "exaone-moe": Architecture(
        "exaone_moe", "ExaoneMoeForCausalLM", _exaone_moe, _EXAONE_MOE, drops_drafts=True
    ),
    "gpt-oss": Architecture("gpt_oss", "GptOssForCausalLM", _gpt_oss, _GPT_OSS, joins=GPT_OSS),
    "llama4": Architecture("llama4_text", "Llama4ForCausalLM", _llama4, _LLAMA4, joins=LLAMA4),
    "mellum": Architecture("mellum", "MellumForCausalLM", _mellum, EXPERTS),
    "mimo2": Architecture(
        "mimo_v2_flash",
        "MiMoV2FlashForCausalLM",
        _mimo2,
        _MIMO2,
        drops_drafts=True,
        splits=_split_mimo2,
    ),
}
"""The architectures, by `general.architecture`."""

"""Mixtures of experts with ordinary attention."""

import math
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
    SHARED,
    WINDOW,
    Architecture,
    Config,
    before_drafts,
    check_sigmoid,
    has_bias,
    has_tensor,
    partly_rotated,
    qwen_experts,
    rotated_heads,
    routed,
    used_experts,
    window_layers,
)
from worker_proc.gguf.changes import Change, as_matrix
from worker_proc.gguf.dense import (
    HUNYUAN,
    glm4_config,
    granite_config,
    hunyuan_config,
    qwen2_config,
    qwen3_config,
    without_images,
)
from worker_proc.gguf.joins import DBRX, GPT_OSS, GRANITE, LLAMA4
from worker_proc.gguf.layer_norms import projections, rows_of_parts, split_queries
from worker_proc.gguf.mapped import MappedFiles
from worker_proc.gguf.metadata import Metadata
from worker_proc.gguf.rotary import rope_parameters

_CLAMP = "attention.clamp_kqv"
_PATTERN = "attention.sliding_window_pattern"
_MIMO_VALUE_SCALE = 0.707
"""That of MiMo-V2-Flash."""
_DBRX_EPSILON = 1e-5
"""That of its norms in transformers, whatever config.json states."""
_LLAMA4_CHUNK = 8192
"""The tokens of a chunk, and after how many ones attention is scaled; files do not state them."""
_UNNORMED_EXPERTS = 128
"""Of Llama-4 Maverick, whose queries and keys have no norms; those of Scout have."""


def _mixtral(metadata: Metadata, file: MappedFiles) -> Config:
    own = {"num_local_experts": metadata.integer("expert_count"), "sliding_window": None}
    return rotated_heads(metadata) | used_experts(metadata) | own


def _glm4moe(metadata: Metadata, file: MappedFiles) -> Config:
    check_sigmoid(metadata)
    own = {"use_qk_norm": has_tensor(file, "attn_q_norm.weight")}
    return glm4_config(metadata, file) | routed(metadata) | own


def _bailingmoe2(metadata: Metadata, file: MappedFiles) -> Config:
    """Return what Ling and Ring 2 have: they are computed as GLM-4.5 is.

    The stated width of shared experts is that of one of them.
    """
    check_sigmoid(metadata)
    own = routed(metadata)
    width, shared = own["moe_intermediate_size"], "expert_shared_feed_forward_length"
    shared_width = own["n_shared_experts"] * metadata.integer(shared, width)
    if shared_width % width:
        raise metadata.unsupported(shared, f"a multiple of {width}")
    return {
        **partly_rotated(metadata, file),
        **own,
        "n_shared_experts": shared_width // width,
        "attention_bias": has_bias(file, "attn_qkv"),
        "use_qk_norm": True,
    }


def _gpt_oss(metadata: Metadata, file: MappedFiles) -> Config:
    """Return what it has beside limits and slopes of its activation, which are transformers'."""
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


def _qwen2moe(metadata: Metadata, file: MappedFiles) -> Config:
    shared = metadata.integer("expert_shared_feed_forward_length")
    own = {
        "shared_expert_intermediate_size": shared,
        "norm_topk_prob": metadata.flag(NORMALIZED, default=False),
    }
    return qwen2_config(metadata, file) | qwen_experts(metadata) | own


def _qwen3moe(metadata: Metadata, file: MappedFiles) -> Config:
    own = {"norm_topk_prob": metadata.flag(NORMALIZED, default=True)}
    return qwen3_config(metadata, file) | qwen_experts(metadata) | own


def _mellum(metadata: Metadata, file: MappedFiles) -> Config:
    """Return what Mellum-2 has; only full attention scales angles."""
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


def _olmoe(metadata: Metadata, file: MappedFiles) -> Config:
    return {
        **qwen2_config(metadata, file),
        **used_experts(metadata),
        "num_experts": metadata.integer("expert_count"),
        "norm_topk_prob": metadata.flag(NORMALIZED, default=False),
        "attention_bias": False,
    }


def _granitemoe(metadata: Metadata, file: MappedFiles) -> Config:
    shared = file.header.tensors.get("blk.0.ffn_up_shexp.weight")
    return {
        **granite_config(metadata, file),
        **used_experts(metadata),
        "num_local_experts": metadata.integer("expert_count"),
        **({} if shared is None else {"shared_intermediate_size": shared.shape[0]}),
    }


def _phimoe(metadata: Metadata, file: MappedFiles) -> Config:
    """Return what Phi-3.5-MoE has; files state one scale for short and long texts."""
    rope = rope_parameters(metadata, file)
    if rope["rope_type"] == "longrope":
        scale = rope.pop("attention_factor", 1.0)
        rope |= {"short_mscale": scale, "long_mscale": scale}
    return {
        **rotated_heads(metadata),
        **used_experts(metadata),
        "num_local_experts": metadata.integer("expert_count"),
        "sliding_window": metadata.integer(WINDOW, 0, min_value=0) or None,
        "attention_bias": has_bias(file, "attn_q"),
        "lm_head_bias": "output.bias" in file.header.tensors,
        "rope_parameters": rope,
    }


def _ernie4_5_moe(metadata: Metadata, file: MappedFiles) -> Config:
    return {
        **rotated_heads(metadata),
        "use_bias": has_bias(file, "attn_q"),
        "moe_k": metadata.integer("expert_used_count"),
        "moe_num_experts": metadata.integer("expert_count"),
        "moe_num_shared_experts": metadata.integer("expert_shared_count", 0, min_value=0),
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
        "moe_layer_start_index": metadata.integer("leading_dense_block_count", 0, min_value=0),
        "moe_layer_interval": metadata.integer("interleave_moe_layer_step", 1),
    }


def _scores_as_matrix(metadata: Metadata) -> Mapping[str, Change]:
    return {"exp_probs_b.bias": Change(values=as_matrix)}


def _hunyuan_moe(metadata: Metadata, file: MappedFiles) -> Config:
    return hunyuan_config(metadata, file) | {
        "num_experts": metadata.integer("expert_count"),
        "moe_topk": metadata.integer("expert_used_count"),
        "intermediate_size": metadata.integer("expert_feed_forward_length"),
    }


def _dots1(metadata: Metadata, file: MappedFiles) -> Config:
    check_sigmoid(metadata)
    own = {"sliding_window": None, "attention_bias": has_bias(file, "attn_q")}
    return rotated_heads(metadata) | routed(metadata) | own


def _minimax_m2(metadata: Metadata, file: MappedFiles) -> Config:
    check_sigmoid(metadata)
    return {
        **partly_rotated(metadata, file),
        **used_experts(metadata),
        "num_local_experts": metadata.integer("expert_count"),
        "intermediate_size": metadata.integer("expert_feed_forward_length"),
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
    """Return what Trinity has; as in llama.cpp, its embeddings are scaled."""
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
    """Return what MiMo-V2 has: layers with windows have twice as many heads of keys.

    A window has one token less in files, and older files do not state how values are scaled.
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
    """Return the values of a key and of a value."""
    size = metadata.integer("attention.key_length")
    return size, metadata.integer("attention.value_length", size)


def _split_mimo2(metadata: Metadata) -> Mapping[str, Mapping[str, Change]]:
    """Return how queries, keys and values are one tensor in each layer, which newer files have."""
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
    """Return what North Mini Code and Command A+ have.

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


def _dbrx(metadata: Metadata, file: MappedFiles) -> Config:
    rotated_heads(metadata)  # its sizes follow from others
    epsilon = metadata.number(LAYER_NORM_EPSILON)
    if not math.isclose(epsilon, _DBRX_EPSILON, rel_tol=1e-6):
        raise metadata.unsupported(LAYER_NORM_EPSILON, str(_DBRX_EPSILON))
    rope = rope_parameters(metadata, file)
    width = metadata.integer("feed_forward_length")
    heads = metadata.integer("attention.head_count")
    return {
        "d_model": metadata.integer("embedding_length"),
        "n_heads": heads,
        "n_layers": metadata.integer("block_count"),
        "max_seq_len": metadata.integer("context_length"),
        "rope_parameters": rope,
        "attn_config": {
            "kv_n_heads": metadata.integer(KV_HEADS, heads),
            "clip_qkv": metadata.number(_CLAMP),
            "rope_theta": rope["rope_theta"],
        },
        "ffn_config": {
            "ffn_hidden_size": width,
            "moe_num_experts": metadata.integer("expert_count"),
            "moe_top_k": metadata.integer("expert_used_count"),
        },
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
_DBRX = {
    "attn_norm": "norm_attn_norm.norm_1",
    "attn_qkv": "norm_attn_norm.attn.Wqkv",
    "attn_output": "norm_attn_norm.attn.out_proj",
    "attn_output_norm": "norm_attn_norm.norm_2",
    "ffn_gate_inp": "ffn.router.layer",
}
_MIXTRAL = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
_MIMO2 = ROUTED | {"attn_sinks.weight": "self_attn.attention_sink_bias"}
_MINIMAX_M2 = _MIXTRAL | {
    "exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias",
}
_ERNIE4_5_MOE = ROUTED | {
    "exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias",
}
_HUNYUAN_MOE = (
    HUNYUAN
    | EXPERTS
    | {
        "ffn_gate_inp": "mlp.gate.wg",
        "ffn_gate_shexp": "mlp.shared_mlp.gate_proj",
        "ffn_up_shexp": "mlp.shared_mlp.up_proj",
        "ffn_down_shexp": "mlp.shared_mlp.down_proj",
    }
)
_EXAONE_MOE = ROUTED | {"exp_probs_b.bias": "mlp.e_score_correction_bias"}
_AFMOE = ROUTED | {
    "attn_gate": "self_attn.gate_proj",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_mlp_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
    "ffn_gate_inp": "mlp.router.gate",
    "exp_probs_b.bias": "mlp.expert_bias",
}
GRANITE_NAMES = {
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    "ffn_down_shexp": "shared_mlp.output_linear",
}

MIXTRAL = Architecture("mixtral", "MixtralForCausalLM", _mixtral, _MIXTRAL, permutes=True)
"""Files state llama, and a number of experts."""
GRANITE_SHARED = Architecture(
    "granitemoeshared",
    "GraniteMoeSharedForCausalLM",
    _granitemoe,
    GRANITE_NAMES,
    permutes=True,
    joins=GRANITE,
)
"""Files state granitemoe, and have shared experts."""
MIXTURES: Mapping[str, Architecture] = {
    "afmoe": Architecture("afmoe", "AfmoeForCausalLM", _afmoe, _AFMOE),
    "bailingmoe2": Architecture(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        _bailingmoe2,
        ROUTED,
        drops_drafts=True,
        splits=split_queries,
    ),
    "cohere2moe": Architecture(
        "cohere2_moe",
        "Cohere2MoeForCausalLM",
        _cohere2moe,
        ROUTED,
        drops_drafts=True,
        has_rms_norms=False,
    ),
    "dbrx": Architecture(
        "dbrx",
        "DbrxForCausalLM",
        _dbrx,
        _DBRX,
        joins=DBRX,
        top={"token_embd": "transformer.wte", "output_norm": "transformer.norm_f"},
        prefix="transformer",
        layers="blocks",
        has_rms_norms=False,
    ),
    "dots1": Architecture("dots1", "Dots1ForCausalLM", _dots1, ROUTED),
    "ernie4_5-moe": Architecture(
        "ernie4_5_moe",
        "Ernie4_5_MoeForCausalLM",
        _ernie4_5_moe,
        _ERNIE4_5_MOE,
        changes=_scores_as_matrix,
    ),
    "exaone-moe": Architecture(
        "exaone_moe", "ExaoneMoeForCausalLM", _exaone_moe, _EXAONE_MOE, drops_drafts=True
    ),
    "glm4moe": Architecture(
        "glm4_moe", "Glm4MoeForCausalLM", _glm4moe, ROUTED | NORM_BEHIND, drops_drafts=True
    ),
    "gpt-oss": Architecture("gpt_oss", "GptOssForCausalLM", _gpt_oss, _GPT_OSS, joins=GPT_OSS),
    "granitemoe": GRANITE_SHARED._replace(
        model_type="granitemoe", model_class="GraniteMoeForCausalLM"
    ),
    "hunyuan-moe": Architecture(
        "hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM", _hunyuan_moe, _HUNYUAN_MOE
    ),
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
    "minimax-m2": Architecture("minimax_m2", "MiniMaxM2ForCausalLM", _minimax_m2, _MINIMAX_M2),
    "olmoe": Architecture("olmoe", "OlmoeForCausalLM", _olmoe, EXPERTS),
    "phimoe": Architecture("phimoe", "PhimoeForCausalLM", _phimoe, _MIXTRAL),
    "qwen2moe": Architecture("qwen2_moe", "Qwen2MoeForCausalLM", _qwen2moe, EXPERTS | SHARED),
    "qwen3moe": Architecture("qwen3_moe", "Qwen3MoeForCausalLM", _qwen3moe, EXPERTS),
    "qwen3vlmoe": Architecture(
        "qwen3_moe", "Qwen3MoeForCausalLM", without_images(_qwen3moe), EXPERTS
    ),
}
"""By `general.architecture`."""

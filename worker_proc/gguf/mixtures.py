"""GGUF architectures of mixtures of experts with one kind of attention in all layers."""

import math
from collections.abc import Mapping

from worker_proc.gguf.architecture import (
    EXPERTS,
    KV_HEADS,
    LAYER_NORM_EPSILON,
    NORM_BEHIND,
    NORMALIZED,
    ROUTED,
    SHARED,
    WINDOW,
    Architecture,
    Config,
    check_sigmoid,
    has_bias,
    has_tensor,
    partly_rotated,
    qwen_experts,
    rotated_heads,
    routed,
    used_experts,
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
from worker_proc.gguf.joins import DBRX, GRANITE
from worker_proc.gguf.layer_norms import split_queries
from worker_proc.gguf.mapped import MappedFiles
from worker_proc.gguf.metadata import Metadata
from worker_proc.gguf.rotary import rope_parameters

_CLAMP = "attention.clamp_kqv"
_DBRX_EPSILON = 1e-5
"""The epsilon of DBRX's norms in transformers, which ignores that of config.json."""


def _mixtral(metadata: Metadata, file: MappedFiles) -> Config:
    own = {"num_local_experts": metadata.integer("expert_count"), "sliding_window": None}
    return rotated_heads(metadata) | used_experts(metadata) | own


def _glm4moe(metadata: Metadata, file: MappedFiles) -> Config:
    check_sigmoid(metadata)
    own = {"use_qk_norm": has_tensor(file, "attn_q_norm.weight")}
    return glm4_config(metadata, file) | routed(metadata) | own


def _bailingmoe2(metadata: Metadata, file: MappedFiles) -> Config:
    """Return the configuration of Ling 2 and Ring 2, which are computed as GLM-4.5.

    The stated width of shared experts is that of one shared expert.
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
    """Return the configuration of Phi-3.5-MoE; files state one scale for short and long texts."""
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


def _dbrx(metadata: Metadata, file: MappedFiles) -> Config:
    rotated_heads(metadata)  # called for its checks; the sizes follow from others
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
GRANITE_NAMES = {
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    "ffn_down_shexp": "shared_mlp.output_linear",
}

MIXTRAL = Architecture("mixtral", "MixtralForCausalLM", _mixtral, _MIXTRAL, permutes=True)
"""The architecture of files that state llama and a number of experts."""
GRANITE_SHARED = Architecture(
    "granitemoeshared",
    "GraniteMoeSharedForCausalLM",
    _granitemoe,
    GRANITE_NAMES,
    permutes=True,
    joins=GRANITE,
)
"""The architecture of files that state granitemoe and have shared experts."""
MIXTURES: Mapping[str, Architecture] = {
    "bailingmoe2": Architecture(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        _bailingmoe2,
        ROUTED,
        drops_drafts=True,
        splits=split_queries,
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
    "glm4moe": Architecture(
        "glm4_moe", "Glm4MoeForCausalLM", _glm4moe, ROUTED | NORM_BEHIND, drops_drafts=True
    ),
    "granitemoe": GRANITE_SHARED._replace(
        model_type="granitemoe", model_class="GraniteMoeForCausalLM"
    ),
    "hunyuan-moe": Architecture(
        "hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM", _hunyuan_moe, _HUNYUAN_MOE
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
"""The architectures, by `general.architecture`."""

"""Small models of architectures that transformers computes with code of their own.

Their configurations differ in names, and their files in how queries, keys and values lie together.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType as Type
from transformers import (
    BloomConfig,
    DbrxConfig,
    FalconConfig,
    GlmConfig,
    GlmMoeDsaConfig,
    GPT2Config,
    GPTBigCodeConfig,
    GPTNeoXConfig,
    Jais2Config,
    JambaConfig,
    KimiLinearConfig,
    Llama4TextConfig,
    LlamaConfig,
    MiMoV2FlashConfig,
    MiniCPM3Config,
    MptConfig,
    PhiConfig,
    PretrainedConfig,
    StableLmConfig,
)

from tests.worker.checkpoints import WINDOW
from tests.worker.gguf.gguf_files import WIDE

_IDS = {key: WIDE[key] for key in WIDE if key.endswith("_token_id") or key == "vocab_size"}
_TIED = {"tie_word_embeddings": True}
_GPT: dict[str, Any] = _IDS | _TIED | {"n_embd": 256, "n_layer": 2, "n_head": 4, "n_inner": 512}
_NO_HEAD_SIZE = {key: value for key, value in WIDE.items() if key != "head_dim"}
_NEOX = {key: value for key, value in _NO_HEAD_SIZE.items() if "key_value" not in key}
_FALCON: dict[str, Any] = _NEOX | {"ffn_hidden_size": 512}
_HALF: dict[str, Any] = {
    "rope_parameters": {
        **{"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
    },
}
_JAMBA_KEYS: dict[str, Any] = {
    **{"ssm.conv_kernel": 4, "ssm.state_size": 32, "ssm.inner_size": 512},
    "ssm.time_step_rank": 32,
}
LLAMA4_ROPE: dict[str, Any] = {
    **{"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 16.0},
    **{"low_freq_factor": 1.0, "high_freq_factor": 1.0},
    "original_max_position_embeddings": 8192,
}
OLDER: dict[str, Callable[[], PretrainedConfig]] = {
    "gpt2": lambda: GPT2Config(**_GPT, n_positions=256),
    "starcoder": lambda: GPTBigCodeConfig(**_GPT, n_positions=256),
    "gptneox": lambda: GPTNeoXConfig(**_NEOX, **_HALF),
    "gptneox_serial": lambda: GPTNeoXConfig(**_NEOX, **_HALF, use_parallel_residual=False),
    "bloom": lambda: BloomConfig(**_IDS, **_TIED, hidden_size=256, n_layer=2, n_head=4),
    "mpt": lambda: MptConfig(
        **_IDS,
        **_TIED,
        **{"d_model": 256, "n_heads": 4, "n_layers": 2, "max_seq_len": 256},
        attn_config={"alibi": True, "alibi_bias_max": 16, "clip_qkv": 0.75},
    ),
    "falcon": lambda: FalconConfig(**_FALCON, **_TIED, multi_query=True),
    "falcon_40b": lambda: FalconConfig(
        **_FALCON, **_TIED, new_decoder_architecture=True, num_kv_heads=2
    ),
    "falcon_11b": lambda: FalconConfig(
        **_FALCON, new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1
    ),
    "phi2": lambda: PhiConfig(**_NO_HEAD_SIZE, **_HALF),
    "phi2_joined": lambda: PhiConfig(**_NO_HEAD_SIZE, **_HALF),
    "stablelm": lambda: StableLmConfig(**_NO_HEAD_SIZE, **_HALF, use_qkv_bias=True),
    "stablelm_parallel": lambda: StableLmConfig(
        **_NO_HEAD_SIZE, **_HALF, qk_layernorm=True, use_parallel_residual=True
    ),
    "orion": lambda: StableLmConfig(
        **_NO_HEAD_SIZE,
        rope_parameters={
            **{"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 1.0}
        },
    ),
    "jais2": lambda: Jais2Config(**WIDE),
    "chatglm": lambda: GlmConfig(**WIDE, **_HALF, attention_bias=True),
    "chatglm_joined": lambda: GlmConfig(**WIDE, **_HALF, attention_bias=True),
    "exaone": lambda: LlamaConfig(**WIDE),
    "pangu-embedded": lambda: LlamaConfig(**WIDE, attention_bias=True),
    "xverse": lambda: LlamaConfig(**WIDE),
}
NEWER: dict[str, Callable[[], PretrainedConfig]] = {
    "jamba": lambda: JambaConfig(
        **_NO_HEAD_SIZE | {"num_hidden_layers": 5},
        **{"attn_layer_period": 3, "attn_layer_offset": 1, "expert_layer_period": 2},
        **{"expert_layer_offset": 1, "num_experts": 4, "num_experts_per_tok": 2},
        **{"mamba_d_state": 32, "mamba_dt_rank": 32},
    ),
    "jamba_dense": lambda: JambaConfig(
        **_NO_HEAD_SIZE,
        **{"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1},
        **{"num_experts_per_tok": 1, "mamba_d_state": 32, "mamba_dt_rank": 32},
    ),
    "dbrx": lambda: DbrxConfig(
        **_IDS,
        **{"d_model": 256, "n_heads": 4, "n_layers": 2, "max_seq_len": 256},
        attn_config={"kv_n_heads": 2, "clip_qkv": 1.5, "rope_theta": 500_000.0},
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        ffn_config={"ffn_hidden_size": 256, "moe_num_experts": 4, "moe_top_k": 2},
    ),
    "llama4": lambda: Llama4TextConfig(
        **WIDE | {"num_hidden_layers": 4, "intermediate_size": 256},
        **{"intermediate_size_mlp": 512, "num_local_experts": 4, "num_experts_per_tok": 1},
        **{"interleave_moe_layer_step": 2, "rope_parameters": LLAMA4_ROPE},
    ),
    "minicpm3": lambda: MiniCPM3Config(
        **_NO_HEAD_SIZE | {"num_key_value_heads": 4},
        **{"kv_lora_rank": 64, "q_lora_rank": 128, "qk_rope_head_dim": 32},
        **{"qk_nope_head_dim": 64, "v_head_dim": 64},
    ),
}
LATENT: dict[str, Any] = {
    **_NO_HEAD_SIZE,
    **{"num_key_value_heads": 4, "kv_lora_rank": 64, "qk_rope_head_dim": 16},
    **{"qk_nope_head_dim": 32, "v_head_dim": 64},
}
LATENTS: dict[str, Callable[[], PretrainedConfig]] = {
    "glm-dsa": lambda: GlmMoeDsaConfig(
        **LATENT | {"num_hidden_layers": 4},
        **{"q_lora_rank": 64, "n_routed_experts": 4, "num_experts_per_tok": 2},
        **{"moe_intermediate_size": 256, "first_k_dense_replace": 1, "index_topk": 256},
        **{"index_head_dim": 32, "index_n_heads": 4, "routed_scaling_factor": 1.5},
        indexer_types=["full", "full", "shared", "full"],
    ),
    "kimi-linear": lambda: KimiLinearConfig(
        **LATENT | {"num_hidden_layers": 3},
        **{"num_experts": 4, "num_experts_per_token": 2, "moe_intermediate_size": 256},
        **{"linear_head_dim": 64, "linear_num_heads": 4, "routed_scaling_factor": 1.5},
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        mlp_layer_types=["dense", "sparse", "sparse"],
    ),
    "mimo2": lambda: MiMoV2FlashConfig(
        **WIDE | {"num_hidden_layers": 3, "num_key_value_heads": 1},
        **{"v_head_dim": 32, "sliding_window": WINDOW + 1, "attention_value_scale": 0.5},
        **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256},
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        rope_parameters={
            f"{kind}_attention": {
                **{"rope_type": "default", "rope_theta": base, "partial_rotary_factor": 0.5}
            }
            for kind, base in (("full", 5e6), ("sliding", 1e4))
        },
    ),
}
OLDER |= NEWER | LATENTS
OLDER["mimo2_joined"] = OLDER["mimo2"]
OLDER_KEYS: dict[str, dict[str, Any]] = {
    "jamba": _JAMBA_KEYS | {"attention.head_count_kv": [0, 2, 0, 0, 2]},
    "jamba_dense": _JAMBA_KEYS | {"attention.head_count_kv": [0, 2]},
    "dbrx": {
        **{"attention.head_count_kv": 2, "attention.clamp_kqv": 1.5, "feed_forward_length": 256},
        **{"expert_count": 4, "expert_used_count": 2, "attention.layer_norm_epsilon": 1e-5},
    },
    "glm-dsa": {
        **{"attention.indexer.head_count": 4, "attention.indexer.key_length": 32},
        **{"attention.indexer.top_k": 256, "expert_weights_norm": True, "expert_gating_func": 2},
        "attention.indexer.types": [True, True, False, True],
    },
    "kimi-linear": {
        **{"attention.head_count_kv": [0, 1, 0], "kda.head_dim": 64, "ssm.conv_kernel": 4},
        **{"expert_gating_func": 2, "leading_dense_block_count": 1, "vocab_size": 512},
    },
    "mimo2": {
        **{"attention.head_count_kv": [1, 2, 1, 2], "attention.value_length": 32},
        **{"attention.sliding_window": WINDOW, "rope.freq_base_swa": 10_000.0},
        **{"attention.sliding_window_pattern": [False, True, False, True]},
        **{"attention.value_scale": 0.5, "nextn_predict_layers": 1, "rope.dimension_count": 32},
        "expert_gating_func": 2,
    },
    "llama4": {
        **{"expert_feed_forward_length": 256, "feed_forward_length": 512},
        "interleave_moe_layer_step": 2,
    },
    "starcoder": {"attention.head_count_kv": 1},
    "gptneox": {"use_parallel_residual": True},
    "gptneox_serial": {"use_parallel_residual": False},
    "bloom": {"feed_forward_length": 1024},
    "mpt": {
        "feed_forward_length": 1024,
        "attention.max_alibi_bias": 16.0,
        "attention.clamp_kqv": 0.75,
    },
    "falcon": {"attention.head_count_kv": 1},
    **{name: {"attention.head_count_kv": 2} for name in ("falcon_40b", "falcon_11b")},
    **{name: {"use_parallel_residual": True} for name in ("stablelm", "stablelm_parallel")},
}
OLDER_KEYS["mimo2_joined"] = OLDER_KEYS["mimo2"]
OLDER_ARCHITECTURES = {
    "gptneox_serial": "gptneox",
    **dict.fromkeys(("falcon_40b", "falcon_11b"), "falcon"),
    "jamba_dense": "jamba",
    "phi2_joined": "phi2",
    "stablelm_parallel": "stablelm",
    "chatglm_joined": "chatglm",
    "mimo2_joined": "mimo2",
}
OLDER_FILES: Mapping[str, Type] = {
    **dict.fromkeys(OLDER, Type.Q4_0),
    **{"gpt2": Type.Q8_0, "bloom": Type.Q8_0, "phi2_joined": Type.Q6_K},
}
"""The type of the matrices of each file."""
JOINED_FILES = ("phi2_joined", "chatglm_joined", "mimo2_joined", "bailingmoe2")
"""Files whose queries, keys and values are one tensor."""


def _llama4_factors() -> np.ndarray:
    """Return by what frequencies are divided: longer ones than 8192 tokens, by 16."""
    places = np.arange(0, 64, 2, dtype=np.float64) / 64
    lengths = 2 * np.pi * 500_000.0**places
    return np.where(lengths > 8192, 16.0, 1.0).astype(np.float32)


OLDER_TENSORS = {"llama4": {"rope_freqs.weight": _llama4_factors()}}

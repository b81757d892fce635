"""Small models of every architecture that is read from GGUF files, and how each is written."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType as Type
from transformers import (
    AfmoeConfig,
    ApertusConfig,
    ArceeConfig,
    Cohere2Config,
    Cohere2MoeConfig,
    CohereConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    Dots1Config,
    Ernie4_5_MoeConfig,
    Ernie4_5Config,
    Exaone4Config,
    ExaoneMoeConfig,
    FalconH1Config,
    FalconMambaConfig,
    Gemma2Config,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GemmaConfig,
    Glm4Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeConfig,
    GraniteMoeHybridConfig,
    GraniteMoeSharedConfig,
    HunYuanDenseV1Config,
    HunYuanMoEV1Config,
    Lfm2Config,
    Lfm2MoeConfig,
    LlamaConfig,
    Mamba2Config,
    MambaConfig,
    MellumConfig,
    MiniMaxM2Config,
    Ministral3Config,
    MistralConfig,
    MixtralConfig,
    NemotronConfig,
    NemotronHConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoConfig,
    OlmoeConfig,
    Phi3Config,
    PhimoeConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SeedOssConfig,
    SmolLM3Config,
    Starcoder2Config,
)

from tests.worker.checkpoints import WINDOW
from tests.worker.gguf.gguf_files import WIDE, layout_of, write_gguf
from tests.worker.gguf.gguf_layouts import APERTUS_ACTIVATION, JOINED
from tests.worker.gguf.gguf_older_models import (
    JOINED_FILES,
    OLDER,
    OLDER_ARCHITECTURES,
    OLDER_FILES,
    OLDER_KEYS,
    OLDER_TENSORS,
)
from tests.worker.gguf.layout import then
from worker_proc.gguf.architectures import ARCHITECTURES as READ

MOE: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 256}
GEMMA: dict[str, Any] = {
    **{"sliding_window": WINDOW, "query_pre_attn_scalar": 64, "tie_word_embeddings": False}
}
MINISTRAL3_ROPE: dict[str, Any] = {
    **{"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "beta_fast": 32.0},
    **{"beta_slow": 1.0, "original_max_position_embeddings": 16, "mscale": 1.0},
    **{"mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5},
}
LATENT: dict[str, Any] = {
    **{key: value for key, value in WIDE.items() if key != "head_dim"},
    **MOE,
    **{"num_key_value_heads": 4, "kv_lora_rank": 64, "qk_rope_head_dim": 16},
    **{"qk_nope_head_dim": 32, "v_head_dim": 64, "n_routed_experts": 8},
}
DEEPSEEK_ROPE: dict[str, Any] = {
    **{"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "mscale": 0.7},
    **{"mscale_all_dim": 0.7, "original_max_position_embeddings": 64},
}
MELLUM_ROPE: dict[str, Any] = {
    **{"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0},
    "original_max_position_embeddings": 64,
}
DELTA: dict[str, Any] = WIDE | {
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    **{"num_hidden_layers": 3, "linear_conv_kernel_dim": 3},
    **{"linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_num_key_heads": 2},
    "linear_num_value_heads": 4,
}
SHARED_EXPERT = {"shared_expert_intermediate_size": 256}
MROPE: dict[str, Any] = {
    **{"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    **{"mrope_section": [4, 2, 2], "mrope_interleaved": True},
}
DELTA_KEYS: dict[str, Any] = {
    **{"ssm.conv_kernel": 3, "ssm.state_size": 64, "ssm.group_count": 2, "ssm.inner_size": 256},
    **{"ssm.time_step_rank": 4, "full_attention_interval": 3},
}
WITHOUT_HEAD_SIZE = {key: value for key, value in WIDE.items() if key != "head_dim"}
FOUR_EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
GRANITE_SCALES: dict[str, Any] = {
    **{"embedding_multiplier": 1.5, "residual_multiplier": 0.5},
    **{"attention_multiplier": 0.1, "logits_scaling": 2.0},
}
LOCAL = "sliding_attention"
WINDOWS: dict[str, Any] = {
    **{"num_hidden_layers": 4, "sliding_window": WINDOW},
    "layer_types": [LOCAL, LOCAL, LOCAL, "full_attention"],
}
SHARED_KEYS: dict[str, Any] = {
    **{"num_hidden_layers": 5, "num_kv_shared_layers": 2, "sliding_window": WINDOW},
    "layer_types": [LOCAL, "full_attention", LOCAL, LOCAL, "full_attention"],
    **{"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 512},
    "tie_word_embeddings": False,
}
SHARED_KEYS_PATTERN = [True, False, True, True, False]
MAMBA2: dict[str, Any] = {
    **{"mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 32, "mamba_n_groups": 2},
}
MAMBA2_KEYS: dict[str, Any] = {
    **{"ssm.conv_kernel": 4, "ssm.state_size": 32, "ssm.group_count": 2, "ssm.inner_size": 512},
    "ssm.time_step_rank": 8,
}
MAMBA_KEYS: dict[str, Any] = {
    **{"ssm.conv_kernel": 4, "ssm.state_size": 32, "ssm.inner_size": 512},
    **{"ssm.time_step_rank": 32, "attention.head_count": 0, "feed_forward_length": 0},
}
HYBRID: dict[str, Any] = {"layer_types": ["linear_attention", "full_attention"], **MAMBA2}
NO_HEADS: dict[str, Any] = {
    key: value for key, value in WITHOUT_HEAD_SIZE.items() if "num_" not in key
} | {"num_hidden_layers": 2, "head_dim": 64}
NEMOTRON_H: dict[str, Any] = {
    **{key: value for key, value in WIDE.items() if key != "num_hidden_layers"},
    **{"mamba_num_heads": 8, "mamba_head_dim": 64, "ssm_state_size": 32, "n_groups": 2},
    "layers_block_type": ["linear_attention", "full_attention", "mlp", "linear_attention"],
}
GEMMA4_KEYS: dict[str, Any] = {
    **{"attention.key_length": 128, "attention.value_length": 128, "rope.dimension_count": 128},
    **{"attention.key_length_swa": 64, "attention.value_length_swa": 64},
    **{"rope.dimension_count_swa": 64, "rope.freq_base_swa": 10_000.0},
    "attention.sliding_window_pattern": SHARED_KEYS_PATTERN,
}
PROPORTIONAL = {"rope_freqs.weight": np.array([1.0] * 16 + [1e30] * 48, np.float32)}
CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**WIDE),
    "llama_tied": lambda: LlamaConfig(**WIDE, tie_word_embeddings=True),
    "mistral": lambda: MistralConfig(**WIDE, sliding_window=None),
    "mixtral": lambda: MixtralConfig(
        **WIDE, num_local_experts=4, num_experts_per_tok=2, sliding_window=None
    ),
    "qwen2": lambda: Qwen2Config(**WIDE),
    "qwen2moe": lambda: Qwen2MoeConfig(
        **WIDE, **MOE, num_experts=4, shared_expert_intermediate_size=256
    ),
    "qwen3": lambda: Qwen3Config(**WIDE),
    "qwen3moe": lambda: Qwen3MoeConfig(**WIDE, **MOE, num_experts=4, norm_topk_prob=True),
    "qwen3moe_fused": lambda: Qwen3MoeConfig(**WIDE, **MOE, num_experts=4, norm_topk_prob=True),
    "gemma": lambda: GemmaConfig(**WIDE),
    "gemma2": lambda: Gemma2Config(**WIDE, **GEMMA),
    "gemma3": lambda: Gemma3TextConfig(**WIDE, **GEMMA),
    "phi3": lambda: Phi3Config(**WIDE, original_max_position_embeddings=256),
    "granite": lambda: GraniteConfig(
        **WIDE,
        embedding_multiplier=1.5,
        residual_multiplier=0.5,
        attention_multiplier=0.1,
        logits_scaling=2.0,
    ),
    "smollm3": lambda: SmolLM3Config(**WIDE | {"num_hidden_layers": 5}),
    "ernie4_5": lambda: Ernie4_5Config(**WIDE),
    "lfm2": lambda: Lfm2Config(
        **{key: value for key, value in WIDE.items() if key != "head_dim"},
        layer_types=["conv", "full_attention"],
        block_auto_adjust_ff_dim=False,
    ),
    "glm4": lambda: Glm4Config(**WIDE, attention_bias=True),
    "olmo2": lambda: Olmo2Config(**WIDE),
    "seed_oss": lambda: SeedOssConfig(**WIDE),
    "mistral3": lambda: Ministral3Config(**WIDE, rope_parameters=MINISTRAL3_ROPE),
    "mistral_small": lambda: MistralConfig(**WIDE, sliding_window=None),
    "glm4moe": lambda: Glm4MoeConfig(
        **WIDE,
        **MOE,
        **{"n_routed_experts": 4, "n_shared_experts": 2, "routed_scaling_factor": 1.5},
        **{"use_qk_norm": True, "attention_bias": True},
    ),
    "bailingmoe2": lambda: Glm4MoeConfig(
        **WIDE,
        **MOE,
        **{"n_routed_experts": 8, "n_shared_experts": 2, "routed_scaling_factor": 2.5},
        **{"n_group": 4, "topk_group": 2, "use_qk_norm": True, "attention_bias": False},
    ),
    "deepseek_v2": lambda: DeepseekV2Config(
        **LATENT,
        **{"q_lora_rank": None, "n_shared_experts": 2, "rope_parameters": DEEPSEEK_ROPE},
        **{"routed_scaling_factor": 1.5, "first_k_dense_replace": 1},
    ),
    "deepseek_v2_groups": lambda: DeepseekV2Config(
        **LATENT,
        **{"q_lora_rank": 64, "n_shared_experts": 1, "topk_method": "group_limited_greedy"},
        **{"n_group": 4, "topk_group": 1},
    ),
    "deepseek_v3": lambda: DeepseekV3Config(
        **LATENT,
        **{"q_lora_rank": 64, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1},
        rope_parameters=DEEPSEEK_ROPE | {"mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    "glm4_moe_lite": lambda: Glm4MoeLiteConfig(**LATENT, q_lora_rank=64),
    "gpt-oss": lambda: GptOssConfig(
        **WIDE, num_local_experts=4, num_experts_per_tok=2, sliding_window=WINDOW
    ),
    "qwen2vl": lambda: Qwen2Config(**WIDE),
    "qwen3vl": lambda: Qwen3Config(**WIDE),
    "qwen3vlmoe": lambda: Qwen3MoeConfig(**WIDE, **MOE, num_experts=4, norm_topk_prob=True),
    "qwen3next": lambda: Qwen3NextConfig(**DELTA, **MOE, num_experts=4, **SHARED_EXPERT),
    "qwen35": lambda: Qwen3_5TextConfig(**DELTA, rope_parameters=MROPE),
    "qwen35moe": lambda: Qwen3_5MoeTextConfig(
        **DELTA, **MOE, num_experts=4, **SHARED_EXPERT, rope_parameters=MROPE
    ),
}
FURTHER: dict[str, Callable[[], PretrainedConfig]] = {
    "gemma3n": lambda: Gemma3nTextConfig(
        **WIDE | SHARED_KEYS, activation_sparsity_pattern=[0.95, 0.5, 0.0, 0.0, 0.0]
    ),
    "gemma4": lambda: Gemma4TextConfig(
        **WIDE | SHARED_KEYS,
        **{"global_head_dim": 128, "use_double_wide_mlp": True, "final_logit_softcapping": 30.0},
    ),
    "gemma4_experts": lambda: Gemma4TextConfig(
        **WIDE | SHARED_KEYS | {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0},
        **{"global_head_dim": 128, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
        **{"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2},
        moe_intermediate_size=128,
    ),
    "granitehybrid": lambda: GraniteMoeHybridConfig(
        **WITHOUT_HEAD_SIZE,
        **HYBRID,
        **GRANITE_SCALES,
        **FOUR_EXPERTS,
        shared_intermediate_size=256,
    ),
    "granitehybrid_dense": lambda: GraniteMoeHybridConfig(
        **WITHOUT_HEAD_SIZE,
        **HYBRID,
        **GRANITE_SCALES,
        **{"num_local_experts": 0, "shared_intermediate_size": 512},
        position_embedding_type="rope",
    ),
    "granitemoe": lambda: GraniteMoeConfig(**WITHOUT_HEAD_SIZE, **GRANITE_SCALES, **FOUR_EXPERTS),
    "granitemoe_shared": lambda: GraniteMoeSharedConfig(
        **WITHOUT_HEAD_SIZE, **GRANITE_SCALES, **FOUR_EXPERTS, shared_intermediate_size=256
    ),
    "nemotron_h": lambda: NemotronHConfig(**NEMOTRON_H),
    "nemotron_h_moe": lambda: NemotronHConfig(
        **NEMOTRON_H | {"layers_block_type": ["linear_attention", "moe", "full_attention", "moe"]},
        **MOE,
        **{"n_routed_experts": 4, "moe_shared_expert_intermediate_size": 256},
        **{"routed_scaling_factor": 1.5, "moe_latent_size": 128},
    ),
    "falcon-h1": lambda: FalconH1Config(
        **WIDE,
        **MAMBA2,
        **{"mamba_d_ssm": 512, "mamba_rms_norm": True, "mamba_norm_before_gate": False},
    ),
    "mamba2": lambda: Mamba2Config(**NO_HEADS, **{"num_heads": 8, "state_size": 32, "n_groups": 2}),
    "mamba": lambda: MambaConfig(**NO_HEADS, state_size=32, time_step_rank=32),
    "falcon_mamba": lambda: FalconMambaConfig(**NO_HEADS, state_size=32, time_step_rank=32),
    "lfm2moe": lambda: Lfm2MoeConfig(
        **WITHOUT_HEAD_SIZE | {"num_hidden_layers": 3},
        **MOE,
        **{"num_experts": 4, "num_dense_layers": 1},
        layer_types=["conv", "full_attention", "conv"],
    ),
    "olmoe": lambda: OlmoeConfig(**WITHOUT_HEAD_SIZE, num_experts=4, num_experts_per_tok=2),
    "olmo": lambda: OlmoConfig(**WITHOUT_HEAD_SIZE, clip_qkv=0.2),
    "olmo3": lambda: Olmo3Config(**WITHOUT_HEAD_SIZE | WINDOWS),
    "cohere2": lambda: Cohere2Config(**WIDE | WINDOWS, logit_scale=0.5),
    "cohere2moe": lambda: Cohere2MoeConfig(
        **WIDE | WINDOWS | {"intermediate_size": 256},
        **{"num_experts": 4, "num_experts_per_tok": 2, "num_shared_experts": 2},
        **{"expert_selection_fn": "sigmoid", "prefix_dense_intermediate_size": 512},
        mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
        logit_scale=0.5,
    ),
    "command-r": lambda: CohereConfig(**WITHOUT_HEAD_SIZE, logit_scale=0.5),
    "command-r-plus": lambda: CohereConfig(**WITHOUT_HEAD_SIZE, logit_scale=0.5, use_qk_norm=True),
    "starcoder2": lambda: Starcoder2Config(**WITHOUT_HEAD_SIZE, sliding_window=None),
    "hunyuan-dense": lambda: HunYuanDenseV1Config(**WIDE),
    "hunyuan-moe": lambda: HunYuanMoEV1Config(**WIDE, num_experts=4, moe_topk=2),
    "hunyuan_vl": lambda: HunYuanDenseV1Config(
        **WIDE,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.0, "alpha": 50.0},
    ),
    "mellum": lambda: MellumConfig(
        **WIDE | WINDOWS,
        **MOE,
        num_experts=4,
        rope_parameters={
            "full_attention": MELLUM_ROPE,
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "exaone4": lambda: Exaone4Config(**WIDE | WINDOWS),
    "exaone4_small": lambda: Exaone4Config(
        **WIDE, sliding_window=None, layer_types=["full_attention"] * 2
    ),
    "exaone-moe": lambda: ExaoneMoeConfig(
        **WIDE | WINDOWS, **MOE, num_experts=4, first_k_dense_replace=1
    ),
    "phimoe": lambda: PhimoeConfig(
        **WITHOUT_HEAD_SIZE, **FOUR_EXPERTS, attention_bias=True, lm_head_bias=True
    ),
    "ernie4_5-moe": lambda: Ernie4_5_MoeConfig(
        **WIDE,
        **{"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 256},
        **{"moe_layer_start_index": 1, "moe_num_shared_experts": 2},
    ),
    "minimax-m2": lambda: MiniMaxM2Config(
        **WIDE,
        **FOUR_EXPERTS,
        rope_parameters={
            **{"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
        },
    ),
    "dots1": lambda: Dots1Config(
        **WIDE,
        **MOE,
        **{"n_routed_experts": 4, "n_shared_experts": 1, "routed_scaling_factor": 1.5},
        **{"first_k_dense_replace": 1, "norm_topk_prob": True},
    ),
    "afmoe": lambda: AfmoeConfig(
        **WIDE | WINDOWS,
        **MOE,
        **{"num_experts": 4, "num_dense_layers": 1, "num_shared_experts": 1},
        **{"route_scale": 1.5, "mup_enabled": True},
    ),
    "arcee": lambda: ArceeConfig(**WIDE, rope_parameters=None),
    "apertus": lambda: ApertusConfig(
        **WIDE, rope_parameters={"rope_type": "default", "rope_theta": 1e6}
    ),
    "minicpm": lambda: GraniteConfig(**WIDE | GRANITE_SCALES | {"attention_multiplier": 0.125}),
    "internlm2": lambda: LlamaConfig(**WIDE),
    "nemotron": lambda: NemotronConfig(**WIDE),
}
"""Models whose files have what those above have, or more."""
FURTHER |= OLDER
CONFIGS |= FURTHER
KEYS: dict[str, dict[str, Any]] = {
    **OLDER_KEYS,
    "qwen3next": DELTA_KEYS,
    **dict.fromkeys(
        ("qwen35", "qwen35moe"), DELTA_KEYS | {"rope.dimension_sections": [4, 2, 2, 0]}
    ),
    "lfm2": {"shortconv.l_cache": 3},
    "mistral3": {"rope.scaling.yarn_log_multiplier": 1.0, "attention.temperature_scale": 0.5},
    "glm4moe": {
        **{"expert_weights_norm": True, "expert_gating_func": 2, "nextn_predict_layers": 1},
    },
    "bailingmoe2": {
        **{"expert_weights_norm": True, "expert_gating_func": 2, "nextn_predict_layers": 1},
        "expert_shared_feed_forward_length": 256,
    },
    "deepseek_v2": {"rope.scaling.yarn_log_multiplier": 0.07},
    "deepseek_v3": {
        **{"expert_weights_norm": True, "expert_gating_func": 2},
        "rope.scaling.yarn_log_multiplier": 0.1,
    },
    "glm4_moe_lite": {
        **{"expert_weights_norm": True, "leading_dense_block_count": 1, "nextn_predict_layers": 1},
    },
    "qwen2vl": {"rope.dimension_sections": [16, 8, 8, 0]},
    **{
        name: {"rope.dimension_sections": [16, 8, 8, 0], "n_deepstack_layers": 3}
        for name in ("qwen3vl", "qwen3vlmoe")
    },
    "gemma3n": {
        **{
            "attention.shared_kv_layers": 2,
            "attention.sliding_window_pattern": SHARED_KEYS_PATTERN,
        },
        **{"altup.active_idx": 0, "altup.num_inputs": 4, "embedding_length_per_layer_input": 32},
        "activation_sparsity_scale": [1.6448536, 0.0, -math.inf, -math.inf, -math.inf],
    },
    "gemma4": GEMMA4_KEYS
    | {
        **{"attention.shared_kv_layers": 2, "embedding_length_per_layer_input": 32},
        "feed_forward_length": [512, 512, 512, 1024, 1024],
    },
    "gemma4_experts": GEMMA4_KEYS
    | {
        "expert_used_count": 2,
        **{"attention.shared_kv_layers": 0, "embedding_length_per_layer_input": 0},
    },
    "granitehybrid": MAMBA2_KEYS
    | {"attention.head_count_kv": [0, 2], "rope.scaling.finetuned": False},
    "granitehybrid_dense": MAMBA2_KEYS
    | {"attention.head_count_kv": [0, 2], "rope.scaling.finetuned": True},
    "nemotron_h": MAMBA2_KEYS
    | {"expert_count": 0, "expert_used_count": 0}
    | {"attention.head_count_kv": [0, 2, 0, 0], "feed_forward_length": [0, 0, 512, 0]},
    "nemotron_h_moe": MAMBA2_KEYS
    | {
        **{"attention.head_count_kv": [0, 0, 2, 0, 2], "nextn_predict_layers": 1},
        **{"feed_forward_length": [0, 256, 0, 256, 256], "expert_weights_norm": True},
        **{"expert_shared_feed_forward_length": 256, "moe_latent_size": 128},
    },
    "falcon-h1": MAMBA2_KEYS,
    "mamba2": MAMBA2_KEYS | {"attention.head_count": 0, "feed_forward_length": 0},
    "mamba": MAMBA_KEYS,
    "falcon_mamba": MAMBA_KEYS | {"ssm.dt_b_c_rms": True},
    "lfm2moe": {"shortconv.l_cache": 3, "expert_gating_func": 2, "leading_dense_block_count": 1},
    "olmo": {"attention.clamp_kqv": 0.2},
    "olmo3": {"attention.sliding_window_pattern": [True, True, True, False]},
    "cohere2": {"logit_scale": 0.5, "rope.scaling.type": "none"},
    "cohere2moe": {
        **{"logit_scale": 0.5, "rope.scaling.type": "none", "nextn_predict_layers": 1},
        **{"attention.sliding_window_pattern": [True, True, True, False]},
        **{"expert_gating_func": 2, "expert_weights_norm": True, "leading_dense_block_count": 1},
        **{"feed_forward_length": 512, "expert_feed_forward_length": 256},
        **{"expert_shared_count": 2, "expert_shared_feed_forward_length": 512},
    },
    "command-r": {"logit_scale": 0.5},
    "command-r-plus": {"logit_scale": 0.5},
    "exaone4": {"attention.sliding_window_pattern": [True, True, True, False]},
    "hunyuan_vl": {"rope.scaling.alpha": 50.0, "rope.dimension_sections": [8, 8, 8, 8]},
    "mellum": {
        **{"attention.sliding_window_pattern": [True, True, True, False]},
        **{"rope.freq_base_swa": 10_000.0, "rope.scaling.type": "yarn"},
        **{"rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64},
    },
    "exaone-moe": {
        **{"expert_gating_func": 2, "expert_weights_norm": True, "nextn_predict_layers": 1},
        **{"expert_shared_count": 1, "expert_weights_scale": 2.5},
    },
    "ernie4_5-moe": {
        **{"expert_count": 4, "expert_used_count": 2, "interleave_moe_layer_step": 1},
        **{"leading_dense_block_count": 1, "expert_shared_count": 2},
    },
    "hunyuan-moe": {"expert_used_count": 2, "expert_feed_forward_length": 512},
    "minimax-m2": {"expert_gating_func": 2, "expert_feed_forward_length": 512},
    "dots1": {"expert_gating_func": 2, "expert_weights_norm": True},
    "afmoe": {
        **{"expert_gating_func": 2, "expert_weights_norm": True, "expert_weights_scale": 1.5},
        **{"expert_shared_count": 1, "leading_dense_block_count": 1},
    },
    "apertus": {f"xielu.{name}": [value] * 2 for name, (value, _) in APERTUS_ACTIVATION.items()},
}
"""Further keys of files."""
ARCHITECTURES = {
    **OLDER_ARCHITECTURES,
    "gemma4_experts": "gemma4",
    "granitehybrid_dense": "granitehybrid",
    "granitemoe_shared": "granitemoe",
    "falcon_mamba": "mamba",
    "olmo3": "olmo2",
    "command-r-plus": "command-r",
    "exaone4_small": "exaone4",
    "qwen3moe_fused": "qwen3moe",
    "mistral_small": "mistral3",
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v2_groups", "deepseek_v3", "glm4_moe_lite"), "deepseek2"
    ),
}
"""`general.architecture`, where it is not the name."""
TENSORS: dict[str, dict[str, np.ndarray]] = {
    **OLDER_TENSORS,
    "gemma4": PROPORTIONAL | {"blk.4.attn_k.weight": np.ones((256, 256), np.float32)},
    "gemma4_experts": PROPORTIONAL,
    "gemma3n": {
        "blk.3.attn_v.weight": np.ones((128, 256), np.float32),
        "blk.4.attn_k_norm.weight": np.ones(64, np.float32),
    },
    "nemotron_h_moe": {"blk.4.nextn.eh_proj.weight": np.ones((256, 512), np.float32)},
    "glm4moe": {
        "blk.2.attn_q.weight": np.ones((256, 256), np.float32),
        "blk.2.nextn.eh_proj.weight": np.ones((256, 512), np.float32),
    },
    "cohere2moe": {"blk.4.nextn.eh_proj.weight": np.ones((256, 512), np.float32)},
    "deepseek_v2": {
        f"blk.0.{name}.weight": np.ones((4, 64, size), np.float32)
        for name, size in (("attn_k_b", 32), ("attn_v_b", 64))
    },
    "glm4_moe_lite": {"blk.2.attn_k_b.weight": np.ones((4, 64, 32), np.float32)},
}
"""Tensors of layers that draft tokens, and copies of parts of a weight."""
FILES = {
    **dict.fromkeys(CONFIGS, Type.Q4_0),
    **OLDER_FILES,
    **{"llama": Type.Q8_0, "qwen2": Type.Q5_K, "qwen3": Type.Q6_K, "qwen3moe": Type.Q4_K},
    **{"gemma2": Type.F16, "gemma3": Type.BF16, "phi3": Type.Q4_1, "granite": Type.F32},
    **{"mixtral": Type.Q5_1, "smollm3": Type.Q5_0, "qwen3moe_fused": Type.Q4_K},
    **{"qwen35": Type.Q8_0, "qwen35moe": Type.Q6_K, "qwen3next": Type.Q8_0},
}
"""The type of the matrices of each file."""
TYPES: dict[str, Callable[[str], Type | None]] = {
    "gemma3n": lambda name: Type.F32 if "altup" in name else None,
    **dict.fromkeys(
        ("command-r-plus", "stablelm_parallel"), lambda name: Type.F32 if "norm" in name else None
    ),
    **dict.fromkeys(("gpt2", "starcoder"), lambda name: Type.F32 if "position" in name else None),
    "kimi-linear": lambda name: Type.F32 if "conv1d" in name else None,
    "granitehybrid_dense": lambda name: Type.F16 if "ffn" in name else None,
    "qwen35": lambda name: Type.Q4_K if "ssm_out" in name else None,
    "qwen3next": lambda name: Type.Q5_1 if name == "blk.0.attn_gate.weight" else None,
    "gpt-oss": lambda name: Type.MXFP4 if "_exps" in name else Type.Q8_0,
    "qwen3vlmoe": lambda name: Type.MXFP4 if "_exps" in name else None,
}
"""Where they have others."""

FUSED_EXPERTS = ("qwen3moe_fused",)
"""Files whose gates and factors of experts are one tensor."""
KINDS = (
    *("llama", "llama_tied", "mixtral", "qwen3", "qwen3moe_fused", "gemma3", "phi3", "lfm2"),
    *("glm4moe", "deepseek_v3", "gpt-oss", "qwen3vlmoe", "qwen3next", "qwen35moe", "gemma4"),
    *("granitehybrid", "mamba", "apertus", "command-r-plus"),
)
"""One of each kind of names and layouts; their weights are compared in every run of the tests."""
USUAL = ("llama", "llama_tied", "qwen3moe", "gemma2", "phi3")
"""One of each kind of tensors; the others take a minute more."""


def write_named(directory: Path, name: str) -> tuple[Path, Path]:
    """Write the file of a name above, and the plain checkpoint."""
    keys, config = KEYS.get(name), CONFIGS[name]()
    return write_gguf(
        directory,
        config,
        FILES[name],
        types=TYPES.get(name, lambda tensor: None),
        keys=keys,
        tensors=TENSORS.get(name),
        architecture=ARCHITECTURES.get(name, name if name in READ else ""),
        layout=then(layout_of(config), JOINED) if name in JOINED_FILES else None,
        fuses_experts=name in FUSED_EXPERTS,
    )

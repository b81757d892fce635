"""Configurations of models with odd sizes, which fill no vector, one for each kind."""

from typing import Any

from transformers import (
    BailingHybridConfig,
    BloomConfig,
    DeepseekV3Config,
    DeepseekV4Config,
    DiffLlamaConfig,
    FalconH1Config,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    Glm4Config,
    Glm4MoeConfig,
    Glm5NextConfig,
    GPT2Config,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeSharedConfig,
    GraniteSWAConfig,
    HrmTextConfig,
    HYV4Config,
    KimiLinearConfig,
    Lfm2Config,
    Llama4TextConfig,
    LlamaConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    PretrainedConfig,
    Qwen2MoeConfig,
    Qwen3_5TextConfig,
    Qwen3MoeConfig,
    Qwen4ExpTextConfig,
    ZayaConfig,
)

ODD_SIZES: dict[str, Any] = {
    "hidden_size": 72,
    "intermediate_size": 102,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "max_position_embeddings": 512,
    "vocab_size": 509,
    "tie_word_embeddings": False,
}
"""No size is a multiple of a vector: torch computes a tail in another way."""
EVEN_SIZES = ODD_SIZES | {
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "pad_token_id": 0,
}
"""Queries, keys and values are one weight."""
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 6,
    "q_lora_rank": 28,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 14,
    "qk_rope_head_dim": 6,
    "v_head_dim": 10,
}
"""The sizes of multi-head latent attention."""
_KDA: dict[str, Any] = {
    **{key: value for key, value in ODD_SIZES.items() if key != "head_dim"},
    **_LATENT,
    **{"q_lora_rank": None, "pad_token_id": 0, "linear_num_heads": 3, "linear_head_dim": 20},
    **{"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 44},
    "layer_types": ["linear_attention", "full_attention"],
}
"""The sizes of Kimi Delta Attention beside latent attention and experts."""
_INDEXED: dict[str, Any] = {
    **{key: value for key, value in _LATENT.items() if key != "qk_rope_head_dim"},
    **{key: value for key, value in ODD_SIZES.items() if key != "head_dim"},
    **{"num_key_value_heads": 6, "mlp_layer_types": ["dense", "sparse"], "hc_mult": 3},
    **{"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 44},
    **{"index_topk": 512, "index_head_dim": 20, "index_n_heads": 3, "pad_token_id": 0},
}
"""The sizes of hyper-connections around latent attention with indexers."""


def make_gemma3(**more: Any) -> PretrainedConfig:
    layer_types = ["sliding_attention", "full_attention", "sliding_attention"]
    return Gemma3TextConfig(
        **(
            ODD_SIZES
            | {"num_hidden_layers": 3, "sliding_window": 37, "layer_types": layer_types}
            | more
        )
    )


CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**ODD_SIZES),
    "llama_wide_vocab_tied": LlamaConfig(
        **(ODD_SIZES | {"vocab_size": 16_391, "tie_word_embeddings": True, "num_hidden_layers": 1})
    ),
    "llama_mlp_bias": LlamaConfig(**ODD_SIZES, mlp_bias=True, attention_bias=True),
    "gemma3": make_gemma3(),
    "granite": GraniteConfig(**EVEN_SIZES, residual_multiplier=0.3),
    "granite_swa": GraniteSWAConfig(
        **(ODD_SIZES | {"num_hidden_layers": 3}),
        sliding_window=37,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "granitemoeshared": GraniteMoeSharedConfig(
        **{key: value for key, value in ODD_SIZES.items() if key != "head_dim"},
        **{"num_local_experts": 5, "num_experts_per_tok": 2, "shared_intermediate_size": 65},
        hidden_act="quick_gelu",
    ),
    "gemma3n_shared": Gemma3nTextConfig(
        **(ODD_SIZES | {"num_hidden_layers": 4}),
        num_kv_shared_layers=2,
        sliding_window=37,
        layer_types=["sliding_attention", "full_attention"] * 2,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=509,
        altup_num_inputs=2,
        laurel_rank=8,
        activation_sparsity_pattern=None,
    ),
    "llama4": Llama4TextConfig(
        **(ODD_SIZES | {"num_hidden_layers": 2}),
        intermediate_size_mlp=102,
        moe_layers=[1],
        num_local_experts=5,
        num_experts_per_tok=2,
        attention_chunk_size=37,
        no_rope_layers=[1, 0],
        floor_scale=5,
    ),
    "bloom": BloomConfig(vocab_size=509, hidden_size=72, n_layer=2, n_head=6, seq_length=512),
    "gpt_oss": GptOssConfig(
        **ODD_SIZES, num_local_experts=5, num_experts_per_tok=2, sliding_window=37
    ),
    "glm4": Glm4Config(**EVEN_SIZES, attention_bias=True),
    "olmo2": Olmo2Config(**(ODD_SIZES | {"head_dim": 12})),
    "phi3": Phi3Config(**EVEN_SIZES),
    "qwen3_moe": Qwen3MoeConfig(
        **ODD_SIZES, num_experts=7, num_experts_per_tok=3, moe_intermediate_size=48
    ),
    "mixtral": MixtralConfig(**EVEN_SIZES, num_local_experts=5),
    "deepseek_v3": DeepseekV3Config(
        **{key: value for key, value in ODD_SIZES.items() if key != "head_dim"} | _LATENT,
        n_routed_experts=6,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        n_shared_experts=1,
        moe_intermediate_size=44,
        first_k_dense_replace=1,
    ),
    "glm4_moe": Glm4MoeConfig(
        **ODD_SIZES,
        n_routed_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=44,
        first_k_dense_replace=1,
    ),
    "qwen2_moe": Qwen2MoeConfig(
        **ODD_SIZES,
        num_experts=7,
        num_experts_per_tok=3,
        moe_intermediate_size=44,
        shared_expert_intermediate_size=52,
    ),
    "gpt2": GPT2Config(
        vocab_size=509, n_embd=76, n_inner=102, n_layer=2, n_head=4, n_positions=512
    ),
    "gpt2_gelu_tanh": GPT2Config(
        vocab_size=509,
        n_embd=76,
        n_inner=102,
        n_layer=2,
        n_head=4,
        n_positions=512,
        activation_function="gelu_pytorch_tanh",
    ),
    "diffllama": DiffLlamaConfig(**ODD_SIZES),
    "hrm_text": HrmTextConfig(
        **{key: value for key, value in ODD_SIZES.items() if key != "num_key_value_heads"},
        **{"H_cycles": 2, "L_cycles": 1, "pad_token_id": 0},
    ),
    "qwen3_5": Qwen3_5TextConfig(
        **ODD_SIZES,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=3,
        linear_num_value_heads=6,
        linear_key_head_dim=20,
        linear_value_head_dim=28,
    ),
    "falcon_h1": FalconH1Config(
        **ODD_SIZES,
        mamba_n_heads=6,
        mamba_d_head=20,
        mamba_d_ssm=120,
        mamba_d_state=22,
        mamba_n_groups=3,
        mamba_chunk_size=16,
        mamba_rms_norm=False,
    ),
    "hy_v4": HYV4Config(
        **_INDEXED,
        qk_rope_head_dim=6,
        layer_types=["indexed_attention"] * 2,
        indexer_types=["full", "shared"],
    ),
    "glm5_next": Glm5NextConfig(
        text_config=_INDEXED
        | {"layer_types": ["linear_attention", "indexed_attention"], "index_kpool": 4}
        | {"linear_head_dim": 20, "linear_num_heads": 3},
        vision_config={
            **{"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2},
            **{"out_hidden_size": 72, "image_size": 28, "projection_intermediate_size": 16},
        },
        **{"image_token_id": 500, "video_token_id": 501, "tie_word_embeddings": False},
    ),
    "zaya": ZayaConfig(
        **ODD_SIZES | {"pad_token_id": 0},
        **{"num_experts": 5, "num_experts_per_tok": 1, "moe_intermediate_size": 44},
        **{"router_hidden_size": 27, "sliding_window": 37},
        layer_types=["hybrid", "hybrid_sliding"],
    ),
    "qwen4_exp": Qwen4ExpTextConfig(
        **ODD_SIZES | {"pad_token_id": 0, "eos_token_id": 2, "head_dim": 22},
        layer_types=["linear_attention", "indexed_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 4, 3]},
        **{"linear_num_key_heads": 3, "linear_num_value_heads": 6},
        **{"linear_key_head_dim": 20, "linear_value_head_dim": 28},
        **{"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 44},
        **{"shared_expert_intermediate_size": 44, "hc_count": 3, "hc_lowrank": 26},
        **{"ple_layer_ids": [1], "ple_embed_dim": 36, "heads_per_ngram": 3},
        **{"ngram_vocab_size_base": 100, "split_ngram_parts": 1},
        **{"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 22},
        **{"indexer_budget": 512, "indexer_compress_ratio": 4},
    ),
    "deepseek_v4": DeepseekV4Config(
        **{key: value for key, value in ODD_SIZES.items() if key != "num_hidden_layers"},
        **{"num_hidden_layers": 3, "partial_rotary_factor": 0.3, "q_lora_rank": 28},
        layer_types=[
            *("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"),
        ],
        mlp_layer_types=["hash_moe", "hash_moe", "moe"],
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 36},
        **{"sliding_window": 37, "o_groups": 3, "o_lora_rank": 22, "hc_mult": 3},
        hc_sinkhorn_iters=4,
        **{"index_n_heads": 9, "index_head_dim": 20, "index_topk": 5},
        **{"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 44},
        pad_token_id=0,
    ),
    "lfm2": Lfm2Config(**ODD_SIZES, layer_types=["conv", "full_attention"]),
    "kimi_linear": KimiLinearConfig(**_KDA),
    "bailing_hybrid": BailingHybridConfig(**_KDA, n_group=2, topk_group=1),
}
"""If layers are recurrent, each block of a text has a state, from which other requests begin."""

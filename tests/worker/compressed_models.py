"""Small configurations of models that attend over compressed entries."""

from typing import Any

from transformers import DeepseekV4Config, PretrainedConfig

from tests.worker.checkpoints import SHAPE, WINDOW, Architecture

_SPARSE, _HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"
_SIZES: dict[str, Any] = {
    **{key: SHAPE[key] for key in ("vocab_size", "hidden_size", "num_attention_heads")},
    **{key: SHAPE[key] for key in ("max_position_embeddings", "pad_token_id")},
    **{key: SHAPE[key] for key in ("bos_token_id", "eos_token_id")},
    **{"head_dim": 24, "partial_rotary_factor": 1 / 3, "q_lora_rank": 24, "hc_mult": 2},
    "hc_sinkhorn_iters": 4,
    **{"o_groups": 2, "o_lora_rank": 20, "index_n_heads": 16, "index_head_dim": 16},
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    "num_hidden_layers": 5,
    "layer_types": ["sliding_attention", _SPARSE, _HEAVY, _SPARSE, _HEAVY],
    "mlp_layer_types": ["hash_moe", "hash_moe", "moe", "moe", "moe"],
}
DEEPSEEK_V4 = Architecture(
    "deepseek_v4",
    lambda: DeepseekV4Config(
        **_SIZES, sliding_window=WINDOW, compress_rates={_SPARSE: 4, _HEAVY: 8}, index_topk=3
    ),
)
"""Its entries are of fewer tokens than usual, so that short texts have some."""
WITH_LONG_GROUPS = Architecture(
    "deepseek_v4_long",
    lambda: DeepseekV4Config(
        **_SIZES | {"max_position_embeddings": 4096, "index_n_heads": 32},
        **{"sliding_window": 128, "index_topk": 24},
        rope_parameters={
            **{"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 256},
            **{"beta_fast": 32, "beta_slow": 1},
        },
    ),
)
"""Its entries are of 4 and of 128 tokens, with the angles of the published models."""


def with_window(window: int) -> PretrainedConfig:
    """Return the configuration of `WITH_LONG_GROUPS` with another window."""
    config = WITH_LONG_GROUPS.config()
    config.sliding_window = window
    return config

"""Small configurations of models with recurrent layers, one for each model type."""

import json
import shutil
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from scripts.supervisor.model_names import BUNDLED_MODELS
from tests.worker.checkpoints import (
    LATENT,
    SHAPE,
    THREE_ROWS,
    WINDOW,
    Architecture,
    build_checkpoint,
)

_HYBRID: dict[str, Any] = SHAPE | {"layer_types": ["linear_attention", "full_attention"]}
_SHORT: dict[str, Any] = SHAPE | {"layer_types": ["conv", "full_attention"]}
_EXPERTS: dict[str, Any] = {
    **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    "shared_expert_intermediate_size": 48,
}
_DELTA: dict[str, Any] = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"linear_key_head_dim": 16, "linear_value_head_dim": 24},
}
_KIMI: dict[str, Any] = {
    **_HYBRID,
    **LATENT,
    **_EXPERTS,
    **{"linear_num_heads": 4, "linear_head_dim": 16, "q_lora_rank": None},
}
_MAMBA2: dict[str, Any] = {
    **{"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 2},
    "mamba_chunk_size": 16,
}
_BARE: dict[str, Any] = {
    **{key: SHAPE[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers")},
    **{key: SHAPE[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")},
}
"""Of models without attention."""
_CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_next": _HYBRID | _DELTA | _EXPERTS,
    "bamba": SHAPE | _MAMBA2 | {"attn_layer_indices": [1]},
    "lfm2": _SHORT,
    "jamba": {
        **SHAPE,
        **{"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 12},
        **{"num_experts": 4, "expert_layer_period": 2, "expert_layer_offset": 1},
    },
    # kinds that differ from these in parts
    "bailing_hybrid": _KIMI | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    "falcon_h1": SHAPE | _MAMBA2 | {"mamba_d_ssm": 128},
    "falcon_mamba": _BARE | {"state_size": 12},
    "granitemoehybrid": {
        **_HYBRID,
        **_MAMBA2,
        **{"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 48},
    },
    "kimi_linear": _KIMI,
    "lfm2_moe": _SHORT | _EXPERTS | {"num_dense_layers": 1},
    "lfm3": _SHORT,
    "mamba": _BARE | {"state_size": 12},
    "mamba2": {
        **_BARE,
        **{"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2, "chunk_size": 16},
    },
    "minimax": _HYBRID | {"block_size": 24, "num_local_experts": 4, "num_experts_per_tok": 2},
    "nemotron_h": {
        **SHAPE,
        **{"num_hidden_layers": 4, "mamba_num_heads": 8, "mamba_head_dim": 16},
        **{"ssm_state_size": 16, "n_groups": 2, "chunk_size": 16, "n_routed_experts": 4},
        **{"moe_intermediate_size": 48, "moe_shared_expert_intermediate_size": 48},
        **{"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
        "layer_types": ["linear_attention", "full_attention", "mlp", "moe"],
    },
    "olmo_hybrid": _HYBRID | _DELTA | {"linear_num_value_heads": 2},
    "qwen3_5_text": _HYBRID | _DELTA,
    "qwen3_5_moe_text": _HYBRID | _DELTA | _EXPERTS,
    "recurrent_gemma": SHAPE
    | {
        **{"lru_width": 64, "attention_window_size": 13, "num_hidden_layers": 3},
        "tie_word_embeddings": False,
        "block_types": ["recurrent", "recurrent", "attention"],
    },
    "rwkv": _BARE | {"context_length": 256, "intermediate_size": 96, "rescale_every": 1},
    "zamba": {
        **SHAPE,
        **{"num_hidden_layers": 4, "num_key_value_heads": 4, "n_mamba_heads": 2},
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
    },
    "zamba2": {
        **{key: size for key, size in SHAPE.items() if key != "head_dim"},
        **_MAMBA2,
        **{
            "num_hidden_layers": 6,
            "num_key_value_heads": 4,
            "n_mamba_heads": 8,
            "num_mem_blocks": 2,
            "adapter_rank": 8,
        },
        **{"use_shared_attention_adapter": True, "use_mem_rope": True, "chunk_size": 16},
        "layers_block_type": ["mamba", "hybrid", "hybrid", "mamba", "hybrid", "hybrid"],
    },
    # with states in transformers' cache
    "qwen4_exp_text": {
        **SHAPE,
        **_DELTA,
        **_EXPERTS,
        **{"hc_count": 2, "hc_lowrank": 24, "rope_parameters": THREE_ROWS},
        **{"ple_layer_ids": [1], "ple_embed_dim": 32, "heads_per_ngram": 2},
        **{"ngram_vocab_size_base": 100, "split_ngram_parts": 2},
        **{"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16},
        **{"indexer_budget": 1024, "indexer_compress_ratio": 4},
        "layer_types": ["linear_attention", "indexed_attention"],
    },
    "zaya": {
        **SHAPE,
        **{"num_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 48},
        **{"router_hidden_size": 24, "sliding_window": WINDOW},
        "layer_types": ["hybrid", "hybrid_sliding"],
    },
}
RECURRENT_LATENT_NAMES = {"bailing_hybrid", "kimi_linear"}
"""Those whose attention is latent."""


def _make(model_type: str) -> PretrainedConfig:
    return CONFIG_MAPPING[model_type](**_CONFIGS[model_type])


RECURRENT = tuple(
    Architecture(name, lambda name=name: _make(name))  # type: ignore[misc]
    for name in _CONFIGS
)
KINDS = RECURRENT[:4]
"""One architecture of each kind of recurrence: delta rule, state space, short convolution,
selective scan."""
KEY_DECAYS = tuple(one for one in RECURRENT if one.name in RECURRENT_LATENT_NAMES)
"""Delta rules with a decay for each key, beside latent attention."""


def build_with_tokenizer(directory: Path, architecture: Architecture) -> None:
    """Write a checkpoint that answers texts: it has the demo model's tokenizer."""
    config = architecture.config()
    demo = BUNDLED_MODELS["demo"]
    config.vocab_size = json.loads((demo / "config.json").read_text())["vocab_size"]
    config.max_position_embeddings = 2048
    build_checkpoint(directory, config)
    for path in demo.glob("tokenizer*.json"):
        shutil.copy(path, directory)

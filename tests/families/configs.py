"""A small configuration for each model type of transformers that is served."""

from collections.abc import Callable, Mapping
from typing import Any

from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.worker.checkpoints import ARCHITECTURES, SHAPE, WINDOW
from tests.worker.families import FAMILIES as FURTHER_ARCHITECTURES
from tests.worker.own_attention_models import OWN_ATTENTION
from tests.worker.recurrent_models import RECURRENT

MAX_LENGTH = 1024
"""Positions of each model."""

_SIZES: dict[str, Any] = SHAPE | {
    # positions, windows
    "max_position_embeddings": MAX_LENGTH,
    "n_positions": MAX_LENGTH,
    "max_seq_len": MAX_LENGTH,
    "sliding_window": WINDOW,
    "rotary_dim": 8,
    # feed-forward layers under other names
    "ffn_dim": 96,
    "ffn_hidden_size": 96,
    "n_inner": 96,
    "word_embed_proj_dim": 64,
    # mixtures of experts
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 48,
    "moe_k": 2,
    "moe_num_experts": 4,
    "n_group": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_local_experts": 4,
    "shared_expert_intermediate_size": 48,
    "shared_intermediate_size": 48,
    "topk_group": 1,
    # latent attention
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    # Gemma-3n
    "altup_num_inputs": 2,
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 8,
    "num_kv_shared_layers": 0,
    "vocab_size_per_layer_input": 512,
}
"""Values of the keys that a configuration may have."""

_OTHER: Mapping[str, dict[str, Any]] = {
    "axk1": {"head_dim": 8},
    "youtu": {"head_dim": 8},
}
"""What single types need beside these."""

TYPES = (
    *("afmoe", "apertus", "arcee", "aria_text", "axk1", "beam", "biogpt", "bitnet", "cohere"),
    *("cohere2", "cohere2_moe", "ctrl", "cwm", "deepseek_v2", "dots1", "ernie4_5", "ernie4_5_moe"),
    *("exaone4", "exaone_moe", "flex_olmo", "flint", "gemma", "gemma3n_text", "gemma4_text"),
    *("gemma4_unified_text", "glm", "gpt-sw3", "kolibri1", "minimax_m3_vl_text"),
    *("glm4_moe", "glm4_moe_lite", "gpt_bigcode", "gpt_neox", "granite_swa", "granitemoe"),
    *("granitemoe_swa", "granitemoeshared"),
    *("helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "hyperclovax", "internlm3"),
    *("iquestcoder", "jais2", "laguna", "mellum", "mimo_v2_flash", "minicpm3", "minimax_m2"),
    *("ministral",),
    *("modernbert-decoder", "nanochat", "nemotron", "olmo", "olmo3", "persimmon", "phi", "phimoe"),
    *("qwen2_moe", "seed_oss", "solar_open", "stablelm", "starcoder2", "vaultgemma", "youtu"),
)
"""Model types beside those of the worker's tests; their configurations need only sizes."""


def small_config(model_type: str) -> PretrainedConfig:
    """Return a configuration with two layers, or one for each type of layer that it has."""
    config_class = CONFIG_MAPPING[model_type]
    default = config_class()
    known = set(default.to_dict()) | set(default.attribute_map)
    sizes = {key: value for key, value in _SIZES.items() if key in known}
    if sizes.get("kv_lora_rank"):
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    if getattr(default, "sliding_window", None) is None:
        sizes.pop("sliding_window", None)
    if layer_types := list(dict.fromkeys(getattr(default, "layer_types", None) or ())):
        sizes["num_hidden_layers"] = max(2, len(layer_types))
        sizes["layer_types"] = (layer_types * 2)[: sizes["num_hidden_layers"]]
    return config_class(**sizes | _OTHER.get(model_type, {}))


def _longer(make: Callable[[], PretrainedConfig]) -> Callable[[], PretrainedConfig]:
    def longer() -> PretrainedConfig:
        config = make()
        text_config = config.get_text_config(decoder=True)
        text_config.max_position_embeddings = MAX_LENGTH
        if hasattr(text_config, "max_seq_len"):  # MPT
            text_config.max_seq_len = MAX_LENGTH
        return config

    return longer


FAMILIES: Mapping[str, Callable[[], PretrainedConfig]] = {
    **{
        architecture.name: _longer(architecture.config)
        for architecture in (
            *(*ARCHITECTURES, *FURTHER_ARCHITECTURES),
            *(*RECURRENT, *OWN_ATTENTION),
        )
    },
    **{name: lambda name=name: small_config(name) for name in TYPES},  # type: ignore[misc]
}
"""A configuration for each family, by its name: a model type, or a variant of one."""

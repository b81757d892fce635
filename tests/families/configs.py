"""A small configuration for each model type of transformers that is served."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.worker.checkpoints import ARCHITECTURES, SHAPE, THREE_ROWS, VISION, WINDOW
from tests.worker.compressed_models import DEEPSEEK_V4
from tests.worker.families import FAMILIES as FURTHER_ARCHITECTURES
from tests.worker.own_attention_models import OWN_ATTENTION
from tests.worker.recurrent_models import RECURRENT
from tests.worker.score_term_models import SCORE_TERMS

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
    # Inkling
    "unpadded_vocab_size": SHAPE["vocab_size"],
}
"""Values of the keys that a configuration may have."""

_TOWER: dict[str, Any] = {
    **VISION,
    **{"num_key_value_heads": 2, "depth": 2, "num_heads": 2, "num_layers": 2, "n_layers": 2},
    **{"embed_dim": 32, "d_model": 32, "width": 32, "head_dim": 16, "layers": 2, "heads": 2},
    **{"encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 64},
    **{"decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 64},
    **{"ffn_dim": 64, "mlp_dim": 64, "attention_dim": 32, "num_position_embeddings": 16},
    **{"deepstack_visual_indexes": [0], "fullatt_block_indexes": [1]},
    "video_temporal_patch_size": 2,
    **dict.fromkeys(
        (
            *("out_hidden_size", "output_dim", "projector_hidden_size", "projector_input_dim"),
            *("projector_output_dim", "vision_output_dim"),
        ),
        64,
    ),
}
"""Values of the keys that the configuration of a part may have which text does not reach."""

_WHOLE_ANGLES: dict[str, Any] = {
    "head_dim": 16,
    "rope_parameters": THREE_ROWS | {"partial_rotary_factor": 1.0},
}

_PLACEHOLDERS: dict[str, Any] = {"vocab_size": 8, "vocab_offset": 496}
"""Of tokens that stand for images or sound."""

_INDEXED: dict[str, Any] = {
    **{"head_dim": 8, "index_topk": MAX_LENGTH, "index_n_heads": 4, "index_head_dim": 16},
    "layer_types": ["indexed_attention"] * 2,
}

_OTHER: Mapping[str, dict[str, Any]] = {
    "apertus1p5": {"image_token_offset": 496, "audio_token_offset": 504},
    "axk1": {"head_dim": 8},
    "beam": {"mlp_layer_types": ["dense", "sparse"]},
    "flint": {"mlp_only_layers": [0]},
    "dory": {
        **{"num_hidden_layers": 4, "n_input_layers": 1, "n_recurrent_layers": 2},
        **{"n_output_layers": 1, "layer_types": ["sliding_attention", "full_attention"] * 2},
    },
    **dict.fromkeys(("axk2", "deepseek_v32", "dots3_note_text"), _INDEXED),
    **dict.fromkeys(("glm_moe_dsa", "hy_v4"), _INDEXED | {"indexer_types": ["full", "shared"]}),
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"sliding_attention": THREE_ROWS, "full_attention": None},
    },
    "dbrx": {
        **{"d_model": 64, "n_heads": 4, "n_layers": 2},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10_000.0},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "ernie4_5_vl_moe": {
        "moe_intermediate_size": [48, 24],
        "rope_parameters": THREE_ROWS | {"mrope_section": [3, 3, 2]},
    },
    "hy_v4_vl": _INDEXED
    | {
        "indexer_types": ["full", "shared"],
        "rope_parameters": THREE_ROWS | {"mrope_section": [2, 1, 1]},
    },
    **dict.fromkeys(("glm46v", "glm4v_moe", "glm_ocr", "glmga"), _WHOLE_ANGLES),
    "hunyuan_vl": {
        "rope_parameters": THREE_ROWS
        | {"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0, "mrope_section": [2] * 4},
    },
    "kimi_k25": {"head_dim": 8},
    "longcat_flash": {
        **{"head_dim": 8, "num_layers": 2, "zero_expert_num": 2, "moe_topk": 2},
        **{"expert_ffn_hidden_size": 48, "ffn_hidden_size": 96},
    },
    "mistral4": {"head_dim": 8},
    "mistral_large4": _INDEXED | {"head_dim": 24},
    "moshi": {"sliding_window": MAX_LENGTH},
    "paddleocr_vl": {"rope_parameters": THREE_ROWS},
    "qwen2_5_omni_thinker": {"rope_parameters": THREE_ROWS},
    "qwen3_omni_moe_thinker": {"rope_parameters": THREE_ROWS},
    "qwen4_exp": {
        **{"hc_count": 2, "hc_lowrank": 24, "rope_parameters": THREE_ROWS},
        **{"ple_layer_ids": [1], "ple_embed_dim": 32, "heads_per_ngram": 2, "eos_token_id": 2},
        **{"ngram_vocab_size_base": 100, "split_ngram_parts": 2},
        **{"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16},
        **{"indexer_budget": MAX_LENGTH, "indexer_compress_ratio": 4},
    },
    "step3p7": {"sliding_window": WINDOW, "mlp_layer_types": ["dense", "sparse"]},
    "dots3_note": _INDEXED
    | {
        "layer_types": ["indexed_attention", "sliding_attention"],
        "per_layer_config": {
            1: {
                **dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 2),
                **{"kv_lora_rank": 24, "head_dim": 24},
            }
        },
    },
    "deepseek_ocr2": {"mlp_layer_types": ["dense", "sparse"]},
    "muse_spark": {"moe_hidden_size": 32},
    "youtu": {"head_dim": 8},
}
"""What single types need beside these."""

_PARTS: Mapping[str, dict[str, Any]] = {
    "deepseek_ocr2_sam_vision_model": {"global_attn_indexes": [1], "downsample_channels": [48, 64]},
    "dots3_note_audio_encoder": {"adapter_input_size": 32, "adapter_out_dim": 64},
    "dots3_note_vision_encoder": {
        **{"adapter_in_dim": 32, "adapter_out_dim": 64, "num_local_experts": 4},
        "mlp_layer_types": ["dense", "sparse"],
    },
    "FunAsrNanoAdaptorConfig": {"hidden_size": 64, "intermediate_size": 16},
    "Nemotron3DiarizationHeadConfig": {"audio_hidden_size": 32},
    "gemma3n_audio": {
        **_PLACEHOLDERS,
        **{"conf_num_hidden_layers": 1, "conf_num_attention_heads": 2, "vocab_offset": 504},
    },
    "gemma3n_vision": _PLACEHOLDERS,
    "inkling2_vision": {"text_hidden_size": 64},
    "inkling_audio": {"text_hidden_size": 64},
    "inkling_vision": {"text_hidden_size": 64},
    "apertus1p5_vision_tokenizer": {"codebook_size": 8},
    "wavtokenizer_encoder": {"codebook_dim": 32, "codebook_size": 8},
    "timm_wrapper": {"model_args": {"embed_dim": 32}},
    "muse_spark_audio": {
        **{"patch_sizes": [4, 2], "hidden_sizes": [16, 32], "depths": [1, 1]},
        **{"num_hidden_layers": 2, "out_hidden_size": 64},
    },
}
"""What single parts that text does not reach need, by their own types, or by their class if they
have no type."""

_AROUND_TEXT: Mapping[str, dict[str, Any]] = {
    name: {"vision_start_token_id": SHAPE["vocab_size"] - 20}
    for name in ("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker")
}
"""What `generate` of transformers reads beside the text's part."""

TYPES = (
    *("afmoe", "apertus", "arcee", "aria_text", "axk1", "beam", "biogpt", "bitnet", "cohere"),
    *(
        "cohere2",
        "cohere2_moe",
        "cohere_compass_text",
        "ctrl",
        "cwm",
        "deepseek_v2",
        "dots1",
        "ernie4_5",
        "ernie4_5_moe",
    ),
    *("exaone4", "exaone_moe", "flex_olmo", "flint", "gemma", "gemma3n_text", "gemma4_text"),
    *("gemma4_unified_text", "glm", "gpt-sw3", "kolibri1", "minimax_m3_vl_text"),
    *("glm4_moe", "glm4_moe_lite", "gpt_bigcode", "gpt_neox", "granite_swa", "granitemoe"),
    *("granitemoe_swa", "granitemoeshared"),
    *("helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "hyperclovax", "internlm3"),
    *("iquestcoder", "jais2", "laguna", "mellum", "mimo_v2_flash", "minicpm3", "minimax_m2"),
    *("ministral", "moshi"),
    *("modernbert-decoder", "nanochat", "nemotron", "olmo", "olmo3", "persimmon", "phi", "phimoe"),
    *("qwen2_moe", "seed_oss", "solar_open", "stablelm", "starcoder2", "vaultgemma", "youtu"),
    # whose code differs more from that of others
    *("dbrx", "longcat_flash", "openai-gpt"),
    # whose modules attend several times
    *("diffllama", "hrm_text"),
    # with indexers
    *("axk2", "deepseek_v32", "dots3_note_text", "glm_moe_dsa", "hy_v4"),
    # with towers
    *("aria", "audioflamingo3", "cohere2_vision", "cosmos3_edge", "cosmos3_omni", "deepseek_vl"),
    *("deepseek_vl_hybrid", "exaone4_5", "fun_asr_nano", "fuyu", "glmasr", "got_ocr2"),
    "granite_docling",
    *("granite_speech", "granite_speech_plus", "hyperclovax_vision_v2", "idefics2", "lfm3_vl"),
    *("lighton_ocr", "llava_next_video", "minicpm_ocr", "minicpmv4_6", "minicpmv4_7"),
    *("minimax_m3_vl", "moss_transcribe_diarize", "musicflamingo", "ovis2", "phi4_multimodal"),
    "pp_chart2table",
    *(
        "qianfan_ocr",
        "qwen2_audio",
        "qwen3_5_moe",
        "qwen3_asr",
        "qwen4_exp",
        "vibevoice_asr",
        "video_llama_3",
        "video_llava",
    ),
    *("deepseek_ocr2", "dots3_note", "fast_vlm", "gemma3n", "inkling2", "inkling_mm_model"),
    *("muse_spark", "perception_lm"),
    *("gemma4_unified", "glm46v", "glm4v_moe", "glm_ocr", "glmga", "kimi_k25", "paddleocr_vl"),
    *("ernie4_5_vl_moe", "hunyuan_vl", "janus", "mistral4", "mistral_large4", "muse_glimmer"),
    *(
        "nemo_speechlm",
        "nemotron_h_omni",
        "qwen2_5_omni_thinker",
        "qwen3_omni_moe_thinker",
        "step3p7",
        "vipllava",
    ),
)
"""Model types beside those of the worker's tests; their configurations need only sizes."""


SINCE_5_24 = (
    *("apertus1p5", "apertus1p5_text", "dory", "exaone", "hy_v4_vl", "inkling2_loop"),
    *("inkling2_loop_text", "lara_mini", "omniasr", "sarvam_mla", "sarvam_moe"),
)
"""Further types, which transformers 5.23 lacks."""


WITHOUT_SHARED_EXPERTS = ("dots1", "glm4_moe", "solar_open")
"""Types of mixtures that are served without shared experts, too."""


def small_config(model_type: str, **changes: Any) -> PretrainedConfig:
    """Return a configuration with two layers, or one for each type of layer that it has."""
    others = _OTHER.get(model_type, {}) | changes
    config = _small(CONFIG_MAPPING[model_type](), others, is_text=True)
    for key, value in _AROUND_TEXT.get(model_type, {}).items():
        setattr(config, key, value)
    return config


def _small(
    default: PretrainedConfig, others: Mapping[str, Any], *, is_text: bool
) -> PretrainedConfig:
    """Return a configuration of the same type; `others` are values of its text's keys."""
    text = default.get_text_config(decoder=True)
    parts = {name: getattr(default, name, None) for name in default.sub_configs}
    small_parts = {
        name: _small(part, others, is_text=part.get_text_config(decoder=True) is text).to_dict()
        for name, part in parts.items()
        if part is not None
    }
    known = set(default.to_dict()) | set(default.attribute_map)
    own = {key: value for key, value in others.items() if is_text and key in known}
    if not small_parts or text is default:
        own = (_text_sizes(default) if is_text else _tower_sizes(default)) | own
    return type(default)(**_special_tokens(default) | small_parts | own)


def _text_sizes(default: PretrainedConfig) -> dict[str, Any]:
    known = set(default.to_dict()) | set(default.attribute_map)
    sizes = {key: value for key, value in _SIZES.items() if key in known}
    if sizes.get("kv_lora_rank"):
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    if getattr(default, "sliding_window", None) is None:
        sizes.pop("sliding_window", None)
    if "mrope_section" in (rope := getattr(default, "rope_parameters", None) or {}):
        sizes["rope_parameters"] = rope | {"mrope_section": THREE_ROWS["mrope_section"]}
    if layer_types := list(dict.fromkeys(getattr(default, "layer_types", None) or ())):
        sizes["num_hidden_layers"] = max(2, len(layer_types))
        sizes["layer_types"] = (layer_types * 2)[: sizes["num_hidden_layers"]]
    return sizes


def _tower_sizes(default: PretrainedConfig) -> dict[str, Any]:
    known = set(default.to_dict()) | set(default.attribute_map)
    sizes = {key: value for key, value in _TOWER.items() if key in known}
    return sizes | _PARTS.get(default.model_type or type(default).__name__, {})


def _special_tokens(default: PretrainedConfig) -> dict[str, Any]:
    """Return numbers of tokens that stand for images and such, within the small vocabulary."""
    large = [
        key
        for key, value in default.to_dict().items()
        if key.endswith(("token_id", "token_index"))
        and isinstance(value, int)
        and value >= SHAPE["vocab_size"]
    ]
    return {key: SHAPE["vocab_size"] - 1 - number for number, key in enumerate(large)}


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
            *(*RECURRENT, *OWN_ATTENTION, DEEPSEEK_V4, *SCORE_TERMS),
        )
    },
    **{
        name: lambda name=name: small_config(name)  # type: ignore[misc]
        for name in (*TYPES, *(one for one in SINCE_5_24 if one in CONFIG_MAPPING))
    },
    **{
        f"{name}_routed_only": partial(small_config, name, n_shared_experts=0)
        for name in WITHOUT_SHARED_EXPERTS
    },
}
"""A configuration for each family, by its name: a model type, or a variant of one."""

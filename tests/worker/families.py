"""Further architectures with small configurations, for long tests; see checkpoints.py."""

from typing import Any

from transformers import (
    AyaVisionConfig,
    ChameleonConfig,
    Cohere2Config,
    CohereCompassConfig,
    CohereConfig,
    Emu3Config,
    Gemma4Config,
    Glm4vConfig,
    Glm5NextConfig,
    Granite4VisionConfig,
    Idefics3Config,
    InternVLConfig,
    JetMoeConfig,
    Lfm2Config,
    Lfm2VlConfig,
    Llama4Config,
    LlamaConfig,
    LlavaConfig,
    LlavaNextConfig,
    LlavaOnevisionConfig,
    Ministral3Config,
    Mistral3Config,
    MistralConfig,
    MllamaConfig,
    Molmo2Config,
    PhimoeConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen2VLConfig,
    Qwen3_5Config,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
    SmolVLMConfig,
    VoxtralConfig,
)

from tests.worker.checkpoints import (
    ARCHITECTURES,
    SHAPE,
    THREE_ROWS,
    VISION,
    WINDOW,
    Architecture,
)
from tests.worker.recurrent_models import RECURRENT

_IMAGES: dict[str, Any] = {"image_token_id": 500, "video_token_id": 501}
_DEEP_VISION: dict[str, Any] = {
    **{"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2},
    **{"out_hidden_size": 64, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
}
_LLAMA, _MISTRAL, _QWEN2 = (
    kind(**SHAPE).to_dict() for kind in (LlamaConfig, MistralConfig, Qwen2Config)
)
_ANGLES_BY_TYPE = dict.fromkeys(("sliding_attention", "full_attention"), THREE_ROWS)
_VQ: dict[str, Any] = {"embed_dim": 4, "latent_channels": 4, "base_channels": 32}
_VQ |= {"channel_multiplier": [1, 1], "num_res_blocks": 1}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
_YARN |= {"original_max_position_embeddings": 64}
_NUMBERED_TOKENS: dict[str, int] = {"<image>": 500}
_SIGLIP: dict[str, Any] = {"model_type": "siglip_vision_model", **VISION}
_WITHOUT_HEAD_DIM = {key: value for key, value in SHAPE.items() if key != "head_dim"}


def _pixtral(text: PretrainedConfig) -> PretrainedConfig:
    vision = {"model_type": "pixtral", **VISION, "head_dim": 16}
    return Mistral3Config(text_config=text.to_dict(), vision_config=vision, image_token_index=500)


def _text(name: str) -> dict[str, Any]:
    """Return the configuration of a model of texts, as a part of another one."""
    found = (one for one in (*ARCHITECTURES, *RECURRENT) if one.name == name)
    return next(found).config().to_dict()


def _clip(kind: type[PretrainedConfig]) -> PretrainedConfig:
    vision = {"model_type": "clip_vision_model", **VISION}
    return kind(text_config=_LLAMA, vision_config=vision, image_token_index=500)


VISION_LANGUAGE = (
    Architecture(
        "qwen2_vl",
        lambda: Qwen2VLConfig(
            text_config=SHAPE | {"rope_parameters": THREE_ROWS},
            vision_config={"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2},
            **_IMAGES,
        ),
    ),
    Architecture(
        "qwen3_vl",
        lambda: Qwen3VLConfig(
            text_config=SHAPE | {"rope_parameters": THREE_ROWS},
            vision_config=_DEEP_VISION,
            **_IMAGES,
        ),
    ),
    Architecture(
        "qwen3_vl_moe",
        lambda: Qwen3VLMoeConfig(
            text_config={
                **SHAPE,
                **{"rope_parameters": THREE_ROWS, "moe_intermediate_size": 32},
                **{"num_experts": 4, "num_experts_per_tok": 2},
            },
            vision_config=_DEEP_VISION,
            **_IMAGES,
        ),
    ),
    Architecture("mistral3", lambda: _pixtral(MistralConfig(**SHAPE))),
    Architecture("ministral3", lambda: _pixtral(Ministral3Config(**SHAPE))),
    Architecture("llava", lambda: _clip(LlavaConfig)),
    Architecture("llava_next", lambda: _clip(LlavaNextConfig)),
    Architecture(
        "internvl",
        lambda: InternVLConfig(
            text_config=_QWEN2,
            vision_config=VISION | {"image_size": [28, 28], "patch_size": [14, 14]},
            image_token_id=500,
        ),
    ),
    Architecture(
        "smolvlm",
        lambda: SmolVLMConfig(text_config=_LLAMA, vision_config=VISION, image_token_id=500),
    ),
    Architecture(
        "idefics3",
        lambda: Idefics3Config(text_config=_LLAMA, vision_config=VISION, image_token_id=500),
    ),
    Architecture(
        "glm4v",
        lambda: Glm4vConfig(
            text_config=_WITHOUT_HEAD_DIM
            | {"rope_parameters": THREE_ROWS | {"partial_rotary_factor": 1.0}},
            vision_config={
                **{"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2},
                **{"out_hidden_size": 64, "image_size": 28},
            },
        ),
    ),
    Architecture(
        "aya_vision",
        lambda: AyaVisionConfig(
            text_config=Cohere2Config(**_WITHOUT_HEAD_DIM).to_dict(), vision_config=VISION
        ),
    ),
    Architecture(
        "gemma4",
        lambda: Gemma4Config(
            text_config=_text("gemma4_shared"), vision_config=None, audio_config=None
        ),
    ),
    Architecture(
        "lfm2_vl",
        lambda: Lfm2VlConfig(
            text_config=Lfm2Config(**SHAPE, layer_types=["conv", "full_attention"]).to_dict(),
            vision_config=VISION | {"model_type": "siglip2_vision_model", "num_patches": 4},
            image_token_id=500,
        ),
    ),
    Architecture(
        "llama4_vision",
        lambda: Llama4Config(
            text_config=_text("llama4"),
            vision_config=VISION
            | dict.fromkeys(
                ("vision_output_dim", "projector_input_dim", "projector_output_dim"), 64
            ),
            image_token_index=500,
        ),
    ),
    Architecture(
        "llava_onevision",
        lambda: LlavaOnevisionConfig(
            text_config=_QWEN2,
            vision_config=_SIGLIP,
            image_token_index=500,
            video_token_index=501,
        ),
    ),
    Architecture(
        "mllama",
        lambda: MllamaConfig(
            text_config=_WITHOUT_HEAD_DIM | {"num_hidden_layers": 3, "cross_attention_layers": [1]},
            vision_config={
                **{key: VISION[key] for key in ("hidden_size", "num_hidden_layers", "image_size")},
                **{"num_global_layers": 1, "attention_heads": 2, "intermediate_size": 64},
                **{"patch_size": 14, "vision_output_dim": 64, "intermediate_layers_indices": [0]},
                **{"max_num_tiles": 2, "supported_aspect_ratios": [[1, 1], [1, 2]]},
            },
            image_token_index=500,
        ),
    ),
    Architecture(
        "molmo2",
        lambda: Molmo2Config(
            text_config=SHAPE
            | {"additional_vocab_size": 8, "qk_norm_type": "olmo", "norm_after": True}
            | {"rope_parameters": _YARN, "rope_scaling_layers": [1]},
            vision_config=VISION
            | {"image_size": [28, 28], "num_key_value_heads": 2, "head_dim": 16},
            adapter_config={
                **{"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2},
                **{"head_dim": 16, "text_hidden_size": 64, "intermediate_size": 64},
                "vision_feature_layer": [-1, 0],
            },
            image_patch_id=500,
        ),
    ),
    Architecture(
        "glm5_next",
        lambda: Glm5NextConfig(
            text_config=_WITHOUT_HEAD_DIM
            | {"num_hidden_layers": 4, "layer_types": ["linear_attention", "indexed_attention"] * 2}
            | {"num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 24}
            | {"qk_nope_head_dim": 16, "v_head_dim": 12}
            | {"linear_head_dim": 8, "linear_num_heads": 4, "hc_mult": 2}
            | {"index_topk": 1024, "index_head_dim": 16, "index_n_heads": 2, "index_kpool": 4}
            | {"mlp_layer_types": ["dense", "sparse"] * 2, "moe_intermediate_size": 48}
            | {"n_routed_experts": 4, "num_experts_per_tok": 2},
            vision_config={
                **{"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2},
                **{"out_hidden_size": 64, "image_size": 28, "projection_intermediate_size": 64},
            },
            **_IMAGES,
        ),
    ),
    Architecture(
        "granite4_vision",
        lambda: Granite4VisionConfig(
            text_config=_WITHOUT_HEAD_DIM,
            vision_config=_SIGLIP | {"hidden_size": 64},
            **{"downsample_rate": "1/2", "deepstack_layer_map": [[0, 0]]},
            **{"spatial_target_layers": [0, 1], "image_token_index": 500},
        ),
    ),
    Architecture(
        "cohere_compass",
        lambda: CohereCompassConfig(
            text_config=_WITHOUT_HEAD_DIM
            | {"layer_types": list(_ANGLES_BY_TYPE), "sliding_window": WINDOW}
            | {"rope_parameters": _ANGLES_BY_TYPE},
            vision_config=_DEEP_VISION,
            **_IMAGES,
        ),
    ),
    Architecture(
        "chameleon",
        lambda: ChameleonConfig(
            **_WITHOUT_HEAD_DIM,
            vocabulary_map=_NUMBERED_TOKENS,
            vq_config=_VQ | {"num_embeddings": 16, "resolution": 16},
        ),
    ),
    Architecture(
        "emu3",
        lambda: Emu3Config(
            text_config=_WITHOUT_HEAD_DIM,
            vocabulary_map=_NUMBERED_TOKENS
            | {f"<|visual token {number:06d}|>": 400 + number for number in range(16)},
            vq_config=_VQ | {"codebook_size": 16, "hidden_size": 32, "num_attention_heads": 1},
        ),
    ),
    Architecture(
        "qwen3_5",
        lambda: Qwen3_5Config(
            text_config=_text("qwen3_5_text")
            | {"rope_parameters": THREE_ROWS | {"partial_rotary_factor": 1.0}},
            vision_config={
                **{"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2},
                **{"out_hidden_size": 64, "num_position_embeddings": 16},
            },
            **_IMAGES,
        ),
    ),
    Architecture(
        "voxtral",
        lambda: VoxtralConfig(
            text_config=_LLAMA,
            audio_config={
                **{"hidden_size": 32, "intermediate_size": 64},
                **{"num_hidden_layers": 2, "num_attention_heads": 2},
            },
        ),
    ),
)
"""Models with towers, of which only the language model is built."""

OTHERS = (
    Architecture("cohere_plus", lambda: CohereConfig(**_WITHOUT_HEAD_DIM, use_qk_norm=True)),
    Architecture(
        "phimoe_longrope",
        lambda: PhimoeConfig(
            **_WITHOUT_HEAD_DIM,
            **{"num_local_experts": 4, "attention_bias": True, "lm_head_bias": True},
            rope_parameters={
                **{"rope_type": "longrope", "rope_theta": 1e4},
                **{"short_factor": [1.1] * 8, "long_factor": [3.0] * 8},
                **{"short_mscale": 1.2, "long_mscale": 1.3},
                "original_max_position_embeddings": 1024,
            },
        ),
    ),
    Architecture(
        "jetmoe",
        lambda: JetMoeConfig(
            **{key: value for key, value in _WITHOUT_HEAD_DIM.items() if "attention" not in key},
            **{"kv_channels": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
        ),
    ),
)
"""Models that compute a part in a way of their own."""

FAMILIES = (*VISION_LANGUAGE, *OTHERS)

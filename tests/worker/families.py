"""Further architectures with small configurations, for long tests; see checkpoints.py."""

from typing import Any

from transformers import (
    AyaVisionConfig,
    Cohere2Config,
    Gemma4Config,
    Glm4vConfig,
    Idefics3Config,
    InternVLConfig,
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
    PretrainedConfig,
    Qwen2Config,
    Qwen2VLConfig,
    Qwen3_5Config,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
    SmolVLMConfig,
    VoxtralConfig,
)

from tests.worker.checkpoints import ARCHITECTURES, SHAPE, THREE_ROWS, VISION, Architecture
from tests.worker.recurrent_models import RECURRENT

_IMAGES: dict[str, Any] = {"image_token_id": 500, "video_token_id": 501}
_DEEP_VISION: dict[str, Any] = {
    **{"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2},
    **{"out_hidden_size": 64, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
}
_LLAMA, _MISTRAL, _QWEN2 = (
    kind(**SHAPE).to_dict() for kind in (LlamaConfig, MistralConfig, Qwen2Config)
)
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

FAMILIES = VISION_LANGUAGE

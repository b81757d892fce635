"""Builds small checkpoints with random weights, one per architecture, for the worker's tests."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3Config,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    Gemma4TextConfig,
    Glm4Config,
    Glm4MoeLiteConfig,
    GPT2Config,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeHybridConfig,
    Llama4TextConfig,
    LlamaConfig,
    MiniCPM3Config,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    OlmoeConfig,
    OPTConfig,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

from worker_proc.loading.loaded_model import LoadedModel
from worker_proc.loading.loader import check_model, load_checked, rehearse
from worker_proc.loading.text_model import auto_class
from worker_proc.runner import ReportProgress

VOCAB_SIZE = 512
EOS_TOKEN_ID = 2
WINDOW = 13
"""Window of the sliding layers: not a multiple of a block, and shorter than most contexts."""

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": 0,
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
"""Of a tower in front of the language model."""
THREE_ROWS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
"""Angles of three rows of positions, which are the same in texts."""
_SHARED_KV: dict[str, Any] = {
    **{"num_hidden_layers": 5, "num_kv_shared_layers": 2, "sliding_window": WINDOW},
    "layer_types": [
        *("sliding_attention", "full_attention", "sliding_attention", "sliding_attention"),
        "full_attention",
    ],
    **{"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB_SIZE},
}
"""The last two layers attend to the keys and values of the third one and of the second."""
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2}
LATENT_NAMES = {"deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3"}
"""The architectures with multi-head latent attention."""


LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
}
"""The sizes of multi-head latent attention, with those of `SHAPE`."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """One kind of model, and a small configuration of it."""

    name: str
    config: Callable[[], PretrainedConfig]


def _without(*names: str, **more: Any) -> dict[str, Any]:
    return {key: value for key, value in SHAPE.items() if key not in names} | more


ARCHITECTURES = (
    Architecture("llama", lambda: LlamaConfig(**SHAPE)),
    Architecture("llama_tied", lambda: LlamaConfig(**SHAPE, tie_word_embeddings=True)),
    Architecture("qwen2", lambda: Qwen2Config(**SHAPE)),
    Architecture("qwen3", lambda: Qwen3Config(**SHAPE)),
    Architecture("mistral_window", lambda: MistralConfig(**SHAPE, sliding_window=WINDOW)),
    Architecture(
        "gemma2",
        lambda: Gemma2Config(
            **_without("num_hidden_layers", num_hidden_layers=4),
            tie_word_embeddings=False,
            sliding_window=WINDOW,
            query_pre_attn_scalar=24,
            attn_logit_softcapping=2.0,
            final_logit_softcapping=20.0,
        ),
    ),
    Architecture(
        "gemma3",
        lambda: Gemma3TextConfig(
            **_without("num_hidden_layers", num_hidden_layers=3),
            tie_word_embeddings=False,
            sliding_window=WINDOW,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
    ),
    Architecture(
        "gemma3n_shared",
        lambda: Gemma3nTextConfig(
            **SHAPE | _SHARED_KV,
            altup_num_inputs=2,
            laurel_rank=8,
            activation_sparsity_pattern=None,
        ),
    ),
    Architecture(
        "gemma4_shared",
        lambda: Gemma4TextConfig(**SHAPE | _SHARED_KV, use_double_wide_mlp=True),
    ),
    Architecture(
        "gemma3_vision",
        lambda: Gemma3Config(
            text_config=Gemma3TextConfig(
                **SHAPE,
                sliding_window=WINDOW,
                layer_types=["sliding_attention", "full_attention"],
            ).to_dict(),
            vision_config=VISION,
            mm_tokens_per_image=4,
            image_token_index=510,
            tie_word_embeddings=False,
        ),
    ),
    Architecture(
        "qwen2_5_vl",
        lambda: Qwen2_5_VLConfig(
            text_config=SHAPE | {"rope_parameters": THREE_ROWS},
            vision_config={
                **{"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2},
                **{"out_hidden_size": 64, "fullatt_block_indexes": [1]},
            },
            **{"image_token_id": 500, "video_token_id": 501},
            **{"vision_start_token_id": 502, "vision_end_token_id": 503},
        ),
    ),
    Architecture(
        "granite4_dense",
        lambda: GraniteMoeHybridConfig(
            **_without("head_dim"),
            shared_intermediate_size=96,
            num_local_experts=0,
            num_experts_per_tok=0,
            layer_types=["full_attention"] * 2,
            position_embedding_type="rope",
            embedding_multiplier=12.0,
            residual_multiplier=0.22,
            attention_multiplier=0.1,
            logits_scaling=3.0,
        ),
    ),
    Architecture(
        "granite",
        lambda: GraniteConfig(
            **_without("head_dim"),
            embedding_multiplier=12.0,
            residual_multiplier=0.22,
            attention_multiplier=0.1,
            logits_scaling=3.0,
        ),
    ),
    Architecture("olmo2", lambda: Olmo2Config(**_without("head_dim"))),
    Architecture("smollm3", lambda: SmolLM3Config(**SHAPE, no_rope_layers=[1, 0])),
    Architecture("glm4", lambda: Glm4Config(**SHAPE)),
    Architecture("phi3", lambda: Phi3Config(**_without("head_dim"))),
    Architecture(
        "gpt2",
        lambda: GPT2Config(
            vocab_size=VOCAB_SIZE,
            n_embd=64,
            n_layer=2,
            n_head=4,
            n_positions=256,
            bos_token_id=1,
            eos_token_id=EOS_TOKEN_ID,
            pad_token_id=0,
        ),
    ),
    Architecture(
        "opt",
        lambda: OPTConfig(
            **_without("intermediate_size", "num_key_value_heads", "head_dim", ffn_dim=96),
            word_embed_proj_dim=64,
        ),
    ),
    Architecture(
        "gpt_oss",
        lambda: GptOssConfig(**SHAPE, **_EXPERTS, num_local_experts=4, sliding_window=WINDOW),
    ),
    Architecture(
        "llama4",
        lambda: Llama4TextConfig(
            **SHAPE | {"num_hidden_layers": 3},
            **{"intermediate_size_mlp": 96, "moe_layers": [1], "num_local_experts": 4},
            **{"attention_chunk_size": WINDOW, "no_rope_layers": [1, 0, 1]},
            **{"floor_scale": 3, "attn_scale": 0.7},
        ),
    ),
    Architecture("mixtral", lambda: MixtralConfig(**SHAPE, **_EXPERTS, num_local_experts=4)),
    Architecture(
        "qwen3_moe",
        lambda: Qwen3MoeConfig(
            **SHAPE, **_EXPERTS, num_experts=4, moe_intermediate_size=48, norm_topk_prob=True
        ),
    ),
    Architecture("olmoe", lambda: OlmoeConfig(**SHAPE, **_EXPERTS, num_experts=4)),
    Architecture(
        "deepseek_v3",
        lambda: DeepseekV3Config(
            **_without("head_dim", "num_key_value_heads"),
            **_EXPERTS,
            **LATENT,
            q_lora_rank=24,
            n_routed_experts=4,
            n_group=1,
            topk_group=1,
            n_shared_experts=1,
            moe_intermediate_size=48,
            first_k_dense_replace=1,
        ),
    ),
    Architecture(
        "deepseek_v2",
        lambda: DeepseekV2Config(
            **_without("head_dim", "num_key_value_heads"),
            **_EXPERTS,
            **LATENT,
            q_lora_rank=None,
            n_routed_experts=4,
            n_shared_experts=2,
            moe_intermediate_size=24,
            first_k_dense_replace=1,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 10_000.0,
                "factor": 4.0,
                "mscale": 0.7,
                "mscale_all_dim": 0.7,
                "original_max_position_embeddings": 64,
            },
        ),
    ),
    Architecture(
        "glm4_moe_lite",
        lambda: Glm4MoeLiteConfig(
            **_without("head_dim", "num_key_value_heads"),
            **_EXPERTS,
            **LATENT,
            q_lora_rank=24,
            n_routed_experts=8,
            n_group=4,
            topk_group=2,
            n_shared_experts=1,
            moe_intermediate_size=48,
            mlp_layer_types=["dense", "sparse"],
        ),
    ),
    Architecture(
        "minicpm3",
        lambda: MiniCPM3Config(
            **_without("head_dim", "num_key_value_heads"),
            **LATENT,
            q_lora_rank=24,
            tie_word_embeddings=False,
            dim_model_base=32,
        ),
    ),
)


def build_checkpoint(
    directory: Path,
    config: PretrainedConfig,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "1GB",
) -> PreTrainedModel:
    """Write a checkpoint whose greedy outputs vary from token to token, and return its model."""
    torch.manual_seed(7)
    model = auto_class(config).from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.numel() == 0:
                continue  # for example without shared experts
            if parameter.dim() > 1:
                spread = 1.0 if "embed" in name or "wte" in name else parameter.shape[-1] ** -0.5
                parameter.normal_(0.0, 1.5 * spread)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("tid2eid"):  # the experts of each token
                number = model.config.n_routed_experts
                buffer.copy_(torch.rand(len(buffer), number).argsort(dim=1)[:, : buffer.shape[1]])
    model.generation_config.eos_token_id = EOS_TOKEN_ID
    model = model.to(dtype)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return model


def build_checkpoints(
    factory: pytest.TempPathFactory, configs: Mapping[str, PretrainedConfig]
) -> dict[str, Path]:
    """Write a checkpoint for each configuration; returns their directories by name."""
    made = {}
    for name, config in configs.items():
        made[name] = factory.mktemp(name)
        build_checkpoint(made[name], config)
    return made


def load_model(
    directory: Path,
    dtype: str = "auto",
    progress: ReportProgress = lambda phase, done, total: None,
) -> LoadedModel:
    """Check and load a checkpoint; transformers' modules stay as they are."""
    checked = check_model(str(directory), dtype, torch.device("cpu"), progress)
    rehearse(checked)
    return load_checked(checked, progress)


def change_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))

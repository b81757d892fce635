"""Loads checkpoints whose weights are rounded."""

from pathlib import Path
from typing import Any

import msgspec
from transformers import (
    Dots1Config,
    MixtralConfig,
    PretrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from protocol.config import EngineConfig, Quantization
from tests.worker.bitwise import engine_config
from tests.worker.checkpoints import SHAPE
from tests.worker.odd_models import CONFIGS, ODD_SIZES
from tests.worker.recurrent_models import KINDS
from worker_proc.model_runner import ModelRunner
from worker_proc.startup.load_runner import load_model_runner


def quantized(config: EngineConfig, quantization: Quantization | None) -> EngineConfig:
    model = msgspec.structs.replace(config.model, quantization=quantization)
    return msgspec.structs.replace(config, model=model)


def load(
    directory: Path, quantization: Quantization | None, dtype: str = "bfloat16", threads: int = 2
) -> ModelRunner:
    config = quantized(engine_config(directory, dtype, threads), quantization)
    return load_model_runner(config, lambda *_: None)


MODELS: dict[str, PretrainedConfig] = {
    "llama": CONFIGS["llama"],
    "llama_wide_vocab_tied": CONFIGS["llama_wide_vocab_tied"],
    "gemma3": CONFIGS["gemma3"],
    "qwen3": Qwen3Config(**ODD_SIZES),
    "qwen3_moe": CONFIGS["qwen3_moe"],
    "mixtral": CONFIGS["mixtral"],
    "gpt2": CONFIGS["gpt2"],
}
_DOTS1: dict[str, Any] = {
    **{"n_routed_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 48},
    **{"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
}
MIXTURES: dict[str, PretrainedConfig] = {
    "mixtral": MixtralConfig(**SHAPE, num_local_experts=5, num_experts_per_tok=2),
    "qwen3_moe": Qwen3MoeConfig(
        **SHAPE, num_experts=7, num_experts_per_tok=3, moe_intermediate_size=48
    ),
    **{one.name: one.config() for one in KINDS},
    "dots1": Dots1Config(**SHAPE, **_DOTS1, n_shared_experts=1),
    "dots1_routed_only": Dots1Config(**SHAPE, **_DOTS1, n_shared_experts=0),
}

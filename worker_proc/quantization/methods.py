"""The names of the formats of quantized checkpoints; formats.py has their readers."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from worker_proc.errors import UnsupportedModel

KEY = "quantization_config"
"""The key of the settings in config.json."""
GGUF = "gguf"
MODELOPT = "modelopt"
OWN_FILE = "hf_quant_config.json"
"""The file with the settings in older checkpoints of Model Optimizer."""
MLX = "mlx"
MLX_KEY = "quantization"
"""The key of MLX's settings in config.json; newer checkpoints repeat them under the usual key."""
METHODS = (
    *("auto-round", "awq", "bitnet", "bitsandbytes", "compressed-tensors", "fbgemm_fp8", "fp8"),
    *(GGUF, "gptq", MODELOPT, "mxfp4"),
)
"""Values of `quant_method`."""


def method_of(section: Mapping[str, Any]) -> Any:
    """Return the name of a format; MLX's settings do not have it."""
    is_mlx = "quant_method" not in section and {"bits", "group_size"} <= section.keys()
    return MLX if is_mlx else section.get("quant_method")


_JOINED_EXPERTS = ("inkling_mm_model", "inkling_text", "inkling2", "inkling2_text")
"""Types of models whose published checkpoints have the codes of all experts in one tensor."""

_PLAIN_ROTATIONS = ("rotation_config", "spinquant_config")
"""Keys of AutoRound for rows that are rotated before layers are computed.

If it rounds no weights, they are at the top of config.json.
"""
_ROTATIONS = ("rotation", *_PLAIN_ROTATIONS)
"""Keys of GPTQModel and AutoRound in the settings of rounded weights."""


def check_rotations(path: Path, section: Mapping[str, Any], key: str = KEY) -> None:
    """Raise UnsupportedModel if weights are those of rotated rows, which no tensor may show.

    `path` is that of the file with the settings, and `key` the one that they are under. If `key` is
    empty, they are at the top of the file.
    """
    for name in _ROTATIONS if key else _PLAIN_ROTATIONS:
        if section.get(name):
            shown = f"{key}.{name}" if key else name
            raise UnsupportedModel(
                f"{path}: {shown} is {json.dumps(section[name])[:100]}; layers whose rows are"
                " rotated first are not supported"
            )


def check_method(path: Path, method: object, model_type: object, key: str = KEY) -> None:
    """Raise UnsupportedModel unless a format is read.

    `path` is that of config.json, and `key` the one that its settings are under.
    """
    if model_type in _JOINED_EXPERTS:
        raise UnsupportedModel(
            f"{path}: quantized checkpoints of {model_type} have the codes of all experts of a"
            " layer in one tensor, which are not read; those in bf16 are"
        )
    if method not in (*METHODS, MLX):
        raise UnsupportedModel(
            f"{path}: {key}.quant_method is {method!r}; supported: {', '.join(METHODS)}"
        )


_MLX_TYPES = frozenset(
    {
        *("cohere", "cohere2", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3_text", "glm4"),
        *("glm4_moe", "granite", "helium", "hunyuan_v1_dense", "internlm3", "llama", "mistral"),
        *("mixtral", "nemotron", "olmo2", "olmoe", "phi3", "qwen2", "qwen2_moe", "qwen3"),
        *("qwen3_moe", "seed_oss", "smollm3", "stablelm", "starcoder2"),
    }
)
"""Model types whose weights mlx-lm leaves unchanged, except for stacking experts."""


def check_mlx_type(model_type: object) -> None:
    """Raise UnsupportedModel unless checkpoints of MLX of a type have transformers' weights."""
    if model_type not in _MLX_TYPES:
        raise UnsupportedModel(
            f"checkpoints of MLX of {model_type} are not read: mlx-lm stores some of its weights in"
            " another way; use a checkpoint in bf16 or one quantized by another library"
        )

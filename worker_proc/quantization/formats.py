"""Determines the format of a checkpoint from `quantization_config` in config.json."""

import json
import logging
from collections.abc import Callable
from pathlib import Path

from transformers import PretrainedConfig

from worker_proc.quantization.auto_round import read_auto_round
from worker_proc.quantization.awq import read_awq
from worker_proc.quantization.bitnet import read_bitnet
from worker_proc.quantization.bitsandbytes import read_bitsandbytes
from worker_proc.quantization.compressed_tensors import read_compressed_tensors
from worker_proc.quantization.fp8 import read_fbgemm_fp8, read_fp8
from worker_proc.quantization.gguf import read_gguf
from worker_proc.quantization.gptq import read_gptq
from worker_proc.quantization.methods import (
    GGUF,
    KEY,
    MLX,
    MLX_KEY,
    MODELOPT,
    OWN_FILE,
    check_method,
    check_rotations,
    method_of,
)
from worker_proc.quantization.mlx import read_mlx
from worker_proc.quantization.modelopt import read_modelopt, settings_beside
from worker_proc.quantization.mxfp4 import read_mxfp4
from worker_proc.quantization.scheme import CheckpointFormat, Settings

_log = logging.getLogger("troika.worker")
_READERS: dict[str, Callable[[Settings], CheckpointFormat | None]] = {
    "auto-round": read_auto_round,
    "awq": read_awq,
    "bitnet": read_bitnet,
    "bitsandbytes": read_bitsandbytes,
    "compressed-tensors": read_compressed_tensors,
    "fbgemm_fp8": read_fbgemm_fp8,
    "fp8": read_fp8,
    GGUF: read_gguf,
    "gptq": read_gptq,
    MODELOPT: read_modelopt,
    "mxfp4": read_mxfp4,
}


def take_format(path: Path, config: PretrainedConfig) -> CheckpointFormat | None:
    """Return the format that a configuration names, and remove it there; None: weights are plain.

    Transformers then takes all weights as plain. `path` is that of config.json, for errors. Raises
    UnsupportedModel for settings that are not supported.
    """
    section, key = None, KEY
    for holder in (config.get_text_config(decoder=True), config):
        check_rotations(path, vars(holder), key="")
        if section is None and isinstance(getattr(holder, MLX_KEY, None), dict):
            section, key = getattr(holder, MLX_KEY), MLX_KEY
        if hasattr(holder, KEY):
            section, key = getattr(holder, KEY), KEY
            delattr(holder, KEY)
    if section is None:
        settings, method = settings_beside(path), MODELOPT
    else:
        settings = Settings(path, key, section)
        check_rotations(path, section, key)
        method = method_of(section)
    if settings is None:
        return None
    check_method(path, method, config.model_type, key)
    if method == MLX:
        return read_mlx(settings, config.model_type)
    format = _READERS[method](settings)
    if format is None:
        _log.info(
            "the checkpoint suggests that the KV cache is rounded, which is not done;"
            " --kv-cache-dtype has the setting"
        )
    return format


def is_quantized(directory: str) -> bool:
    """Return whether a checkpoint's configuration names a format, which may be unsupported."""
    if (Path(directory) / OWN_FILE).is_file():
        return True
    try:
        config = json.loads((Path(directory) / "config.json").read_bytes())
        sections = (config, config.get("text_config") or {})
        return any(key in section for section in sections for key in (KEY, MLX_KEY))
    except (OSError, ValueError, TypeError, AttributeError):
        return False  # the loader gives the reason

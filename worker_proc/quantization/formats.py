"""Reads `quantization_config` of config.json: which format a checkpoint is stored in."""

import json
from collections.abc import Callable
from pathlib import Path

from transformers import PretrainedConfig

from worker_proc.quantization.auto_round import read_auto_round
from worker_proc.quantization.awq import read_awq
from worker_proc.quantization.bitsandbytes import read_bitsandbytes
from worker_proc.quantization.compressed_tensors import read_compressed_tensors
from worker_proc.quantization.fp8 import read_fbgemm_fp8, read_fp8
from worker_proc.quantization.gguf import read_gguf
from worker_proc.quantization.gptq import read_gptq
from worker_proc.quantization.methods import GGUF, KEY, MODELOPT, OWN_FILE, check_method
from worker_proc.quantization.modelopt import read_modelopt, settings_beside
from worker_proc.quantization.mxfp4 import read_mxfp4
from worker_proc.quantization.scheme import CheckpointFormat, Settings

_READERS: dict[str, Callable[[Settings], CheckpointFormat]] = {
    "auto-round": read_auto_round,
    "awq": read_awq,
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
    section = None
    for holder in (config.get_text_config(decoder=True), config):
        section = getattr(holder, KEY, section)
        if hasattr(holder, KEY):
            delattr(holder, KEY)
    if section is None:
        settings, method = settings_beside(path), MODELOPT
    else:
        settings = Settings(path, KEY, section)
        method = settings.get("quant_method")
    if settings is None:
        return None
    check_method(path, method, config.model_type)
    return _READERS[method](settings)


def is_quantized(directory: str) -> bool:
    """Return whether a checkpoint's configuration names a format, which may be unsupported."""
    if (Path(directory) / OWN_FILE).is_file():
        return True
    try:
        config = json.loads((Path(directory) / "config.json").read_bytes())
        return any(KEY in section for section in (config, config.get("text_config") or {}))
    except (OSError, ValueError, TypeError, AttributeError):
        return False  # the loader gives the reason

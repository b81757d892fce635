"""The rotary embedding of a GGUF file as transformers' `rope_parameters`."""

import math
from typing import Any

import torch

from worker_proc.errors import CheckpointError, UnsupportedModel
from worker_proc.gguf.config_tensors import FREQUENCY_FACTORS, LONG_FACTORS, SHORT_FACTORS
from worker_proc.gguf.mapped import MappedFiles
from worker_proc.gguf.metadata import Metadata

_DEFAULT_BASE = 10_000.0
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_LENGTH = 1.0, 4.0, 8192
"""The settings of all models of the Llama-3 series; files state only the resulting factors."""
_SCALING = "rope.scaling"
_OLD_FACTOR = "rope.scale_linear"
"""The key of old files for `rope.scaling.factor`."""


def rope_parameters(metadata: Metadata, file: MappedFiles) -> dict[str, Any]:
    """Return the parameters; raises UnsupportedModel for those that transformers cannot have."""
    base = metadata.number("rope.freq_base", _DEFAULT_BASE)
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": base}
    kind, factor = _scaling(metadata)
    tensors = file.header.tensors
    if FREQUENCY_FACTORS in tensors:
        if kind != "none":
            raise metadata.unsupported(f"{_SCALING}.type", f'"none" beside {FREQUENCY_FACTORS}')
        return parameters | _llama3(metadata, file, base)
    if LONG_FACTORS in tensors:
        if kind not in ("none", "longrope"):
            raise metadata.unsupported(f"{_SCALING}.type", f'"longrope" beside {LONG_FACTORS}')
        return parameters | _longrope(metadata, file)
    if kind == "none":
        return parameters
    if kind not in ("linear", "yarn"):
        raise metadata.unsupported(f"{_SCALING}.type", '"none", "linear" or "yarn"')
    parameters |= {"rope_type": kind, "factor": factor}
    return parameters | (_yarn(metadata, factor) if kind == "yarn" else {})


def check_unscaled(metadata: Metadata) -> None:
    """Raise UnsupportedModel for positions that are scaled."""
    kind, _ = _scaling(metadata)
    if kind != "none":
        raise metadata.unsupported(f"{_SCALING}.factor", "1, or none")


def _scaling(metadata: Metadata) -> tuple[Any, float]:
    """Return the kind of scaling and its factor. llama.cpp's default for the kind is linear."""
    key = f"{_SCALING}.factor"
    if metadata.get(key) is None:
        key = _OLD_FACTOR
    factor = metadata.number_or_none(key) or 1.0
    kind = metadata.get(f"{_SCALING}.type") or "linear"
    return "none" if kind == "linear" and factor == 1.0 else kind, factor


def _yarn(metadata: Metadata, factor: float) -> dict[str, Any]:
    """Return the parameters that YaRN has beside the factor."""
    original = metadata.integer(
        f"{_SCALING}.original_context_length", metadata.integer("context_length")
    )
    parameters: dict[str, Any] = {"original_max_position_embeddings": original}
    for key, name in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
        if metadata.get(f"{_SCALING}.{key}") is not None:
            parameters[name] = metadata.number(f"{_SCALING}.{key}")
    names = [f"{_SCALING}.{key}" for key in ("attn_factor", "yarn_attn_factor")]
    if any(metadata.get(name) is not None for name in names):
        usual = 0.1 * math.log(max(factor, 1.0)) + 1.0
        own = metadata.number(names[0], 1.0)
        parameters["attention_factor"] = own * metadata.number(names[1], usual)
    return parameters


def _llama3(metadata: Metadata, file: MappedFiles, base: float) -> dict[str, Any]:
    """Return the parameters whose factors of frequencies are those of the file."""
    stored = _factors(metadata, file, FREQUENCY_FACTORS)
    factor = float(stored.max())
    head_dim = 2 * stored.numel()
    periods = 2 * math.pi * base ** (torch.arange(0, head_dim, 2).float() / head_dim)
    turns = _LLAMA3_LENGTH / periods
    share = ((turns - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW)).clamp(0.0, 1.0)
    high = _LLAMA3_HIGH
    if metadata.header.architecture == "llama4":  # which has no frequencies in between
        share, high = (turns >= _LLAMA3_LOW).float(), _LLAMA3_LOW
    expected = 1.0 / ((1.0 - share) / factor + share)
    if not torch.allclose(stored, expected, rtol=1e-3):
        raise UnsupportedModel(
            f"{file.header.path}: {FREQUENCY_FACTORS} has other factors than those of the Llama-3"
            " series"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": high,
        "original_max_position_embeddings": _LLAMA3_LENGTH,
    }


def _longrope(metadata: Metadata, file: MappedFiles) -> dict[str, Any]:
    length = metadata.integer("context_length")
    original = metadata.integer(f"{_SCALING}.original_context_length", length)
    factors = {
        name: _factors(metadata, file, tensor).tolist()
        for name, tensor in (("long_factor", LONG_FACTORS), ("short_factor", SHORT_FACTORS))
    }
    parameters: dict[str, Any] = {"rope_type": "longrope", **factors}
    parameters["original_max_position_embeddings"] = original
    parameters["factor"] = length / original
    if metadata.get(f"{_SCALING}.attn_factor") is not None:
        parameters["attention_factor"] = metadata.number(f"{_SCALING}.attn_factor")
    return parameters


def _factors(metadata: Metadata, file: MappedFiles, name: str) -> torch.Tensor:
    """Return the factors of a tensor in float32: one for each frequency."""
    count = metadata.integer("rope.dimension_count", metadata.head_size()) // 2
    stored = file.read_plain(name).float()
    if stored.shape != (count,):
        raise CheckpointError(
            f"{file.header.path}: {name} has the shape {list(stored.shape)} instead of [{count}]"
        )
    if not bool((stored.isfinite() & (stored > 0)).all()):
        raise CheckpointError(
            f"{file.header.path}: {name} has factors that are not greater than 0 and finite"
        )
    return stored

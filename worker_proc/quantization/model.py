"""Loads a quantized checkpoint into transformers' model."""

from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from worker_proc.quantization.coded_tensor import CodedSlice
from worker_proc.quantization.weight_files import DenseWeight, DenseWhole, WeightFiles


def load_quantized(
    skeleton: PreTrainedModel,
    directory: str,
    files: WeightFiles,
    dtype: torch.dtype,
    options: dict[str, Any],
    *,
    keeps_codes: bool,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Return the model with all weights in `dtype`, and the names of those that are missing.

    `skeleton` is the model on the meta device; `options` are those of transformers. With
    `keeps_codes` weights in codes are not read: they are `CodedTensor`.
    """
    weights = files.plain_slices()
    for name, stored in files.weights.items():
        coded = CodedSlice(((stored,),), dtype, dim=2)
        weights[name] = coded if keeps_codes else DenseWeight(stored, dtype)
    for name, whole in files.whole.items():
        coded = CodedSlice(whole.experts, dtype, dim=len(whole.shape))
        weights[name] = coded if keeps_codes and whole.experts else DenseWhole(whole, dtype)
    model, info = load_state(skeleton, weights, dtype, options)
    if (Path(directory) / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(directory)
    return model, info


def load_state(
    skeleton: PreTrainedModel,
    weights: dict[str, Any],
    dtype: torch.dtype,
    options: dict[str, Any],
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Return a model like the skeleton with tensors, or slices of files, as its weights."""
    model, info = type(skeleton).from_pretrained(
        None, config=skeleton.config, state_dict=weights, dtype=dtype, **options
    )
    return model, info

"""What `--quantization` asks of a model: formats of its weights, and the reasons to refuse it.

Codes are made when weights are packed. An embedding is never rounded, also where the output layer
shares its weight: then the output layer has codes of its own.
"""

from collections.abc import Callable

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from protocol.config import Quantization
from worker_proc.errors import CheckpointError, UnsupportedModel
from worker_proc.loading.loader import LoadedModel
from worker_proc.loading.packed_linear import PLAIN, Formats
from worker_proc.native.build import build
from worker_proc.native.kernels import (
    MAX_CODED_INPUTS,
    Format,
    NativeLibrary,
    load_library,
)

FORMATS = {
    None: PLAIN,
    Quantization.W8A16: Formats(Format.INT8, head=Format.INT8),
    Quantization.W4A16: Formats(Format.INT4, head=Format.INT8),
    Quantization.W8A8: Formats(Format.INT8_FOR_CODES, head=Format.INT8),
}
"""With 4 bits, the output layer would make nearly half of the error (docs/quantization.md)."""


def load_coding_library(setting: str, device: torch.device) -> NativeLibrary:
    """Return the kernels, compiled now if they are not yet, or raise why there are none.

    `setting` is what asks for codes, for the error.
    """
    if device.type != "cpu":
        raise UnsupportedModel(
            f"{setting} needs device cpu: there are no kernels for codes on {device.type}"
        )
    try:
        build()
        reason = "the compiled library cannot be loaded"
    except (OSError, RuntimeError) as error:
        reason = str(error)
    library = load_library()
    if library is None:
        raise UnsupportedModel(f"{setting} needs the native kernels: {reason}")
    return library


def check_weights(
    loaded: LoadedModel, quantization: Quantization, on_checked: Callable[[int, int], None]
) -> None:
    """Raise why a model cannot be quantized."""
    if loaded.dtype != torch.bfloat16:
        dtype = str(loaded.dtype).removeprefix("torch.")
        raise UnsupportedModel(
            f"quantization {quantization} needs dtype bfloat16, and the checkpoint is loaded in"
            f" {dtype}; add --dtype bfloat16"
        )
    _check_matrices(loaded.model, quantization)
    found = {
        name: module.weight.t() if type(module) is Conv1D else module.weight
        for name, module in loaded.model.named_modules()
        if type(module) in (nn.Linear, Conv1D) and not module.weight.is_meta
    }
    for done, (name, weight) in enumerate(found.items(), start=1):
        if not _is_finite(weight):
            raise CheckpointError(
                f"quantization {quantization}: {name}.weight has values that are not finite"
            )
        if quantization is Quantization.W8A8 and weight.shape[1] > MAX_CODED_INPUTS:
            raise UnsupportedModel(
                f"quantization {quantization}: {name} has {weight.shape[1]} inputs, and its sums of"
                f" products of codes are exact for at most {MAX_CODED_INPUTS}"
            )
        on_checked(done, len(found))


def _is_finite(weight: torch.Tensor) -> bool:
    # The sum is many times faster; it may overflow where no value has.
    return bool(weight.sum(dtype=torch.float32).isfinite()) or bool(weight.isfinite().all())


def _check_matrices(model: nn.Module, quantization: Quantization) -> None:
    """Raise UnsupportedModel for matrices that are not those of linear layers or embeddings."""
    for name, module in model.named_modules():
        if type(module) in (nn.Linear, Conv1D) or isinstance(module, nn.Embedding):
            continue
        if any(p.dim() > 1 and not p.is_meta for p in module.parameters(recurse=False)):
            raise UnsupportedModel(
                f"quantization {quantization}: {name} ({type(module).__name__}) has weights that"
                " are not those of a linear layer"
            )

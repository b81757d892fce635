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
from worker_proc.loading.grouped_experts import read_experts
from worker_proc.loading.loader import LoadedModel
from worker_proc.loading.packed_linear import PLAIN, Formats
from worker_proc.loading.router import ROUTER_NAMES
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

    The error names `setting`, which needs the codes.
    """
    if device.type != "cpu":
        raise UnsupportedModel(
            f"{setting} needs device cpu: there are no kernels for it on {device.type}"
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
    found = _rounded_weights(loaded.model)
    for done, (name, weight) in enumerate(found.items(), start=1):
        if not _is_finite(weight):
            raise CheckpointError(
                f"quantization {quantization}: {name} has values that are not finite"
            )
        num_inputs = weight.shape[-1]
        if quantization is Quantization.W8A8 and num_inputs > MAX_CODED_INPUTS:
            raise UnsupportedModel(
                f"quantization {quantization}: {name.removesuffix('.weight')} has {num_inputs}"
                f" inputs, and its sums of products of codes are exact for at most"
                f" {MAX_CODED_INPUTS}"
            )
        on_checked(done, len(found))


def check_experts(loaded: LoadedModel, quantization: Quantization) -> None:
    """Raise UnsupportedModel if experts are left that no kernel computes."""
    for name, module in loaded.model.named_modules():
        if read_experts(module) is not None:
            raise UnsupportedModel(
                f"quantization {quantization}: {name} ({type(module).__name__}) does not compute"
                " what the kernels for experts do"
            )


def _rounded_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the weights that become codes, `[..., num_outputs, num_inputs]`, by their names."""
    found: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        experts = read_experts(module)
        if experts is not None:
            up_name = "gate_up_proj" if experts.is_gated else "up_proj"
            found[f"{name}.{up_name}"] = experts.up.weights
            found[f"{name}.down_proj"] = experts.down.weights
        elif type(module) in (nn.Linear, Conv1D) and not module.weight.is_meta:
            transposed = type(module) is Conv1D
            found[f"{name}.weight"] = module.weight.t() if transposed else module.weight
    return found


def _is_finite(weight: torch.Tensor) -> bool:
    # The sum is many times faster; it may overflow where no value has.
    return bool(weight.sum(dtype=torch.float32).isfinite()) or bool(weight.isfinite().all())


def _check_matrices(model: nn.Module, quantization: Quantization) -> None:
    """Raise UnsupportedModel for matrices of other modules than those that are expected."""
    known = {
        part
        for parent in model.modules()
        if any(read_experts(child) is not None for child in parent.children())
        for name, child in parent.named_children()
        if name in ROUTER_NAMES or read_experts(child) is not None
        for part in child.modules()
    }
    for name, module in model.named_modules():
        is_linear = type(module) in (nn.Linear, Conv1D)
        if is_linear or isinstance(module, nn.Embedding) or module in known:
            continue
        if any(p.dim() > 1 and not p.is_meta for p in module.parameters(recurse=False)):
            raise UnsupportedModel(
                f"quantization {quantization}: {name} ({type(module).__name__}) has weights that"
                " are not those of a linear layer, nor of experts for which there are kernels"
            )

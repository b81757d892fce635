"""Refuses models whose weights, modules or values cannot be rounded for `--quantization`."""

from collections.abc import Callable, Collection, Sequence

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from protocol.config import Quantization
from worker_proc.errors import CheckpointError, UnsupportedModel
from worker_proc.loading.loaded_model import LoadedModel
from worker_proc.loading.output_layer import output_layer
from worker_proc.modules.experts.grouped import read_experts
from worker_proc.modules.experts.router import ROUTER_NAMES
from worker_proc.native.packed_weights import MAX_CODED_INPUTS
from worker_proc.recurrent.state_spec import RecurrentSpec


def check_rounded_dtype(dtype: torch.dtype, quantization: Quantization) -> None:
    """Raise UnsupportedModel unless the weights to be rounded are bfloat16."""
    if dtype != torch.bfloat16:
        raise UnsupportedModel(
            f"quantization {quantization} needs dtype bfloat16, and the checkpoint is loaded in"
            f" {str(dtype).removeprefix('torch.')}; add --dtype bfloat16"
        )


def check_rounding(
    model: nn.Module,
    used: Collection[str],
    quantization: Quantization,
    recurrent: Sequence[RecurrentSpec] = (),
) -> None:
    """Raise UnsupportedModel for modules whose weights cannot be rounded.

    `model` is on the meta device; `used` are the names of the parameters that text reaches.
    Subclasses of linear layers pass here: only the load shows whether they compute a linear layer.
    """
    _check_matrices(model, used, quantization, recurrent, nn.Linear)
    for name, weight in _rounded_weights(model, used).items():
        num_inputs = weight.shape[-1]
        if quantization is Quantization.W8A8 and num_inputs > MAX_CODED_INPUTS:
            raise UnsupportedModel(
                f"quantization {quantization}: {name.removesuffix('.weight')} has {num_inputs}"
                f" inputs, and its sums of products of codes are exact for at most"
                f" {MAX_CODED_INPUTS}"
            )


def check_plain_head(
    model: nn.Module, coded: Collection[str], method: str, quantization: Quantization
) -> None:
    """Raise UnsupportedModel if nothing is left to round in a quantized checkpoint.

    `coded` are the names of the weights that its format `method` stores as codes.
    """
    head = output_layer(model)
    names = [f"{name}.weight" for name, module in model.named_modules() if module is head]
    if head is None or any(name in coded for name in names):
        raise UnsupportedModel(
            f"quantization {quantization}: the checkpoint is quantized already ({method}), its"
            " output layer included; leave the setting out"
        )


def check_values(
    loaded: LoadedModel, quantization: Quantization, on_checked: Callable[[int, int], None]
) -> None:
    """Check the loaded weights and modules of a model before they are rounded.

    Raises CheckpointError for values that are not finite, and UnsupportedModel for modules.
    """
    names = dict(loaded.model.named_parameters(remove_duplicate=False))
    used = [name for name, parameter in names.items() if not parameter.is_meta]
    found = _rounded_weights(loaded.model, used)
    if loaded.codes is None:
        _check_matrices(loaded.model, used, quantization, loaded.recurrent)
    else:
        head = getattr(output_layer(loaded.model), "weight", None)
        found = {name: weight for name, weight in found.items() if names[name] is head}
    for done, (name, weight) in enumerate(found.items(), start=1):
        if not _is_finite(weight):
            raise CheckpointError(
                f"quantization {quantization}: {name} has values that are not finite"
            )
        on_checked(done, len(found))


def check_experts(loaded: LoadedModel, quantization: Quantization) -> None:
    """Raise UnsupportedModel if any experts remain that no kernel computes."""
    for name, module in loaded.model.named_modules():
        if read_experts(module) is not None:
            raise unsupported_experts(quantization, name, module)


def unsupported_experts(
    quantization: Quantization, name: str, module: nn.Module
) -> UnsupportedModel:
    """Return the error for experts that no kernel computes."""
    return UnsupportedModel(
        f"quantization {quantization}: {name} ({type(module).__name__}) does not compute what the"
        " kernels for experts do"
    )


def _rounded_weights(model: nn.Module, used: Collection[str]) -> dict[str, torch.Tensor]:
    """Return the weights that become codes, `[..., num_outputs, num_inputs]`, by name."""
    reached = frozenset(used)
    found: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        experts = read_experts(module, has_values=False)
        if experts is not None and f"{name}.down_proj" in reached:
            up_name = "gate_up_proj" if experts.is_gated else "up_proj"
            found[f"{name}.{up_name}"] = experts.up.weights
            found[f"{name}.down_proj"] = experts.down.weights
        elif type(module) in (nn.Linear, Conv1D) and f"{name}.weight" in reached:
            transposed = type(module) is Conv1D
            found[f"{name}.weight"] = module.weight.t() if transposed else module.weight
    return found


def _is_finite(weight: torch.Tensor) -> bool:
    # The sum is many times faster; it may overflow although all values are finite.
    return bool(weight.sum(dtype=torch.float32).isfinite()) or bool(weight.isfinite().all())


def _check_matrices(
    model: nn.Module,
    used: Collection[str],
    quantization: Quantization,
    recurrent: Sequence[RecurrentSpec],
    passing: type[nn.Module] | None = None,
) -> None:
    """Raise UnsupportedModel for matrices of unexpected modules.

    Subclasses of `passing` are expected, too. In recurrent modules, weights outside linear layers
    keep the model's dtype: convolutions, decays, and weights that the modules multiply by
    themselves.
    """
    experts = {m for m in model.modules() if read_experts(m, has_values=False) is not None}
    known = {
        part
        for parent in model.modules()
        if any(child in experts for child in parent.children())
        for name, child in parent.named_children()
        if name in ROUTER_NAMES or child in experts
        for part in child.modules()
    }
    known.update(
        part
        for one in recurrent
        for part in model.get_submodule(one.module_name).modules()
        if not isinstance(part, nn.Linear)
    )
    reached = frozenset(used)
    for name, module in model.named_modules():
        is_linear = type(module) in (nn.Linear, Conv1D)
        is_linear = is_linear or (passing is not None and isinstance(module, passing))
        if is_linear or isinstance(module, nn.Embedding) or module in known:
            continue
        own = module.named_parameters(name, recurse=False)
        if any(parameter.dim() > 1 and full in reached for full, parameter in own):
            raise UnsupportedModel(
                f"quantization {quantization}: {name} ({type(module).__name__}) has weights that"
                " are not those of a linear layer, nor of experts for which there are kernels"
            )

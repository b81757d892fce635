"""Packs weights for the kernels, both plain weights and codes of quantized checkpoints.

Codes are kept if a kernel reads them (quantization/packing.py); otherwise the weight is
dequantized. Each weight is read, packed and freed before the next one.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import nn

from worker_proc.native.kernels import NativeLibrary
from worker_proc.native.packed_weights import Format, PackedWeight
from worker_proc.native.weight_packer import Matrices
from worker_proc.quantization.coded_tensor import CodedTensor
from worker_proc.quantization.packing import (
    CannotJoin,
    can_take_codes,
    join_packed,
    obstacle,
    pack_codes,
    pack_for_codes,
)
from worker_proc.quantization.weight_files import Parts


def pack_weight(
    library: NativeLibrary,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    format: Format = Format.UNITS,
    *,
    gates: bool = False,
) -> PackedWeight:
    """Pack `[num_outputs, num_inputs]`; with `gates`, half of the outputs are gates.

    `format` applies to plain weights only.
    """
    if isinstance(weight, CodedTensor):
        packed = pack_coded(weight, bias, gates=gates)
        if packed is not None:
            return packed
        weight = weight.dequantize()
    return library.packer.pack(weight.detach(), bias, smallest(format, weight.dtype), gates=gates)


def smallest(format: Format, dtype: torch.dtype) -> Format:
    """Return the format that takes the least memory without changing any value."""
    is_plain = format is Format.UNITS and dtype == torch.bfloat16
    return Format.COMPACT if is_plain else format


def pack_expert_weights(
    library: NativeLibrary,
    weights: Matrices,
    format: Format,
    *,
    gates: bool = False,
    biases: torch.Tensor | None = None,
) -> PackedWeight:
    """Pack each expert's `[num_outputs, num_inputs]`, one expert after the other.

    `biases` are `[num_experts, num_outputs]`.
    """
    if isinstance(weights, CodedTensor):
        packed = _pack_coded_experts(weights, biases, gates=gates)
        if packed is not None:
            return packed
        weights = weights.dequantize()
    format = smallest(format, weights[0].dtype)
    return library.packer.pack_experts(weights, format, gates=gates, biases=biases)


def takes_row_codes(weight: torch.Tensor) -> bool:
    """Return whether a weight's checkpoint requires coded rows and the kernels support them."""
    return (
        isinstance(weight, CodedTensor)
        and weight.dtype == torch.bfloat16
        and all(part.codes_rows for parts in weight.experts for part in parts)
    )


@contextmanager
def dequantized(module: nn.Module) -> Iterator[None]:
    """Replace the weights of a module and its children by dequantized ones within the context."""
    coded = [
        (part, name, cast(CodedTensor, parameter))
        for part in module.modules()
        for name, parameter in part._parameters.items()
        if isinstance(parameter, CodedTensor)
    ]
    for part, name, parameter in coded:
        part._parameters[name] = nn.Parameter(parameter.dequantize(), requires_grad=False)
    try:
        yield
    finally:
        for part, name, parameter in coded:
            part._parameters[name] = cast(nn.Parameter, parameter)


def dequantize_weights(modules: Iterable[nn.Module], reason: str) -> None:
    """Dequantize the weights of modules, but not of their children, and report `reason`."""
    for module in modules:
        for name, parameter in list(module._parameters.items()):
            if isinstance(parameter, CodedTensor):
                dense = parameter.dequantize()
                module._parameters[name] = nn.Parameter(dense, requires_grad=False)
                _note(parameter.experts, reason)


def without_kernels(model: nn.Module) -> list[nn.Module]:
    """Return modules other than linear layers, embeddings and experts that have coded weights."""
    return [
        module
        for module in model.modules()
        if type(module) is not nn.Linear
        and not isinstance(module, nn.Embedding)
        and any(
            isinstance(parameter, CodedTensor) and parameter.dim() == 2
            for parameter in module._parameters.values()
        )
    ]


def pack_coded(
    weight: CodedTensor,
    bias: torch.Tensor | None,
    *,
    gates: bool = False,
    is_part: bool = False,
) -> PackedWeight | None:
    """Pack the codes of a matrix; None: no kernel reads them. See `pack_codes` for `is_part`."""
    read = weight.read()
    reason = "layers that are computed together differ" if read is None else obstacle(read)
    _note(weight.experts, reason)
    if read is None or reason:
        return None
    if takes_row_codes(weight) and can_take_codes(read):
        return pack_for_codes(read, bias, gates=gates, is_part=is_part)
    return pack_codes(read, bias, weight.dtype, gates=gates, is_part=is_part)


def _pack_coded_experts(
    weights: CodedTensor, biases: torch.Tensor | None, *, gates: bool
) -> PackedWeight | None:
    """Pack the codes of experts; None: there is an expert whose codes no kernel reads."""

    def pack() -> Iterator[PackedWeight]:
        for number in range(len(weights)):
            bias = None if biases is None else biases[number]
            one = pack_coded(weights.of_expert(number), bias, gates=gates, is_part=True)
            if one is None:
                raise CannotJoin("an expert whose codes no kernel reads")
            yield one

    try:
        return join_packed(pack(), len(weights))
    except CannotJoin as error:
        _note(weights.experts, str(error))
        return None


def _note(experts: tuple[Parts, ...], reason: str) -> None:
    for parts in experts:
        for part in parts:
            part.report.add(part.name, part.kind.value, reason)

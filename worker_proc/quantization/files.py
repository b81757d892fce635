"""The weights of a quantized checkpoint of safetensors files, which are mapped."""

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from worker_proc.errors import CheckpointError
from worker_proc.quantization.headers import StoredTensor
from worker_proc.quantization.report import CodesReport
from worker_proc.quantization.scheme import (
    CODE_DTYPES,
    UNUSED_PARTS,
    CheckpointFormat,
    Scheme,
    StackedScheme,
)
from worker_proc.quantization.weight import CodeKind, QuantizedWeight
from worker_proc.quantization.weight_files import Parts


class StoredWeight:
    """The weight of one layer, in its files."""

    def __init__(
        self,
        name: str,
        scheme: Scheme,
        shape: tuple[int, int],
        tensors: Mapping[str, Any],
        report: CodesReport,
    ) -> None:
        """`tensors` are slices of the files, by their names within the layer."""
        self.name = name
        self.scheme = scheme
        self.report = report
        self.shape = torch.Size(shape)
        self._tensors = tensors

    @property
    def kind(self) -> CodeKind:
        return self.scheme.kind

    @property
    def codes_rows(self) -> bool:
        return self.scheme.codes_rows

    def read(self) -> QuantizedWeight:
        """Read the codes and their scales."""
        try:
            return self.scheme.read({name: part[...] for name, part in self._tensors.items()})
        except ValueError as error:
            raise CheckpointError(f"{self.name} {error}") from error


class _OfExpert:
    """The part of one expert in a tensor of all experts, in the form of a file's slice."""

    def __init__(self, slices: Any, number: int) -> None:
        self._slices, self._number = slices, number

    def __getitem__(self, _: object) -> torch.Tensor:
        found: torch.Tensor = self._slices[self._number]
        return found


class StoredExperts:
    """The weight of all experts of a mixture, in its files."""

    experts: tuple[Parts, ...] = ()

    def __init__(
        self, name: str, scheme: StackedScheme, shape: tuple[int, ...], slices: Mapping[str, Any]
    ) -> None:
        """`slices` are those of the files, by the ends of their names."""
        self.name = name
        self.shape = torch.Size(shape)
        self._scheme, self._slices = scheme, slices

    def read(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight in `dtype`."""
        try:
            return self._scheme.read(self._slices, self.shape, dtype)
        except ValueError as error:
            raise CheckpointError(f"{self.name} {error}") from error


class QuantizedFiles:
    """The files of a quantized checkpoint: weights of layers by their names, and other tensors."""

    def __init__(
        self, directory: str, stored: Mapping[str, StoredTensor], format: CheckpointFormat
    ) -> None:
        """Check all tensors by the headers of their files; raises CheckpointError."""
        self._directory = Path(directory)
        self.report = CodesReport(format.method)
        self._open: dict[str, Any] = {}
        self.weights: dict[str, StoredWeight] = {}
        """The weights of layers, by the names that plain weights would have."""
        self.whole: dict[str, StoredExperts] = {}
        """The weights of all experts of a mixture, by the names that plain weights would have."""
        self.plain: dict[str, StoredTensor] = {}
        layers = _layers(stored, format)
        for layer, names in layers.items():
            codes = names[0]
            own = {name: stored[f"{layer}.{name}"] for name in names}
            scheme = format.schemes_of_dtypes.get(own[codes].dtype)
            scheme = scheme or format.scheme_of(layer)
            tensors = {name: self._slice(f"{layer}.{name}", own[name]) for name in names}
            try:
                if format.name_of_expert is not None and len(own[codes].shape) == 3:
                    self._add_experts(layer, scheme, own, tensors, format.name_of_expert)
                    continue
                shape = scheme.shape(own, partial(_read_one, tensors))
            except ValueError as error:
                raise CheckpointError(f"{directory}: {layer} {error}") from error
            weight = StoredWeight(layer, scheme, shape, tensors, self.report)
            self.weights[f"{layer}.weight"] = weight
        used = {f"{layer}.{name}" for layer, names in layers.items() for name in names}
        if format.experts is not None:
            used |= self._find_experts(stored, format.experts)
        for name, tensor in stored.items():
            if name not in used and name.rpartition(".")[2] not in UNUSED_PARTS:
                self.plain[name] = tensor

    def _add_experts(
        self,
        layer: str,
        scheme: Scheme,
        stored: Mapping[str, StoredTensor],
        tensors: Mapping[str, Any],
        name_of: Callable[[str, int], str],
    ) -> None:
        """Add the weight of each expert of a layer; raises ValueError for other tensors."""
        counts = {tensor.shape[0] if len(tensor.shape) == 3 else 0 for tensor in stored.values()}
        if len(counts) != 1:
            raise ValueError("has tensors with the matrices of different numbers of experts")
        one = {name: part._replace(shape=part.shape[1:]) for name, part in stored.items()}
        shape = scheme.shape(one, partial(_read_one, tensors))
        for number in range(counts.pop()):
            name = name_of(layer, number)
            own = {part: _OfExpert(slices, number) for part, slices in tensors.items()}
            self.weights[f"{name}.weight"] = StoredWeight(name, scheme, shape, own, self.report)

    def _find_experts(self, stored: Mapping[str, StoredTensor], scheme: StackedScheme) -> set[str]:
        """Add the weights of experts; return the names of their tensors."""
        used = set()
        for codes in (name for name in stored if name.endswith(scheme.ends[0])):
            weight = codes.removesuffix(scheme.ends[0])
            own = {end: stored[weight + end] for end in scheme.ends if weight + end in stored}
            try:
                shape = scheme.shape(own)
            except ValueError as error:
                raise CheckpointError(f"{self._directory}: {weight} {error}") from error
            slices = {end: self._slice(weight + end, tensor) for end, tensor in own.items()}
            self.whole[weight] = StoredExperts(weight, scheme, shape, slices)
            self.report.add(weight, self.report.method, "no kernel reads the codes of its experts")
            used |= {weight + end for end in own}
        return used

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of all tensors if codes stay codes; other tensors are of `dtype`."""
        plain = sum(math.prod(tensor.shape) for tensor in self.plain.values())
        plain += sum(experts.shape.numel() for experts in self.whole.values())
        weights = self.weights.values()
        codes = sum(weight.shape.numel() * weight.kind.bits // 8 for weight in weights)
        return plain * dtype.itemsize + codes

    def plain_slices(self) -> dict[str, Any]:
        """Return slices of the tensors that are not quantized."""
        return {name: self._slice(name, tensor) for name, tensor in self.plain.items()}

    def _slice(self, name: str, tensor: StoredTensor) -> Any:
        if tensor.file not in self._open:
            path = self._directory / tensor.file
            try:
                self._open[tensor.file] = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{path} is not a safetensors file: {error}") from error
        return self._open[tensor.file].get_slice(name)


def _read_one(tensors: Mapping[str, Any], name: str) -> torch.Tensor:
    found: torch.Tensor = tensors[name][...]
    return found


def _layers(stored: Mapping[str, StoredTensor], format: CheckpointFormat) -> dict[str, list[str]]:
    """Return the names of each quantized layer's tensors within the layer, the codes first.

    The tensors show whether a layer is quantized, so lists of plain layers are not needed.
    """
    return {
        layer: [own, *_parts(stored, format, layer)]
        for name, tensor in stored.items()
        for layer, _, own in [name.rpartition(".")]
        if own in format.codes and (own != "weight" or tensor.dtype in CODE_DTYPES)
    }


def _parts(
    stored: Mapping[str, StoredTensor], format: CheckpointFormat, layer: str
) -> Iterator[str]:
    return (part for part in sorted(format.parts) if f"{layer}.{part}" in stored)

"""The tensors of GGUF files as the weights that they stand for.

It takes the place of `QuantizedFiles` for a directory that stands for a GGUF model. Nothing is read
before it is needed.
"""

import math
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch

from worker_proc.errors import CheckpointError
from worker_proc.gguf.architectures import architecture_of
from worker_proc.gguf.blocks import code_kind
from worker_proc.gguf.joins import JoinedRows, JoinedTensor
from worker_proc.gguf.mapped import PLAIN, MappedFiles
from worker_proc.gguf.names import NamedConstant, NamedTensor, named_tensors
from worker_proc.gguf.types import READ, TensorType, type_name
from worker_proc.quantization.gguf import check_unchanged
from worker_proc.quantization.headers import StoredTensor
from worker_proc.quantization.methods import GGUF
from worker_proc.quantization.report import CodesReport
from worker_proc.quantization.scheme import SourceFile
from worker_proc.quantization.selection import reorder_inputs, select_outputs
from worker_proc.quantization.weight import CodeKind, QuantizedWeight, join_outputs
from worker_proc.quantization.weight_files import Parts, WholeWeight


class BlocksWeight:
    """The weight of one layer: blocks of one type, of a tensor or of one of its matrices."""

    codes_rows = False

    def __init__(
        self, file: MappedFiles, tensor: NamedTensor, kind: CodeKind, report: CodesReport
    ) -> None:
        self.name = tensor.name.removesuffix(".weight")
        self.shape = torch.Size(tensor.shape)
        self.kind = kind
        self.report = report
        self._file, self._tensor = file, tensor

    def read(self) -> QuantizedWeight:
        """Read the codes and their scales."""
        tensor = self._tensor
        change = tensor.change
        weight = self._file.read_codes(tensor.entry.name, tensor.matrix or 0, change.rows)
        return weight if change.inputs is None else reorder_inputs(weight, change.inputs)


class OrderedRows:
    """A weight with the rows of several tensors of one type, in an order."""

    codes_rows = False

    def __init__(self, name: str, parts: Parts, order: torch.Tensor) -> None:
        self.name = name
        self.shape = torch.Size((len(order), parts[0].shape[1]))
        self.kind = parts[0].kind
        self.report = parts[0].report
        self._parts, self._order = parts, order

    def read(self) -> QuantizedWeight:
        """Read the codes and their scales."""
        joined = join_outputs([part.read() for part in self._parts])
        return select_outputs(joined, self._order)


class JoinedWeight:
    """A weight of several tensors."""

    def __init__(
        self,
        file: MappedFiles,
        tensor: JoinedTensor | JoinedRows,
        experts: tuple[Parts, ...] = (),
    ) -> None:
        """`experts` are the weights in codes whose rows are those of each expert, if there are."""
        self.shape = torch.Size(tensor.shape)
        self.experts = experts
        self._file, self._tensor = file, tensor

    def read(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight in `dtype`."""
        return self._tensor.read(self._file, dtype)


class _PlainSlice:
    """A plain tensor that is read by the slice of all of it."""

    def __init__(self, file: MappedFiles, tensor: NamedTensor) -> None:
        self._file, self._tensor = file, tensor

    def __getitem__(self, _: object) -> torch.Tensor:
        tensor = self._tensor
        name, matrix = tensor.entry.name, tensor.matrix
        values = self._file.read_values(name, matrix)
        try:
            return tensor.change.apply(values)
        except ValueError as error:
            path = self._file.header.files[tensor.entry.file].path
            raise CheckpointError(f"{path}: {name} {error}") from error


class _ConstantSlice:
    """A tensor whose values are keys, read by the slice of all of it."""

    def __init__(self, constant: NamedConstant) -> None:
        self._constant = constant

    def __getitem__(self, _: object) -> torch.Tensor:
        return torch.full(self._constant.shape, self._constant.value)


class GgufFiles:
    """Weights of layers by their names, and other tensors."""

    def __init__(self, sources: Sequence[SourceFile]) -> None:
        """Check all tensors by the headers; raises CheckpointError and UnsupportedModel."""
        for source in sources:
            check_unchanged(source)
        self._file = MappedFiles(*(source.path for source in sources))
        self._file.header.check_types()
        self.report = CodesReport(GGUF)
        self.weights: dict[str, BlocksWeight] = {}
        """The weights in codes, by the names that plain weights would have."""
        self.whole: dict[str, WholeWeight] = {}
        """The weights that are several tensors."""
        self.plain: dict[str, StoredTensor] = {}
        self._named: dict[str, NamedTensor] = {}
        self._constants: dict[str, NamedConstant] = {}
        for tensor in named_tensors(self._file.header, architecture_of(self._file)):
            if isinstance(tensor, JoinedRows) and tensor.has_codes:
                self.whole[tensor.name] = JoinedWeight(self._file, tensor, self._experts(tensor))
            elif isinstance(tensor, JoinedTensor | JoinedRows):
                self._join(tensor)
            elif isinstance(tensor, NamedConstant):
                self._constants[tensor.name] = tensor
                path = self._file.header.path
                self.plain[tensor.name] = StoredTensor(path.name, "F32", tensor.shape)
            else:
                self._add(tensor)

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Return what all tensors need if their codes stay; others are of `dtype`."""
        plain = sum(math.prod(tensor.shape) for tensor in self.plain.values())
        plain += sum(one.shape.numel() for one in self.whole.values() if not one.experts)
        parts = (part for one in self.whole.values() for own in one.experts for part in own)
        coded = chain(self.weights.values(), parts)
        codes = sum(weight.shape.numel() * weight.kind.bits // 8 for weight in coded)
        return plain * dtype.itemsize + codes

    def plain_slices(self) -> dict[str, Any]:
        """Return slices of the tensors that are not in codes."""
        constants = {name: _ConstantSlice(one) for name, one in self._constants.items()}
        return constants | {name: _PlainSlice(self._file, one) for name, one in self._named.items()}

    def _experts(self, tensor: JoinedRows) -> tuple[Parts, ...]:
        """Return the weights in codes that the rows of each expert are, or those of a matrix."""
        is_stack = len(tensor.shape) == 3
        experts = []
        for number in range(tensor.shape[0] if is_stack else 1):
            name = f"{tensor.name}.{number}" if is_stack else tensor.name
            parts: Parts = tuple(
                BlocksWeight(
                    self._file,
                    NamedTensor(f"{name}.{entry.name}", entry, number if is_stack else None),
                    code_kind(TensorType(entry.type)),
                    self.report,
                )
                for entry in tensor.entries
            )
            if tensor.order is not None:
                parts = (OrderedRows(name, parts, tensor.order),)
            experts.append(parts)
        return tuple(experts)

    def _join(self, tensor: JoinedTensor | JoinedRows) -> None:
        self.whole[tensor.name] = JoinedWeight(self._file, tensor)
        types = {entry.type for entry in tensor.entries} - PLAIN.keys()
        if types:
            kind = type_name(max(types))
            self.report.add(tensor.name, kind, "no kernel reads the codes of its parts")

    def _add(self, tensor: NamedTensor) -> None:
        name, path = tensor.name, self._file.header.files[tensor.entry.file].path
        number = tensor.entry.type
        is_matrix = len(tensor.shape) == 2 and name.endswith(".weight")
        has_codes = number not in PLAIN and is_matrix and tensor.change.values is None
        if has_codes and (number not in READ or tensor.change.transposes):
            layer, kind = name.removesuffix(".weight"), type_name(number)
            is_unread = number not in READ
            reason = "no kernel reads its codes" if is_unread else "its module has it transposed"
            self.report.add(layer, kind, reason)
            self.plain[name] = StoredTensor(path.name, "F32", tensor.shape)
            self._named[name] = tensor
            return
        type = TensorType(number) if number in READ else None
        if type is not None and type.is_plain:
            self.plain[name] = StoredTensor(path.name, type.name, tensor.shape)
            self._named[name] = tensor
            return
        if type is None or not is_matrix or tensor.change.values is not None:
            raise CheckpointError(
                f"{path}: {tensor.entry.name} is stored as {type_name(number)}, and only matrices"
                " of weights can be"
            )
        self.weights[name] = BlocksWeight(self._file, tensor, code_kind(type), self.report)

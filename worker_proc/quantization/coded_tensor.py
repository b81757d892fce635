"""A parameter of a model whose values are still codes in the checkpoint's files.

transformers' loader renames such tensors, and joins them to those of mixtures of experts, without
reading them; so does the code that takes a rank's part of them. If a module computes with one, its
values are dequantized for this operation only. So modules can be tried before their weights are
packed, and at most one dequantized weight is in memory.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any, cast

import torch

from worker_proc.quantization.selection import with_inputs, with_outputs
from worker_proc.quantization.weight import QuantizedWeight, can_join, join_outputs
from worker_proc.quantization.weight_files import CodedWeight, Parts

_aten = torch.ops.aten


class CodedTensor(torch.Tensor):
    """A matrix `[outputs, inputs]`, or those of experts, `[experts, outputs, inputs]`."""

    experts: tuple[Parts, ...]
    """The stored weights of each expert; a matrix counts as one."""

    @staticmethod
    def __new__(cls, experts: tuple[Parts, ...], dtype: torch.dtype, *, dim: int) -> "CodedTensor":
        """Take weights of equal sizes, whose values are of `dtype`; `dim` is 2 or 3."""
        num_outputs = sum(part.shape[0] for part in experts[0])
        shape = (len(experts), num_outputs, experts[0][0].shape[1])[-dim:]
        tensor: CodedTensor = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype)
        tensor.experts = experts
        return tensor

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"CodedTensor({self.experts[0][0].name}, shape={list(self.shape)})"

    def __deepcopy__(self, _: object) -> "CodedTensor":
        return self  # it is never written

    def read(self, expert: int = 0) -> QuantizedWeight | None:
        """Read the codes of one expert, or of the matrix; None: its parts cannot be joined."""
        weights = [part.read() for part in self.experts[expert]]
        return join_outputs(weights) if can_join(weights) else None

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the values of the codes, in `dtype` or in the tensor's own type."""
        dtype = dtype or self.dtype
        matrices = [[part.read().dequantize(dtype) for part in parts] for parts in self.experts]
        joined = [torch.cat(rows) if len(rows) > 1 else rows[0] for rows in matrices]
        return joined[0] if self.dim() == 2 else torch.stack(joined)

    def of_expert(self, number: int) -> "CodedTensor":
        """Return the matrix of one expert."""
        return CodedTensor((self.experts[number],), self.dtype, dim=2)

    def map_experts(self, change: Callable[[Parts], Sequence[CodedWeight]]) -> "CodedTensor":
        """Return a tensor with other stored weights for each expert, made of its present ones."""
        experts = tuple(tuple(change(parts)) for parts in self.experts)
        return CodedTensor(experts, self.dtype, dim=self.dim())

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        # In inference mode torch would refuse a new tensor as the result of a view.
        with torch.inference_mode(False):
            found = _joined(func, args)
        if found is not None:
            return found
        with torch.inference_mode(torch.is_inference_mode_enabled() and not func.is_view):
            plain = torch.utils._pytree.tree_map_only(CodedTensor, CodedTensor.dequantize, args)
            return func(*plain, **(kwargs or {}))


def _joined(func: Any, args: tuple[Any, ...]) -> CodedTensor | None:
    """Return the result of an operation that moves matrices, or outputs or inputs of each.

    None: the operation needs the values.
    """
    first = args[0]
    if func in (_aten.detach.default, _aten.alias.default, _aten.clone.default):
        return cast(CodedTensor, first).map_experts(lambda parts: parts)
    if func is _aten.select.int and first.dim() == 3 and args[1] == 0:
        return cast(CodedTensor, first).of_expert(args[2])
    if func is _aten.index_select.default:
        return _with_outputs(first, args[2]) if _is_dim(first, args[1], -2) else None
    if func is _aten.slice.Tensor:
        return _sliced(first, *args[1:])
    if func not in (_aten.stack.default, _aten.cat.default):
        return None
    dim = args[1] if len(args) > 1 else 0
    if not all(isinstance(tensor, CodedTensor) for tensor in first):
        return None
    if func is _aten.stack.default and dim == 0 and first[0].dim() == 2:
        return CodedTensor(_flat([tensor.experts for tensor in first]), first[0].dtype, dim=3)
    if func is _aten.cat.default and dim == first[0].dim() - 2:
        experts = tuple(map(_flat, zip(*(tensor.experts for tensor in first), strict=True)))
        return CodedTensor(experts, first[0].dtype, dim=first[0].dim())
    return None


def _is_dim(tensor: torch.Tensor, dim: int, wanted: int) -> bool:
    return dim % tensor.dim() == wanted % tensor.dim()


def _sliced(
    tensor: CodedTensor, dim: int, start: int | None, end: int | None, step: int = 1
) -> CodedTensor | None:
    kept = range(tensor.shape[dim])[start:end:step]
    if len(kept) == tensor.shape[dim]:
        return tensor.map_experts(lambda parts: parts)
    if _is_dim(tensor, dim, -2):
        return _with_outputs(tensor, torch.tensor(kept))
    if _is_dim(tensor, dim, -1) and step == 1:
        return tensor.map_experts(lambda parts: [with_inputs(part, kept) for part in parts])
    return None


def _with_outputs(tensor: CodedTensor, outputs: torch.Tensor) -> CodedTensor | None:
    """Return some outputs; None: they change the order of the parts."""
    ends = list(accumulate(part.shape[0] for part in tensor.experts[0]))
    of_part = torch.bucketize(outputs, torch.tensor(ends), right=True)
    if not torch.equal(of_part, of_part.sort().values):
        return None
    chosen = [
        (number, outputs[of_part == number] - first)
        for number, first in enumerate([0, *ends[:-1]])
        if bool((of_part == number).any())
    ]
    return tensor.map_experts(lambda parts: [with_outputs(parts[n], own) for n, own in chosen])


def _flat(nested: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
    return tuple(item for inner in nested for item in inner)


class CodedSlice:
    """A weight in the form of a file's slice, which the loader takes without reading the codes."""

    def __init__(self, experts: tuple[Parts, ...], dtype: torch.dtype, *, dim: int) -> None:
        """Take the arguments of `CodedTensor`."""
        self._experts, self._dtype, self._dim = experts, dtype, dim

    def __getitem__(self, _: object) -> torch.Tensor:
        return CodedTensor(self._experts, self._dtype, dim=self._dim)

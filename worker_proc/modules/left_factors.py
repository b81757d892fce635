"""Packs weights that a module's own code multiplies, without calling a linear layer.

Examples are the time steps of Mamba-1, `dt_proj.weight @ time_step.transpose(1, 2)`, and the gates
of RecurrentGemma, `torch.baddbmm(bias, rows, weight)`. These weights are found by observation. They
are packed, so that a token's bits do not depend on the other rows.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from worker_proc.modules.packed_linear import PackedLinear, make_linear
from worker_proc.native.kernels import NativeLibrary

_PRODUCTS = frozenset(
    (
        *("matmul", "__matmul__", "mm", "bmm", "addmm", "addbmm", "baddbmm", "linear", "bilinear"),
        *("mv", "dot", "vdot", "inner", "tensordot", "einsum", "conv1d"),
    )
)
_LEFT_PRODUCTS = frozenset(("matmul", "__matmul__"))


class ObservedProducts(TorchFunctionMode):
    """Records the weights of a module that take part in products within the context."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.left: set[str] = set()
        """Names of weights that are left operands."""
        self.right: set[str] = set()
        """Names of per-head weights that rows are multiplied by, in `baddbmm`."""
        self.added: set[str] = set()
        """Names of the biases added to those products."""
        self.others: set[str] = set()
        """Names of the module's own weights in all other products."""
        self._parameters = {
            parameter.untyped_storage()._cdata: (name, parameter)
            for name, parameter in module.named_parameters()
            if parameter.dim() > 1
        }
        self._own = {name for name, _ in module.named_parameters(recurse=False)}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kind = getattr(func, "__name__", "")
        if kind in _PRODUCTS:
            factors = (*args, *(kwargs or {}).values())
            for place, factor in enumerate(factors):
                found = self._parameter_of(factor)
                if found is None:
                    continue
                name, is_whole = found
                if is_whole and place == 0 and kind in _LEFT_PRODUCTS:
                    self.left.add(name)
                elif is_whole and place == 2 and kind == "baddbmm":
                    self.right.add(name)
                elif is_whole and place == 0 and kind == "baddbmm":
                    self.added.add(name)
                elif name in self._own:
                    self.others.add(name)
        return func(*args, **(kwargs or {}))

    def _parameter_of(self, factor: object) -> tuple[str, bool] | None:
        """Return the name of the parameter that a factor views, and whether it is all of it."""
        if not isinstance(factor, torch.Tensor):
            return None
        found = self._parameters.get(factor.untyped_storage()._cdata)
        if found is None:
            return None
        name, parameter = found
        return name, _layout(factor) == _layout(parameter)


def _layout(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Return the sizes and strides of a tensor, without dimensions of size 1."""
    dims = zip(tensor.shape, tensor.stride(), strict=True)
    return [(size, stride) for size, stride in dims if size != 1]


class LeftFactor:
    """Replaces weights `[..., out_features, in_features]` in a module.

    It supports indexing by full slices and None, and multiplication of `[..., in_features, T]` from
    the left.
    """

    def __init__(self, layers: list[PackedLinear], leading: tuple[int, ...]) -> None:
        """Take a layer for each matrix; `leading` are the dimensions before a matrix's two."""
        self._layers = layers
        self._leading = leading

    def __getitem__(self, index: Any) -> "LeftFactor":
        """Return the same weights with additional leading dimensions of 1."""
        parts = index if isinstance(index, tuple) else (index,)
        left, leading = list(self._leading), []
        for part in parts:
            if part is None:
                leading.append(1)
            elif isinstance(part, slice) and part == slice(None) and left:
                leading.append(left.pop(0))
            else:
                raise TypeError(f"a packed weight is not indexed by {part}")
        return LeftFactor(self._layers, (*leading, *left))

    def __matmul__(self, columns: torch.Tensor) -> torch.Tensor:
        """Return `[..., out_features, T]`, whose columns are contiguous."""
        rows = columns.transpose(-1, -2)
        if not self._leading:
            out: torch.Tensor = self._layers[0](rows)
            return out.transpose(-1, -2)
        if len(self._leading) + 2 != rows.dim() or self._leading[0] != len(rows):
            raise TypeError(f"packed weights {self._leading} and columns {tuple(columns.shape)}")
        found = [layer(each) for layer, each in zip(self._layers, rows, strict=True)]
        return torch.stack(found).transpose(-1, -2)


class RightFactor:
    """Replaces weights `[num_heads, in_features, out_features]` in a module.

    It can only be the last argument of `torch.baddbmm`; every other operation raises TypeError.
    """

    def __init__(self, layers: list[PackedLinear]) -> None:
        self._layers = layers

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> torch.Tensor:
        if func is not torch.baddbmm or kwargs or not isinstance(args[2], RightFactor):
            raise TypeError(f"a packed weight has no {getattr(func, '__name__', func)}")
        added, rows, factor = args
        found = [layer(each) for layer, each in zip(factor._layers, rows, strict=True)]
        out: torch.Tensor = added + torch.stack(found)
        return out


class LeftLayer(nn.Module):
    """Replaces a linear layer of which a module uses only the weight and the bias."""

    def __init__(self, weight: LeftFactor, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias


def pack_left_factors(
    module: nn.Module, names: Iterable[str], library: NativeLibrary | None
) -> None:
    """Replace the weights with these names, which are left operands, by packed ones."""
    for name in names:
        path, _, leaf = name.rpartition(".")
        holder = module.get_submodule(path)
        factor = _packed(holder.get_parameter(leaf), library)
        if type(holder) is nn.Linear:
            parent, _, child = path.rpartition(".")
            setattr(module.get_submodule(parent), child, LeftLayer(factor, holder.bias))
        else:
            del holder._parameters[leaf]
            holder.__dict__[leaf] = factor


def _packed(weight: torch.Tensor, library: NativeLibrary | None) -> LeftFactor:
    """Pack a weight of two or three dimensions."""
    matrices = [weight] if weight.dim() == 2 else list(weight)
    return LeftFactor(
        [make_linear(matrix, None, library) for matrix in matrices], tuple(weight.shape[:-2])
    )


def pack_right_factors(
    module: nn.Module,
    names: Iterable[str],
    added: Iterable[str],
    library: NativeLibrary | None,
) -> None:
    """Replace the per-head weights with these names by packed ones.

    `added` are the names of the biases added to the products; they become plain attributes, so that
    they do not count as matrices.
    """
    for name in names:
        holder, leaf = _place(module, name)
        weight = holder.get_parameter(leaf)
        layers = [make_linear(matrix.t().contiguous(), None, library) for matrix in weight]
        del holder._parameters[leaf]
        holder.__dict__[leaf] = RightFactor(layers)
    for name in added:
        holder, leaf = _place(module, name)
        bias = holder.get_parameter(leaf).detach()
        del holder._parameters[leaf]
        holder.__dict__[leaf] = bias


def _place(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return module.get_submodule(path), leaf

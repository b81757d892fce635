"""The table of an embedding in codes: a row is dequantized when its token is looked up.

It takes the place of a module's weight, so that the module, and what it does to rows, stays
transformers' own. Rows have the values that the whole table would have if it were dequantized.
"""

from collections.abc import Iterable
from typing import Any

import torch

from worker_proc.native.instructions import embedding
from worker_proc.native.kernels import NativeLibrary
from worker_proc.native.packed_weights import GROUPED, PackedWeight

_aten = torch.ops.aten


def can_look_up(packed: PackedWeight) -> bool:
    """Return whether rows of a weight's outputs can be read."""
    return packed.format in GROUPED and packed.order is None


class PackedTable(torch.Tensor):
    """A matrix `[tokens, values]` of which rows can be looked up, and nothing else be done."""

    packed: PackedWeight
    """Whose outputs the rows are. An output layer may compute with the same one."""
    _library: NativeLibrary

    @staticmethod
    def __new__(
        cls, library: NativeLibrary, packed: PackedWeight, shape: torch.Size, dtype: torch.dtype
    ) -> "PackedTable":
        table: PackedTable = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype)
        table.packed, table._library = packed, library
        return table

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"PackedTable(shape={list(self.shape)}, format={self.packed.format.name})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        table = args[0]
        if func in (_aten.detach.default, _aten.alias.default):
            with torch.inference_mode(False):  # in which it could not stand for a parameter
                return PackedTable(table._library, table.packed, table.shape, table.dtype)
        if func is not _aten.embedding.default:
            raise NotImplementedError(f"{func} of a table in codes")
        tokens = args[1]
        instruction = embedding(table.packed, len(table))
        rows = table._library.look_up(instruction, tokens.flatten().long(), table.dtype)
        return rows.view(*tokens.shape, -1)

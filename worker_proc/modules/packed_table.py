"""An embedding table in codes: a row is dequantized when its token is looked up.

The table replaces a module's weight, so that the module and its further computation stay
transformers' own. Rows have the values that they would have if the whole table were dequantized.
"""

from collections.abc import Iterable
from typing import Any

import torch

from worker_proc.native.instructions import embedding
from worker_proc.native.kernels import NativeLibrary
from worker_proc.native.packed_weights import GROUPED, PackedWeight

_aten = torch.ops.aten


def can_look_up(packed: PackedWeight) -> bool:
    """Return whether rows can be looked up in a packed weight."""
    return packed.format in GROUPED and packed.order is None


class PackedTable(torch.Tensor):
    """A matrix `[tokens, values]` that only supports looking up rows."""

    packed: PackedWeight
    """The weight whose outputs are the rows. An output layer may compute with the same weight."""
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
            with torch.inference_mode(False):  # inference tensors cannot become parameters
                return PackedTable(table._library, table.packed, table.shape, table.dtype)
        if func is not _aten.embedding.default:
            raise NotImplementedError(f"{func} of a table in codes")
        tokens = args[1]
        instruction = embedding(table.packed, len(table))
        rows = table._library.look_up(instruction, tokens.flatten().long(), table.dtype)
        return rows.view(*tokens.shape, -1)

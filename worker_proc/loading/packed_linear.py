"""Linear layers over packed weights: the fast path of the CPU.

A row has the same bits beside any other rows. In bfloat16 on a CPU with AMX the own kernel of
linear.cpp computes them, because oneDNN sums in another order there for many rows. Elsewhere oneDNN
computes them, two to four times as fast as `torch.nn.functional.linear` for few rows, with two
exceptions that are worked around: a single row runs as two, and very wide outputs in bfloat16 run
in slices of rows.
"""

from collections.abc import Callable
from typing import cast

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from worker_proc.native.kernels import NativeLibrary

PACKED_DTYPES = (torch.float32, torch.bfloat16)
WIDE_OUT_FEATURES = 16_384
SLICE_ROWS = 32
PACKING_ROWS = 64  # for which oneDNN chooses the layout; it serves every other number


class PackedLinear(nn.Module):
    """Replaces `nn.Linear` (or GPT-2's transposed `Conv1D`) for inference on the CPU."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, library: NativeLibrary | None
    ) -> None:
        """Pack `weight`, `[out_features, in_features]`."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        # Models read the dtype of their weights, and do not compute with them.
        self.weight = weight.new_empty(weight.shape, device="meta")
        self.bias = None if bias is None else bias.detach()
        self._library = _library_for(weight.dtype, library)
        if self._library is not None:
            self._packed = self._library.pack_weight(weight.detach())
            self.bias = None if self.bias is None else self.bias.float()
        else:
            weight = weight.detach().contiguous()
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACKING_ROWS)
        is_wide = self.out_features >= WIDE_OUT_FEATURES
        self._slice_rows = SLICE_ROWS if is_wide and weight.dtype == torch.bfloat16 else 0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return `hidden @ weight.T + bias` for `[..., in_features]`."""
        rows = hidden.reshape(-1, self.in_features)
        if self._library is not None:
            out = self._library.linear(rows, self._packed, self.bias, self.out_features)
        elif len(rows) == 1:
            out = self._linear(rows.expand(2, -1).contiguous())[:1]
        elif self._slice_rows and len(rows) > self._slice_rows:
            out = self._sliced(rows)
        else:
            out = self._linear(rows)
        return out.view(*hidden.shape[:-1], self.out_features)

    def _linear(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            rows, self._packed, self.bias, "none", [], ""
        )
        return out

    def _sliced(self, rows: torch.Tensor) -> torch.Tensor:
        out = rows.new_empty(len(rows), self.out_features)
        first = 0
        while first < len(rows):
            # A last slice of one row would be computed in another way.
            first = min(first, len(rows) - 2)
            part = slice(first, first + self._slice_rows)
            out[part] = self._linear(rows[part])
            first += self._slice_rows
        return out


def _library_for(dtype: torch.dtype, library: NativeLibrary | None) -> NativeLibrary | None:
    """Return the library if its kernel computes layers of this dtype on this CPU."""
    can_use = library is not None and library.has_tiles and dtype == torch.bfloat16
    return library if can_use else None


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether weights of `dtype` on `device` can be packed in this build of torch."""
    return (
        device.type == "cpu"
        and dtype in PACKED_DTYPES
        and torch.backends.mkldnn.is_available()
        and (dtype != torch.bfloat16 or torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def pack_linears(
    model: nn.Module, library: NativeLibrary | None, on_packed: Callable[[int, int], None]
) -> int:
    """Replace every linear layer, freeing its weights; calls `on_packed(done, total)` for each."""
    found = [
        (parent, name, cast(nn.Linear, child))
        for parent in list(model.modules())
        for name, child in parent.named_children()
        if type(child) in (nn.Linear, Conv1D) and not child.weight.is_meta  # it is not used
    ]
    packed: dict[nn.Module, PackedLinear] = {}
    for done, (parent, name, child) in enumerate(found, start=1):
        if child not in packed:
            weight = child.weight.t() if type(child) is Conv1D else child.weight
            packed[child] = PackedLinear(weight, child.bias, library)
            del child.weight  # freed now, unless the embedding shares it
        setattr(parent, name, packed[child])
        on_packed(done, len(found))
    return len(packed)

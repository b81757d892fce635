"""The memory of a program, with a row in each buffer for each token of a step."""

import ctypes
from collections.abc import Sequence

import torch

from worker_proc.decoder.layers import DecoderLayer
from worker_proc.modules.experts.mixture import FusedExperts
from worker_proc.modules.mlp import FusedMLP
from worker_proc.native import huge_pages
from worker_proc.native.instructions import coded_stride, row_stride
from worker_proc.native.packed_weights import PANEL_OUTPUTS, Format
from worker_proc.native.structures import BufferArgs

HIDDEN, NORMED, QKV, ATTENDED, INNER, PROJECTED, SPLIT = range(7)
"""SPLIT has gates and factors next to each other, for adapters that add to them."""
LOGITS, CHOICES, GATHERED, EXPERT_INNER = range(7, 11)
"""Buffers of mixtures of experts: GATHERED and EXPERT_INNER have a row for each expert of each
token."""
CODES, EXPERT_CODES = 11, 12
"""Coded input rows, for weights that need them. EXPERT_CODES has a row for each expert of each
token."""
PERMUTED = 13
"""Input rows in the order that a projection's weight requires."""
OUTPUT = 14
"""Logits, in a program that ends with them."""
_ROW_BYTES = 64


class Buffers:
    """The buffers of a program, except OUTPUT, whose rows each step provides."""

    def __init__(
        self, layers: Sequence[DecoderLayer], dtype: torch.dtype, *, splits: bool = False
    ) -> None:
        """`layers` are those of the program; `splits`: it uses SPLIT."""
        self._dtype = dtype
        widths = _widths(layers, splits=splits)
        mixtures = [layer.mlp for layer in layers if isinstance(layer.mlp, FusedExperts)]
        num_chosen = max((mixture.routing.num_chosen for mixture in mixtures), default=0)
        self._strides = [row_stride(widths[i], dtype.itemsize) for i in range(len(widths))]
        self._strides.append(max(map(_codes_stride, layers)))
        self._strides.append(max(map(_expert_codes_stride, layers)))
        self._strides.append(row_stride(max(map(_permuted_width, layers)), dtype.itemsize))
        self._rows_of_token = [1] * GATHERED + [num_chosen] * 2 + [1, num_chosen, 1]
        self._max_rows = 0
        self._hidden = torch.empty(0, 0, dtype=dtype)
        """The rows of HIDDEN, in the memory of all buffers."""
        self._args = (BufferArgs * (OUTPUT + 1))()

    @property
    def address(self) -> int:
        """The address of all buffers, as used in RunArgs."""
        return ctypes.addressof(self._args)

    def reserve(self, num_rows: int) -> torch.Tensor:
        """Make room for `num_rows` rows; return the hidden states' rows, including their padding.

        Other rows are zero after their values, and stay so: the buffers move only when they grow.
        """
        if num_rows > self._max_rows:
            self._max_rows = num_rows + num_rows // 4
            sizes = [
                self._max_rows * num_rows * stride
                for num_rows, stride in zip(self._rows_of_token, self._strides, strict=True)
            ]
            memory = huge_pages.empty(sum(sizes) + _ROW_BYTES, torch.uint8)
            memory.zero_()
            start = -memory.data_ptr() % _ROW_BYTES
            hidden = memory[start : start + sizes[HIDDEN]].view(self._dtype)
            self._hidden = hidden.view(-1, self._strides[HIDDEN] // self._dtype.itemsize)
            for index, (size, stride) in enumerate(zip(sizes, self._strides, strict=True)):
                self._args[index] = BufferArgs(memory.data_ptr() + start, stride)
                start += size
        return self._hidden[:num_rows]

    def write_to(self, output: torch.Tensor) -> None:
        """Point OUTPUT to the rows of a tensor, which must exist during the step."""
        self._args[OUTPUT] = BufferArgs(output.data_ptr(), output.stride(0) * output.itemsize)


def _widths(layers: Sequence[DecoderLayer], *, splits: bool) -> dict[int, int]:
    """Return the row width of each buffer that holds values."""
    hidden_size = layers[0].hidden_size
    mixtures = [layer.mlp for layer in layers if isinstance(layer.mlp, FusedExperts)]
    mlps = [layer.mlp for layer in layers if isinstance(layer.mlp, FusedMLP)]
    return {
        HIDDEN: hidden_size,
        NORMED: hidden_size,
        QKV: max(sum(part.num_outputs for part in layer.qkv) for layer in layers),
        ATTENDED: max(layer.out.num_inputs for layer in layers),
        INNER: max((mlp.size for mlp in mlps), default=0),
        PROJECTED: hidden_size,
        SPLIT: max(map(_split_width, mlps)) if splits else 0,
        LOGITS: max((mixture.num_experts for mixture in mixtures), default=0),
        CHOICES: max((mixture.choice_width for mixture in mixtures), default=0),
        GATHERED: hidden_size if mixtures else 0,
        EXPERT_INNER: max((mixture.size for mixture in mixtures), default=0),
    }


def first_factor(mlp: FusedMLP) -> int:
    """Return the column of the first factor behind the gates, which begins with a whole panel."""
    return -(-mlp.size // PANEL_OUTPUTS) * PANEL_OUTPUTS


def _split_width(mlp: FusedMLP) -> int:
    """Return the width of gates and factors, each of which begins with a whole panel."""
    return 2 * first_factor(mlp)


def _codes_stride(layer: DecoderLayer) -> int:
    """Return the stride in bytes of the coded rows that a layer's projections take."""
    weights = (*layer.qkv, layer.out, layer.mlp.gate_up, layer.down)
    coded = [w for w in weights if w is not None and w.format is Format.INT8_FOR_CODES]
    return coded_stride(max((weight.num_inputs for weight in coded), default=0))


def _expert_codes_stride(layer: DecoderLayer) -> int:
    """Return the stride in bytes of the coded rows that a layer's experts take."""
    return (
        layer.mlp.products.codes_stride if isinstance(layer.mlp, FusedExperts) else coded_stride(0)
    )


def _permuted_width(layer: DecoderLayer) -> int:
    """Return the longest row that a layer's projections take in their own order."""
    weights = (*layer.qkv, layer.out, layer.mlp.gate_up, layer.down)
    orders = [weight.order for weight in weights if weight is not None]
    return max((len(order) for order in orders if order is not None), default=0)

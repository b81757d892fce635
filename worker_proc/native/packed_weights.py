"""Weights in the layouts that the compiled kernels read.

The outputs of a weight lie in pairs of panels, of 16 outputs each (products/weights.h).
"""

import enum
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

PANEL_OUTPUTS = 32
"""Of a pair of panels, in which weights are packed."""
UNIT_STEP = 16
"""The units of a weight are a multiple of it."""


class Format(enum.IntEnum):
    """Formats of packed weights, by their numbers in products/weights.h."""

    UNITS = 0
    INT8 = 1
    INT4 = 2
    INT8_FOR_CODES = 3
    """The codes of INT8, for rows that are codes, too."""
    COMPACT = 4
    """Values of bfloat16 in 12 bits each, without loss (products/compact_weights.h)."""
    GROUPED_INT4 = 5
    """Whole numbers of a quantized checkpoint, as products/grouped_codes.h reads them."""
    GROUPED_INT8 = 6
    GROUPED_E4M3 = 7
    GROUPED_TABLE = 8
    """Places in a table of 16 numbers."""


class _Codes(NamedTuple):
    """How products/weights.h packs codes."""

    per_byte: int
    per_unit: int
    group_inputs: int | None  # None: an output has one scale
    scale_dtype: torch.dtype


CODES = {
    Format.INT8: _Codes(1, 2, None, torch.float32),
    Format.INT4: _Codes(2, 2, 128, torch.bfloat16),
    Format.INT8_FOR_CODES: _Codes(1, 4, None, torch.float32),
}
GROUPED = (
    Format.GROUPED_INT4,
    Format.GROUPED_INT8,
    Format.GROUPED_E4M3,
    Format.GROUPED_TABLE,
)
"""Formats of products/grouped_codes.h, for rows of either type."""
MAX_CODED_INPUTS = (2**31 - 1) // 127**2
"""Of a weight for rows of codes: with more, a sum of products could exceed 32 bits."""


class Grouping(NamedTuple):
    """What the groups of inputs of a weight in grouped codes have in common, in their order."""

    zeros: torch.Tensor | None
    """uint8, in the order of the scales; None: all are `zero`."""
    zero: int
    num_inputs: int
    """Of a group: 16, or a multiple of 32."""
    order: torch.Tensor | None = None
    """int32, `[num_inputs]`: the input that stands at each place of the packed weight."""
    minimums: torch.Tensor | None = None
    """What is added to products, instead of zero points; of the type of the scales."""
    scale_units: torch.Tensor | None = None
    """float16, by sections: scales in int8 are multiples of these."""
    minimum_units: torch.Tensor | None = None
    section_inputs: int = 0
    """Of a section, a multiple of those of a group."""
    table: torch.Tensor | None = None
    """float32, `[16]`: what the codes of GROUPED_TABLE stand for."""

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors in the order of the panels, by their names."""
        names = ("zeros", "minimums", "scale_units", "minimum_units")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def with_tensors(self, tensors: Mapping[str, Any]) -> "Grouping":
        """Return the same with other tensors, by their names."""
        return self._replace(**tensors)


SCALE_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}
"""Types of the scales of grouped codes, by their numbers in products/grouped_codes.h."""


class PackedWeight(NamedTuple):
    """A weight in a layout of products/weights.h or products/grouped_codes.h, with its bias."""

    panels: torch.Tensor
    scales: torch.Tensor | None  # of codes; or what COMPACT has beside them
    bias: torch.Tensor | None  # float32, in the order of the panels
    num_inputs: int
    num_units: int
    num_pairs: int
    format: Format
    grouping: Grouping | None = None
    """Of grouped codes."""

    @property
    def num_outputs(self) -> int:
        """The outputs, those that only fill the last panels included."""
        return self.num_pairs * PANEL_OUTPUTS

    @property
    def order(self) -> torch.Tensor | None:
        """The order in which the weight takes its inputs, where it is not their own."""
        return None if self.grouping is None else self.grouping.order

    def outputs(self, first: int, count: int) -> "PackedWeight":
        """Return a part of the outputs, which shares the memory; both are multiples of 32."""
        first_pair, num_pairs = first // PANEL_OUTPUTS, -(-count // PANEL_OUTPUTS)

        def part(whole: torch.Tensor) -> torch.Tensor:
            pairs = whole.view(self.num_pairs, -1)
            return pairs[first_pair : first_pair + num_pairs].view(-1)

        grouping = self.grouping
        if grouping is not None:
            parts = {name: part(whole) for name, whole in grouping.tensors.items()}
            grouping = grouping.with_tensors(parts)
        return self._replace(
            grouping=grouping,
            panels=part(self.panels),
            scales=None if self.scales is None else part(self.scales),
            bias=None if self.bias is None else part(self.bias),
            num_pairs=num_pairs,
        )


def round_up(size: int, part: int) -> int:
    """Return the next multiple of `part`."""
    return -(-size // part) * part


def by_panels(values: torch.Tensor, *, gates: bool = False) -> torch.Tensor:
    """Return `[pairs, 2 panels, 16 outputs, ...]` of `[num_outputs, ...]`, filled up with zeros.

    With `gates`, half of the outputs are gates and half factors, and the panels alternate.
    """
    halves = 2 if gates else 1
    step = PANEL_OUTPUTS // halves
    columns = len(values) // halves
    num_pairs = -(-columns // step)
    if num_pairs * step > columns:
        filled = values.new_zeros(halves, num_pairs * step, *values.shape[1:])
        filled[:, :columns] = values.unflatten(0, (halves, columns))
        values = filled.flatten(0, 1)
    if gates:
        return values.view(2, num_pairs, step, *values.shape[1:]).transpose(0, 1)
    return values.view(num_pairs, 2, PANEL_OUTPUTS // 2, *values.shape[1:])


def packed_bias(bias: torch.Tensor, *, gates: bool = False) -> torch.Tensor:
    """Return a bias in float32 and in the order of the panels."""
    return by_panels(bias.detach().float(), gates=gates).reshape(-1)

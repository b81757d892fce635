"""Weights in the layouts that the compiled kernels read.

The outputs of a weight are packed in pairs of panels of 16 outputs each (products/weights.h).
"""

import enum
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

PANEL_OUTPUTS = 32
"""Number of outputs of a pair of panels."""
UNIT_STEP = 16
"""The number of units of a packed weight is a multiple of this."""


class Format(enum.IntEnum):
    """Formats of packed weights, by their numbers in products/weights.h."""

    UNITS = 0
    INT8 = 1
    INT4 = 2
    INT8_FOR_CODES = 3
    """The codes of INT8 in a layout for rows of int8 codes."""
    COMPACT = 4
    """bfloat16 weights, compressed to 12 bits without loss (products/compact_weights.h)."""
    GROUPED_INT4 = 5
    """Integer codes of a quantized checkpoint (products/grouped_codes.h)."""
    GROUPED_INT8 = 6
    GROUPED_E4M3 = 7
    GROUPED_TABLE = 8
    """Indices into a lookup table of 16 numbers."""


class _Codes(NamedTuple):
    """How products/int8_panels.h and products/int4_panels.h pack codes."""

    per_byte: int
    per_unit: int
    group_inputs: int | None  # None: one scale for each output
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
"""Formats of products/grouped_codes.h, for rows of float32 or bfloat16."""
MAX_CODED_INPUTS = (2**31 - 1) // 127**2
"""Maximum number of inputs of a weight for rows of codes, whose sums must fit into 32 bits."""


class Grouping(NamedTuple):
    """The parameters of a quantized weight besides its scales, in the layout of the scales."""

    zeros: torch.Tensor | None
    """Zero points, uint8, in the layout of the scales; None: all are `zero`."""
    zero: int
    num_inputs: int
    """Number of inputs of a group: 16, or a multiple of 32."""
    order: torch.Tensor | None = None
    """int32, `[num_inputs]`: the input at each index of the packed weight."""
    minimums: torch.Tensor | None = None
    """Numbers added after the scaling instead of zero points, of the type of the scales."""
    scale_units: torch.Tensor | None = None
    """float16, by section: int8 scales are multiples of these."""
    minimum_units: torch.Tensor | None = None
    section_inputs: int = 0
    """Number of inputs of a section, a multiple of that of a group."""
    table: torch.Tensor | None = None
    """float32, `[16]`: the lookup table of GROUPED_TABLE."""

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors in the layout of the scales, by name."""
        names = ("zeros", "minimums", "scale_units", "minimum_units")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def with_tensors(self, tensors: Mapping[str, Any]) -> "Grouping":
        """Return a copy in which `tensors` replace those of the same names."""
        return self._replace(**tensors)


SCALE_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}
"""Types of the scales of grouped codes, by their numbers in products/grouped_codes.h."""


class PackedWeight(NamedTuple):
    """A weight in a layout of worker_proc/native/products, with its bias."""

    panels: torch.Tensor
    scales: torch.Tensor | None  # of codes; for COMPACT, tables and exceptions
    bias: torch.Tensor | None  # float32, in the order of the panels
    num_inputs: int
    num_units: int
    num_pairs: int
    format: Format
    grouping: Grouping | None = None
    """The parameters of a quantized weight."""

    @property
    def num_outputs(self) -> int:
        """The number of outputs, including the padding of the last pair."""
        return self.num_pairs * PANEL_OUTPUTS

    @property
    def order(self) -> torch.Tensor | None:
        """The order in which the weight takes its inputs, if they are permuted."""
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
    """Return the least multiple of `part` that is not below `size`."""
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
    """Return a bias in float32 and in the order of the packed outputs."""
    return by_panels(bias.detach().float(), gates=gates).reshape(-1)

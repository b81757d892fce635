"""A weight as codes with scales: the result of reading every format of quantized checkpoints."""

import enum
from collections.abc import Sequence
from typing import NamedTuple

import torch


class CodeKind(enum.Enum):
    """The meaning of a code, before its value is multiplied by a scale."""

    INT4 = "int4"
    """A whole number from 0 to 15, less the zero point."""
    INT8 = "int8"
    """A whole number from 0 to 255, less the zero point."""
    FP8 = "fp8"
    """The bits of a number in e4m3."""
    NF4 = "nf4"
    """An index into a table of 16 values, the quantiles of a normal distribution."""
    FP4 = "fp4"
    """An index into a table of 16 values, floating-point numbers of 4 bits."""

    @property
    def bits(self) -> int:
        """The number of bits of a code."""
        return 8 if self in (CodeKind.INT8, CodeKind.FP8) else 4


class Multiples(NamedTuple):
    """Numbers of groups as whole numbers: a number is `codes` · `units`, exact in float32."""

    codes: torch.Tensor
    """int8, `[num_outputs, num_groups]`."""
    units: torch.Tensor
    """float16, `[num_outputs, num_sections]`; consecutive groups make a section."""

    def values(self) -> torch.Tensor:
        """Return the numbers in float32, `[num_outputs, num_groups]`."""
        num_rows, num_sections = self.units.shape
        sections = self.codes.float().view(num_rows, num_sections, -1)
        return sections.mul_(self.units.float().unsqueeze(2)).flatten(1)


class QuantizedWeight(NamedTuple):
    """The weight of a linear layer, as codes.

    It is (code - zero) · scale, code · scale + minimum, e4m3 · scale, or entry of a table · scale.

    A group of consecutive inputs shares scale, zero point and minimum. Products are exact in
    float32 for scales in bfloat16 or float16, and for multiples of those; otherwise they are
    rounded once. The sum with a minimum is rounded once.
    """

    kind: CodeKind
    codes: torch.Tensor
    """uint8, `[num_outputs, num_inputs]`."""
    scales: torch.Tensor
    """float32, `[num_outputs, num_groups]`."""
    zeros: torch.Tensor
    """float32, `[num_outputs, num_groups]`; 0 for FP8."""
    group_size: int
    """The number of inputs of a group; the last group may have fewer."""
    order: torch.Tensor | None = None
    """int64, `[num_inputs]`: the group of each input; None: groups are consecutive inputs."""
    minimums: torch.Tensor | None = None
    """float32, `[num_outputs, num_groups]`; with minimums, zero points are 0."""
    scale_multiples: Multiples | None = None
    """The scales as they are stored, if they are multiples."""
    minimum_multiples: Multiples | None = None
    """The minimums as they are stored, if they are multiples."""
    table: torch.Tensor | None = None
    """float32, `[16]`: the values of codes that are indices."""

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight, `[num_outputs, num_inputs]`, rounded to `dtype`."""
        if self.kind is CodeKind.FP8:
            values = self.codes.view(torch.float8_e4m3fn).float()
        elif self.table is not None:
            values = self.table[self.codes.int()]
        else:
            values = self.codes.float().sub_(self._by_input(self.zeros))
        values.mul_(self._by_input(self.scales))
        if self.minimums is not None:
            values.add_(self._by_input(self.minimums))
        return values.to(dtype)

    def _by_input(self, of_groups: torch.Tensor) -> torch.Tensor:
        """Return `[num_outputs, num_inputs]`, or one column if all inputs are one group."""
        if self.order is not None:
            return of_groups[:, self.order]
        if of_groups.shape[1] == 1:
            return of_groups
        return of_groups.repeat_interleave(self.group_size, 1)[:, : self.codes.shape[1]]


def can_join(weights: Sequence[QuantizedWeight]) -> bool:
    """Return whether weights have equal kinds and groups of inputs."""
    first = weights[0]
    return all(
        weight.kind is first.kind
        and weight.group_size == first.group_size
        and weight.codes.shape[1] == first.codes.shape[1]
        and _are_equal(weight.order, first.order)
        and (weight.minimums is None) == (first.minimums is None)
        and (weight.scale_multiples is None) == (first.scale_multiples is None)
        and _are_equal(weight.table, first.table)
        for weight in weights[1:]
    )


def _are_equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


def join_outputs(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Return one weight with the outputs of several, which can be joined."""
    first = weights[0]
    if len(weights) == 1:
        return first
    return first._replace(
        codes=torch.cat([weight.codes for weight in weights]),
        scales=torch.cat([weight.scales for weight in weights]),
        zeros=torch.cat([weight.zeros for weight in weights]),
        minimums=_join([weight.minimums for weight in weights]),
        scale_multiples=_join_multiples([weight.scale_multiples for weight in weights]),
        minimum_multiples=_join_multiples([weight.minimum_multiples for weight in weights]),
    )


def _join(parts: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    present = [part for part in parts if part is not None]
    return torch.cat(present) if present else None


def _join_multiples(parts: Sequence[Multiples | None]) -> Multiples | None:
    present = [part for part in parts if part is not None]
    if not present:
        return None
    return Multiples(*(torch.cat(tensors) for tensors in zip(*present, strict=True)))


def unpack_int32(packed: torch.Tensor, num_bits: int) -> torch.Tensor:
    """Return the codes of `[rows, words]` as uint8, `[rows, words * 32 / num_bits]`.

    A word has its first code in its lowest bits. Codes have 4 or 8 bits.
    """
    octets = packed.contiguous().view(torch.uint8)
    if num_bits == 8:
        return octets
    return torch.stack((octets & 15, octets >> 4), dim=-1).flatten(1)

"""Packs weights in the layouts that the compiled kernels read."""

import ctypes
from typing import Protocol

import torch

from worker_proc.native import huge_pages
from worker_proc.native.packed_weights import (
    CODES,
    GROUPED,
    PANEL_OUTPUTS,
    UNIT_STEP,
    Format,
    PackedWeight,
    packed_bias,
    round_up,
)

_INT, _LONG = ctypes.c_int32, ctypes.c_int64
_GATES = 16
"""Number of gates in a pair of panels, beside as many factors."""
_UNIT_BYTES = 4


class Matrices(Protocol):
    """The weights of several experts; a tensor `[num_experts, num_outputs, num_inputs]` is one."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> torch.Tensor: ...


class WeightPacker:
    """Packs and rounds weights by functions of the compiled library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """`library` has the argument types that kernels.py gives its functions."""
        self._library = library

    def pack(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        format: Format = Format.UNITS,
        *,
        gates: bool = False,
    ) -> PackedWeight:
        """Pack `[num_outputs, num_inputs]`; with `gates` half of the outputs are gates.

        Codes need weights in bfloat16, and stand for what `round` makes of them. What cannot be
        COMPACT becomes UNITS: exponents may differ too much, and some processors gain nothing.
        """
        assert format not in GROUPED  # their codes are read from checkpoints
        assert format is Format.UNITS or weight.dtype == torch.bfloat16
        weight = weight.contiguous()
        num_outputs, num_inputs = weight.shape
        per_unit = CODES[format].per_unit if format in CODES else _UNIT_BYTES // weight.itemsize
        num_units = round_up(num_inputs, per_unit * UNIT_STEP) // per_unit
        columns, step = (num_outputs // 2, _GATES) if gates else (num_outputs, PANEL_OUTPUTS)
        num_pairs = -(-columns // step)
        panels = scales = None
        if format is Format.COMPACT:
            panels, scales = self._pack_compact(weight, num_units, num_pairs, gates=gates)
            format = Format.UNITS if panels is None else format
        elif format in CODES:
            panels, scales = self._pack_codes(weight, format, num_pairs, gates=gates)
        if panels is None:
            panels = self._pack_units(weight, num_units, num_pairs, gates=gates)
        if bias is not None:
            bias = packed_bias(bias, gates=gates)
        return PackedWeight(panels, scales, bias, num_inputs, num_units, num_pairs, format)

    def _pack_units(
        self, weight: torch.Tensor, num_units: int, num_pairs: int, *, gates: bool
    ) -> torch.Tensor:
        """Return a weight in its own dtype, in panels of units."""
        panels = huge_pages.empty(num_pairs * PANEL_OUTPUTS * num_units, torch.int32)
        is_bf16 = weight.dtype == torch.bfloat16
        shape = *weight.shape, gates
        self._library.troika_pack(weight.data_ptr(), is_bf16, *shape, panels.data_ptr())
        return panels

    def _pack_codes(
        self, weight: torch.Tensor, format: Format, num_pairs: int, *, gates: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the codes of a weight and their scales."""
        codes, num_inputs = CODES[format], weight.shape[1]
        width = round_up(num_inputs, self._library.troika_coded_inputs(format))
        num_groups = 1 if codes.group_inputs is None else -(-width // codes.group_inputs)
        num_outputs = num_pairs * PANEL_OUTPUTS
        panels = huge_pages.empty(num_outputs * width // codes.per_byte, torch.uint8)
        panels.zero_()
        scales = torch.zeros(num_outputs * num_groups, dtype=codes.scale_dtype)
        pointers = panels.data_ptr(), scales.data_ptr()
        shape = *weight.shape, gates
        self._library.troika_pack_codes(weight.data_ptr(), format, *shape, *pointers)
        return panels, scales

    def _pack_compact(
        self, weight: torch.Tensor, num_units: int, num_pairs: int, *, gates: bool
    ) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
        """Return the codes of a weight and what is stored with them; None: they cannot be made."""
        sizes = _LONG(), _LONG()
        self._library.troika_compact_bytes(num_units, *map(ctypes.byref, sizes))
        if not sizes[0].value:
            return None, None
        codes, others = (huge_pages.empty(num_pairs * size.value, torch.uint8) for size in sizes)
        is_packed = _INT()
        self._library.troika_pack_compact(
            weight.data_ptr(),
            *weight.shape,
            gates,
            codes.data_ptr(),
            others.data_ptr(),
            ctypes.byref(is_packed),
        )
        return (codes, others) if is_packed.value else (None, None)

    def pack_experts(
        self,
        weights: Matrices,
        format: Format = Format.UNITS,
        *,
        gates: bool = False,
        biases: torch.Tensor | None = None,
    ) -> PackedWeight:
        """Pack `[num_outputs, num_inputs]` of each expert, one expert after the other.

        Panels, scales and biases are those of all experts, and the sizes those of one. `biases`
        are `[num_experts, num_outputs]`.
        """
        count = len(weights)

        def pack(number: int) -> PackedWeight:
            bias = None if biases is None else biases[number]
            return self.pack(weights[number].detach(), bias, format, gates=gates)

        first = _outside(pack(0))  # so that the weight of all takes its place
        panels, scales, bias = (
            None if part is None else huge_pages.empty(count * len(part), part.dtype)
            for part in first[:3]
        )
        assert panels is not None
        for number in range(count):
            one = pack(number) if number > 0 else first
            if one.format is not first.format:  # not all can be COMPACT
                del first, one, panels, scales, bias  # there may be no memory for both
                return self.pack_experts(weights, Format.UNITS, gates=gates, biases=biases)
            panels.view(count, -1)[number] = one.panels
            if scales is not None and one.scales is not None:
                scales.view(count, -1)[number] = one.scales
            if bias is not None and one.bias is not None:
                bias.view(count, -1)[number] = one.bias
        return first._replace(panels=panels, scales=scales, bias=bias)

    def round(self, weight: torch.Tensor, format: Format) -> None:
        """Round a weight in place to what codes can stand for.

        It is `[..., num_outputs, num_inputs]`, and in bfloat16.
        """
        assert weight.dtype == torch.bfloat16
        assert weight.is_contiguous()
        rows = weight.view(-1, weight.shape[-1])
        self._library.troika_round(rows.data_ptr(), format, *rows.shape)


def _outside(weight: PackedWeight) -> PackedWeight:
    """Return a copy of a weight in ordinary pages."""
    scales = None if weight.scales is None else weight.scales.clone()
    return weight._replace(panels=weight.panels.clone(), scales=scales)

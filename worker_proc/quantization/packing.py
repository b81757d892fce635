"""Packs the codes of a checkpoint's weight for the kernels, as they are: nothing is rounded again.

The kernels (native/grouped_codes.h) make (code - zero point) · scale of them in float32, as
`QuantizedWeight.dequantize` does.
"""

from collections.abc import Sequence

import torch
from torch.nn.functional import pad

from worker_proc.native.kernels import (
    Format,
    Grouping,
    PackedWeight,
    by_panels,
    packed_bias,
)
from worker_proc.quantization.weight import CodeKind, QuantizedWeight

TILE_INPUTS = 32
"""Of a tile of codes; a group is a whole number of them."""
_FORMATS = {
    CodeKind.INT4: Format.GROUPED_INT4,
    CodeKind.INT8: Format.GROUPED_INT8,
    CodeKind.FP8: Format.GROUPED_E4M3,
}
_E4M3_FACTOR = 2.0**120
"""Of scales: the kernel reads a number in e4m3 as a float with another bias of the exponent."""
_E4M3_SCALES = (2.0**-100, 2.0**7)
"""Between these, a scale times the factor is finite, and no product is rounded twice."""
_MAX_CODED_INPUTS = (2**31 - 1) // (127 * 128)
"""Of a weight for rows of codes: with more, a sum of products could exceed 32 bits."""
_CODED_STEP_INPUTS = 64
"""Of a tile of codes for rows of codes (`CodedUnits` in native/weights.h)."""


def obstacle(weight: QuantizedWeight) -> str:
    """Return why the kernels cannot read a weight's codes, or an empty text."""
    num_inputs = weight.codes.shape[1]
    if weight.group_size < num_inputs and weight.group_size % TILE_INPUTS:
        return f"groups of {weight.group_size} inputs"
    if weight.order is not None and _order(weight) is None:
        return "groups of different sizes"
    if weight.kind is CodeKind.FP8:
        sizes = weight.scales.abs()
        least, most = _E4M3_SCALES
        if not bool(((sizes == 0.0) | ((sizes >= least) & (sizes < most))).all()):
            return f"scales that are not between {least:g} and {most:g}"
    return ""


def pack_codes(
    weight: QuantizedWeight,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    *,
    gates: bool = False,
) -> PackedWeight:
    """Pack a weight without an obstacle for rows of `dtype`; with `gates` half of it are gates."""
    num_inputs = weight.codes.shape[1]
    order = None if weight.order is None else _order(weight)
    codes = weight.codes if order is None else weight.codes[:, order]
    width = -(-num_inputs // TILE_INPUTS) * TILE_INPUTS
    # [pairs, 2, 16, words] becomes [pairs, tiles, 2, words of a tile, 16].
    words = by_panels(_words(codes, weight.kind, width), gates=gates)
    words = words.unflatten(3, (width // TILE_INPUTS, -1)).permute(0, 3, 1, 4, 2)
    scales = weight.scales * _E4M3_FACTOR if weight.kind is CodeKind.FP8 else weight.scales
    scales = scales.to(_scale_type(scales))
    zero = int(weight.zeros.flatten()[0])
    zeros = None
    if not bool((weight.zeros == zero).all()):
        zeros, zero = _by_group(weight.zeros.to(torch.uint8), gates=gates), 0
    whole_tiles = -(-min(weight.group_size, width) // TILE_INPUTS)
    return PackedWeight(
        panels=words.reshape(-1),
        scales=_by_group(scales, gates=gates),
        bias=None if bias is None else packed_bias(bias, gates=gates),
        num_inputs=num_inputs,
        num_units=width * dtype.itemsize // 4,
        num_pairs=len(words),
        format=_FORMATS[weight.kind],
        grouping=Grouping(zeros, zero, whole_tiles, None if order is None else order.int()),
    )


def join_packed(experts: Sequence[PackedWeight]) -> PackedWeight:
    """Return one weight with those of all experts, one after the other; its sizes are of one."""
    first = experts[0]
    scales = [expert.scales for expert in experts if expert.scales is not None]
    if len({part.dtype for part in scales}) > 1:
        scales = [part.float() for part in scales]
    biases = [expert.bias for expert in experts if expert.bias is not None]
    grouping = first.grouping
    groupings = [expert.grouping for expert in experts if expert.grouping is not None]
    if grouping is not None and len({(one.zeros is None, one.zero) for one in groupings}) > 1:
        zeros = [
            torch.full_like(part, one.zero, dtype=torch.uint8) if one.zeros is None else one.zeros
            for one, part in zip(groupings, scales, strict=True)
        ]
        grouping = grouping._replace(zeros=torch.cat(zeros), zero=0)
    elif grouping is not None and grouping.zeros is not None:
        zeros = [one.zeros for one in groupings if one.zeros is not None]
        grouping = grouping._replace(zeros=torch.cat(zeros))
    return first._replace(
        panels=torch.cat([expert.panels for expert in experts]),
        scales=torch.cat(scales),
        bias=torch.cat(biases) if biases else None,
        grouping=grouping,
    )


def can_take_codes(weight: QuantizedWeight) -> bool:
    """Return whether the kernels for rows of codes compute with a weight."""
    return (
        weight.kind is CodeKind.INT8
        and weight.order is None
        and weight.scales.shape[1] == 1
        and bool((weight.zeros == 128).all())
        and weight.codes.shape[1] <= _MAX_CODED_INPUTS
    )


def pack_for_codes(
    weight: QuantizedWeight, bias: torch.Tensor | None, *, gates: bool = False
) -> PackedWeight:
    """Pack a weight that `can_take_codes` for rows of codes."""
    num_inputs = weight.codes.shape[1]
    width = -(-num_inputs // _CODED_STEP_INPUTS) * _CODED_STEP_INPUTS
    words = by_panels(_words(weight.codes, weight.kind, width), gates=gates).transpose(2, 3)
    return PackedWeight(
        panels=words.reshape(-1),
        scales=by_panels(weight.scales[:, 0], gates=gates).reshape(-1),
        bias=None if bias is None else packed_bias(bias, gates=gates),
        num_inputs=num_inputs,
        num_units=width // 4,
        num_pairs=len(words),
        format=Format.INT8_FOR_CODES,
    )


def _words(codes: torch.Tensor, kind: CodeKind, width: int) -> torch.Tensor:
    """Return codes as int32, `[num_outputs, words]`, the first of each in its lowest bits."""
    codes = pad(codes, (0, width - codes.shape[1]))
    if kind is CodeKind.INT4:
        codes = codes[:, 0::2] | codes[:, 1::2] << 4
    return codes.contiguous().view(torch.int32)


def _by_group(values: torch.Tensor, *, gates: bool) -> torch.Tensor:
    """Return `[pairs, groups, 2, 16]` of `[num_outputs, groups]`, flat."""
    return by_panels(values, gates=gates).permute(0, 3, 1, 2).reshape(-1)


def _scale_type(scales: torch.Tensor) -> torch.dtype:
    """Return the smallest type that has all scales."""
    for dtype in (torch.float16, torch.bfloat16):
        if torch.equal(scales.to(dtype).float(), scales):
            return dtype
    return torch.float32


def _order(weight: QuantizedWeight) -> torch.Tensor | None:
    """Return the inputs sorted by their groups, if these have the same size then; else None."""
    assert weight.order is not None
    order = weight.order.argsort(stable=True)
    consecutive = torch.arange(len(order)) // weight.group_size
    return order if torch.equal(weight.order[order], consecutive) else None

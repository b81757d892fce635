"""Packs the codes of a checkpoint's weight for the kernels, without rounding them again.

Like `QuantizedWeight.dequantize`, the kernels (native/products/grouped_codes.h) compute a value in
float32 as (code - zero point) · scale, code · scale + minimum, or entry of a table · scale.
"""

from collections.abc import Iterable, Sequence

import torch
from torch.nn.functional import pad

from worker_proc.native import huge_pages
from worker_proc.native.packed_weights import Format, Grouping, PackedWeight, by_panels, packed_bias
from worker_proc.quantization.weight import CodeKind, QuantizedWeight

TILE_INPUTS = 32
"""The inputs of a tile of codes; a group is a whole number of tiles, or half of one."""
_MIN_GROUP_INPUTS = TILE_INPUTS // 2
_FORMATS = {
    CodeKind.INT4: Format.GROUPED_INT4,
    CodeKind.INT8: Format.GROUPED_INT8,
    CodeKind.FP8: Format.GROUPED_E4M3,
    CodeKind.NF4: Format.GROUPED_TABLE,
    CodeKind.FP4: Format.GROUPED_TABLE,
}
_E4M3_FACTOR = 2.0**120
"""The factor of scales: the kernel reads e4m3 as a float with another bias of the exponent."""
_E4M3_SCALES = (2.0**-100, 2.0**7)
"""The bounds of scales whose product with the factor is finite and not rounded twice."""
_MAX_CODED_INPUTS = (2**31 - 1) // (127 * 128)
"""The most inputs of a weight for rows of codes: with more, a sum could exceed 32 bits."""
_CODED_STEP_INPUTS = 64
"""The inputs of a tile for rows of codes (`CodedUnits` in native/products/int8_panels.h)."""


def obstacle(weight: QuantizedWeight) -> str:
    """Return the reason why the kernels cannot read a weight's codes; empty: they can."""
    num_inputs = weight.codes.shape[1]
    is_half = weight.group_size == _MIN_GROUP_INPUTS
    if weight.group_size < num_inputs and weight.group_size % TILE_INPUTS and not is_half:
        return f"groups of {weight.group_size} inputs"
    if weight.order is not None and _order(weight) is None:
        return "groups of different sizes"
    if weight.kind is CodeKind.FP8:
        sizes = weight.scales.abs()
        min_scale, max_scale = _E4M3_SCALES
        if not bool(((sizes == 0.0) | ((sizes >= min_scale) & (sizes < max_scale))).all()):
            return f"scales that are not between {min_scale:g} and {max_scale:g}"
    return ""


def pack_codes(
    weight: QuantizedWeight,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    *,
    gates: bool = False,
    is_part: bool = False,
) -> PackedWeight:
    """Pack a weight without an obstacle for rows of `dtype`.

    `gates`: half of its outputs are gates. `is_part`: the caller copies it into a joined weight.
    """
    num_inputs = weight.codes.shape[1]
    order = None if weight.order is None else _order(weight)
    codes = weight.codes if order is None else weight.codes[:, order]
    width = -(-num_inputs // TILE_INPUTS) * TILE_INPUTS
    # [pairs, 2, 16, words] becomes [pairs, tiles, 2, words of a tile, 16].
    words = by_panels(_words(codes, weight.kind, width), gates=gates)
    words = words.unflatten(3, (width // TILE_INPUTS, -1)).permute(0, 3, 1, 4, 2)
    scales, grouping = _grouping(weight, gates=gates)
    return PackedWeight(
        panels=words.reshape(-1) if is_part else huge_pages.copy_of(words),
        scales=scales,
        bias=None if bias is None else packed_bias(bias, gates=gates),
        num_inputs=num_inputs,
        num_units=width * dtype.itemsize // 4,
        num_pairs=len(words),
        format=_FORMATS[weight.kind],
        grouping=grouping._replace(order=None if order is None else order.int()),
    )


def _grouping(weight: QuantizedWeight, *, gates: bool) -> tuple[torch.Tensor, Grouping]:
    """Return the packed scales, and the other numbers of groups."""
    width = -(-weight.codes.shape[1] // TILE_INPUTS) * TILE_INPUTS
    group_inputs = min(weight.group_size, width)
    if group_inputs != _MIN_GROUP_INPUTS:
        group_inputs = -(-group_inputs // TILE_INPUTS) * TILE_INPUTS

    def packed(values: torch.Tensor, inputs_of_each: int = group_inputs) -> torch.Tensor:
        return _by_group(values, -(-width // inputs_of_each), gates=gates)

    zero = int(weight.zeros.flatten()[0])
    grouping = Grouping(None, zero, group_inputs, table=weight.table)
    if not bool((weight.zeros == zero).all()):
        grouping = grouping._replace(zeros=packed(weight.zeros.to(torch.uint8)), zero=0)
    scales, minimums = weight.scales, weight.minimums
    if weight.kind is CodeKind.FP8:
        scales = scales * _E4M3_FACTOR
    if (multiples := weight.scale_multiples) is not None:
        section_inputs = multiples.codes.shape[1] // multiples.units.shape[1] * group_inputs
        grouping = grouping._replace(
            scale_units=packed(multiples.units, section_inputs), section_inputs=section_inputs
        )
        if (lows := weight.minimum_multiples) is not None:
            grouping = grouping._replace(
                minimums=packed(lows.codes), minimum_units=packed(lows.units, section_inputs)
            )
        return packed(multiples.codes), grouping
    scales = scales.to(_scale_type(scales, minimums))
    if minimums is not None:
        minimums = packed(minimums.to(scales.dtype))
    return packed(scales), grouping._replace(minimums=minimums)


class CannotJoin(Exception):
    """The codes of several experts cannot be joined; the text is the reason."""


def join_packed(experts: Iterable[PackedWeight], count: int) -> PackedWeight:
    """Return one weight that holds those of `count` experts; its sizes are those of one expert.

    Each is copied and released before the next is made, so that codes are not in memory twice.
    Raises CannotJoin if the experts differ in format or table, or if one has an order of inputs.
    """
    panels: torch.Tensor | None = None
    rest: list[PackedWeight] = []
    for number, one in enumerate(experts):
        if panels is None:
            panels = huge_pages.empty(count * len(one.panels), one.panels.dtype)
        elif one.format is not rest[0].format:
            raise CannotJoin("experts in different formats")
        if one.order is not None:
            raise CannotJoin("an expert whose inputs are in another order")
        if not _have_one_table(one, rest[:1]):
            raise CannotJoin("experts with different tables")
        panels.view(count, -1)[number] = one.panels
        rest.append(one._replace(panels=one.panels[:0].clone()))
    assert panels is not None
    scales = [one.scales for one in rest if one.scales is not None]
    if len({part.dtype for part in scales}) > 1:
        scales = [part.float() for part in scales]
    biases = [one.bias for one in rest if one.bias is not None]
    groupings = [one.grouping for one in rest if one.grouping is not None]
    return rest[0]._replace(
        panels=panels,
        scales=torch.cat(scales),
        bias=torch.cat(biases) if biases else None,
        grouping=_join_groupings(groupings, scales) if groupings else None,
    )


def _have_one_table(one: PackedWeight, others: Sequence[PackedWeight]) -> bool:
    """Return whether all weights that have a table have the same one."""
    tables = [None if each.grouping is None else each.grouping.table for each in (one, *others)]
    present = [table for table in tables if table is not None]
    return not present or all(torch.equal(table, present[0]) for table in present)


def _join_groupings(groupings: Sequence[Grouping], scales: Sequence[torch.Tensor]) -> Grouping:
    """Return the numbers of groups of all experts; `scales` are those of each expert."""
    if len({(one.zeros is None, one.zero) for one in groupings}) > 1:
        filled = [
            torch.full_like(part, one.zero, dtype=torch.uint8) if one.zeros is None else one.zeros
            for one, part in zip(groupings, scales, strict=True)
        ]
        groupings = [
            one._replace(zeros=zeros, zero=0) for one, zeros in zip(groupings, filled, strict=True)
        ]
    joined = {
        name: torch.cat([one.tensors[name] for one in groupings]) for name in groupings[0].tensors
    }
    if "minimums" in joined:
        joined["minimums"] = joined["minimums"].to(scales[0].dtype)
    return groupings[0].with_tensors(joined)


def can_take_codes(weight: QuantizedWeight) -> bool:
    """Return whether the kernels for rows of codes compute with a weight."""
    return (
        weight.kind is CodeKind.INT8
        and weight.order is None
        and weight.scales.shape[1] == 1
        and weight.minimums is None
        and bool((weight.zeros == 128).all())
        and weight.codes.shape[1] <= _MAX_CODED_INPUTS
    )


def pack_for_codes(
    weight: QuantizedWeight,
    bias: torch.Tensor | None,
    *,
    gates: bool = False,
    is_part: bool = False,
) -> PackedWeight:
    """Pack a weight that `can_take_codes` for rows of codes; `is_part` as in `pack_codes`."""
    num_inputs = weight.codes.shape[1]
    width = -(-num_inputs // _CODED_STEP_INPUTS) * _CODED_STEP_INPUTS
    words = by_panels(_words(weight.codes, weight.kind, width), gates=gates).transpose(2, 3)
    return PackedWeight(
        panels=words.reshape(-1) if is_part else huge_pages.copy_of(words),
        scales=by_panels(weight.scales[:, 0], gates=gates).reshape(-1),
        bias=None if bias is None else packed_bias(bias, gates=gates),
        num_inputs=num_inputs,
        num_units=width // 4,
        num_pairs=len(words),
        format=Format.INT8_FOR_CODES,
    )


def _words(codes: torch.Tensor, kind: CodeKind, width: int) -> torch.Tensor:
    """Return codes as int32, `[num_outputs, words]`, a word's first code in its lowest bits."""
    codes = pad(codes, (0, width - codes.shape[1]))
    if kind.bits == 4:
        codes = codes[:, 0::2] | codes[:, 1::2] << 4
    return codes.contiguous().view(torch.int32)


def _by_group(values: torch.Tensor, num_groups: int, *, gates: bool) -> torch.Tensor:
    """Return `[pairs, num_groups, 2, 16]` of `[num_outputs, groups]`, flat.

    The last tile may have a group without inputs, whose values are 0.
    """
    values = pad(values, (0, num_groups - values.shape[1]))
    return by_panels(values, gates=gates).permute(0, 3, 1, 2).reshape(-1).contiguous()


def _scale_type(scales: torch.Tensor, minimums: torch.Tensor | None) -> torch.dtype:
    """Return the smallest type that has all scales and minimums."""
    for dtype in (torch.float16, torch.bfloat16):
        if all(
            torch.equal(numbers.to(dtype).float(), numbers)
            for numbers in (scales, minimums)
            if numbers is not None
        ):
            return dtype
    return torch.float32


def _order(weight: QuantizedWeight) -> torch.Tensor | None:
    """Return the inputs sorted by their groups; None: the groups have different sizes."""
    assert weight.order is not None
    order = weight.order.argsort(stable=True)
    consecutive = torch.arange(len(order)) // weight.group_size
    return order if torch.equal(weight.order[order], consecutive) else None

"""Kernels over the codes of quantized checkpoints, against the weights that the codes stand for.

In float32 both give the same bits. Rows in bfloat16 are multiplied with weights in float32, with
weights that are rounded to bfloat16, or with integer codes, whose sums are then scaled, depending
on the processor.
"""

from collections.abc import Callable

import pytest
import torch

from tests.combinations import in_turn
from tests.worker.native.grouped_weights import CASES, Case, make_weight
from tests.worker.quantization.products import MAX_ROWS, NUM_MANY_ROWS, product
from worker_proc.native.build import compiler
from worker_proc.native.kernels import NativeLibrary
from worker_proc.native.packed_weights import Format, PackedWeight
from worker_proc.quantization.packing import (
    CannotJoin,
    can_take_codes,
    join_packed,
    obstacle,
    pack_codes,
    pack_for_codes,
)
from worker_proc.quantization.weight import CodeKind, QuantizedWeight

pytestmark = [
    pytest.mark.skipif(compiler() is None, reason="no C++ compiler"),
    pytest.mark.usefixtures("two_threads"),
]

NUM_ROWS = (*range(MAX_ROWS + 1), *NUM_MANY_ROWS)


def permuted(rows: torch.Tensor, packed: PackedWeight) -> torch.Tensor:
    return rows if packed.order is None else rows[:, packed.order]


@pytest.mark.parametrize(("case", "gates"), in_turn(CASES, [False, True]), ids=str)
def test_products_in_float32_have_the_bits_of_the_dequantized_weight(
    case: Case, gates: bool, kernels: NativeLibrary
) -> None:
    """The plain weight has its inputs in the same order, which is that of the sums."""
    weight = make_weight(case)
    assert obstacle(weight) == ""
    bias = torch.randn(case.shape[0])
    codes = pack_codes(weight, bias, torch.float32, gates=gates)
    dense = permuted(weight.dequantize(torch.float32), codes)
    units = kernels.packer.pack(dense, bias, gates=gates)
    rows = torch.randn(max(NUM_ROWS), case.shape[1])
    for num_rows in NUM_ROWS:
        given = permuted(rows[:num_rows], codes)
        want = product(kernels, units, given, gates=gates)
        assert torch.equal(product(kernels, codes, given, gates=gates), want), num_rows
    assert codes.panels.nbytes < 0.8 * case.kind.bits * units.panels.nbytes / 8


def are_scaled_sums(
    found: torch.Tensor, rows: torch.Tensor, weight: QuantizedWeight, order: torch.Tensor | None
) -> bool:
    """Whether products are those of the exact weights, but for the rounding of sums of codes."""
    if weight.kind not in (CodeKind.INT4, CodeKind.INT8):
        return False
    minimums = None if weight.minimums is None else weight.minimums.abs()
    sizes = weight._replace(scales=weight.scales.abs(), zeros=-weight.zeros, minimums=minimums)
    exact, most = (each.dequantize(torch.float32).double() for each in (weight, sizes))
    if order is not None:
        exact, most = exact[:, order], most[:, order]
    want = rows.double() @ exact.t()
    error = (found[:, : len(exact)].double() - want).abs()
    bound = 2**-8 * want.abs() + 2**-20 * (rows.double().abs() @ most.t())
    return bool((error <= bound).all())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_products_in_bfloat16_are_those_of_one_type_for_any_number_of_rows(
    case: Case, kernels: NativeLibrary
) -> None:
    weight = make_weight(case)
    codes = pack_codes(weight, None, torch.bfloat16)
    dense = permuted(weight.dequantize(torch.float32), codes)
    wide, narrow = kernels.packer.pack(dense, None), kernels.packer.pack(dense.bfloat16(), None)
    rows = permuted(torch.randn(max(NUM_ROWS), case.shape[1]).bfloat16(), codes)
    alone = torch.cat([product(kernels, codes, row.unsqueeze(0)) for row in rows])
    agree: dict[str, Callable[[torch.Tensor, torch.Tensor], bool]] = {
        "wide": lambda found, given: torch.equal(
            found, product(kernels, wide, given.float()).bfloat16()
        ),
        "narrow": lambda found, given: torch.equal(found, product(kernels, narrow, given)),
        "sums": lambda found, given: are_scaled_sums(found, given, weight, codes.order),
    }
    for num_rows in NUM_ROWS:
        given = rows[:num_rows]
        found = product(kernels, codes, given)
        assert torch.equal(found, alone[:num_rows]), num_rows
        agree = {name: is_like for name, is_like in agree.items() if is_like(found, given)}
        assert agree, num_rows


@pytest.mark.parametrize("case", CASES[:3], ids=str)
def test_a_part_of_a_weight_is_that_part_packed(case: Case, library: NativeLibrary) -> None:
    case = case._replace(shape=(160, case.shape[1]))
    weight, rows = make_weight(case), torch.randn(3, case.shape[1])
    part = pack_codes(weight, None, torch.float32).outputs(64, 40)
    cut = slice(64, 104)
    alone = weight._replace(
        codes=weight.codes[cut], scales=weight.scales[cut], zeros=weight.zeros[cut]
    )
    packed = pack_codes(alone, None, torch.float32)
    found, want = (product(library, one, rows)[:, :40] for one in (part, packed))
    assert torch.equal(found, want)


@pytest.mark.parametrize("num_even", [0, 1])
def test_experts_with_other_types_of_scales_and_zero_points_are_joined(num_even: int) -> None:
    """A zero point of all groups, and scales of 16 bits, need not be those of every expert."""
    cases = [CASES[0], CASES[0]._replace(scales=torch.float32), CASES[0]]
    weights = [make_weight(case, seed) for seed, case in enumerate(cases)]
    for weight in weights[:num_even]:
        weight.zeros.fill_(7)
    joined = join_packed(
        (pack_codes(weight, None, torch.float32) for weight in weights), len(weights)
    )
    assert joined.scales is not None
    assert joined.grouping is not None
    assert joined.scales.dtype == torch.float32
    zeros = joined.grouping.zeros
    assert zeros is not None
    assert len(zeros) == len(joined.scales)
    assert bool((zeros[: num_even * len(zeros) // 3] == 7).all())


def test_experts_with_separate_tables_are_not_joined() -> None:
    one = make_weight(Case(CodeKind.NF4, (96, 192), 64))
    assert one.table is not None
    packed = [
        pack_codes(one._replace(table=table), None, torch.float32)
        for table in (one.table, one.table * 2)
    ]
    join_packed(iter([packed[0], packed[0]]), 2)
    with pytest.raises(CannotJoin, match="experts with different tables"):
        join_packed(iter(packed), 2)


def test_rows_of_codes_are_multiplied_with_the_codes_of_the_checkpoint(
    kernels: NativeLibrary,
) -> None:
    case = Case(CodeKind.INT8, (70, 300), 300, torch.float32)
    weight = make_weight(case)
    assert can_take_codes(weight)
    packed = pack_for_codes(weight, None)
    assert packed.format is Format.INT8_FOR_CODES
    rows = torch.randint(-127, 128, (5, 300)).bfloat16()
    rows[:, 7] = 127.0  # the scale of a row is 1
    sums = rows.double() @ (weight.codes.double() - 128).t()
    want = (sums.float() * weight.scales[:, 0]).bfloat16()
    assert torch.equal(product(kernels, packed, rows)[:, :70], want)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"group_size": 48}, "groups of 48 inputs"),
        ({"order": torch.zeros(128, dtype=torch.int64)}, "groups of different sizes"),
    ],
)
def test_codes_that_no_kernel_reads_are_named(changes: dict[str, object], reason: str) -> None:
    weight = make_weight(CASES[0])._replace(**changes)
    assert obstacle(weight) == reason


@pytest.mark.parametrize("scale", [1e-33, 200.0])
def test_scales_of_e4m3_are_bounded(scale: float) -> None:
    weight = make_weight(CASES[-1])
    weight.scales[3, 1] = scale
    assert "scales that are not between" in obstacle(weight)

"""Weights rounded to codes of 8 and 4 bits, and exact products with them."""

import pytest
import torch
from torch.nn.functional import pad

from tests.combinations import in_turn
from tests.worker.quantization.products import MAX_ROWS, NUM_MANY_ROWS, product
from worker_proc.native.kernels import NativeLibrary
from worker_proc.native.packed_weights import Format

CODED = (Format.INT8, Format.INT4)
SHAPES = ((96, 128), (70, 45), (33, 300), (160, 257))
"""Outputs and inputs; most fill no panel, no unit, and no group of 128."""
GROUP = 128


def random_weight(shape: tuple[int, int]) -> torch.Tensor:
    """Return rows of many sizes: one is zero, one has equal values, one a value far off."""
    generator = torch.Generator().manual_seed(sum(shape))
    weight = torch.randn(shape, generator=generator) * torch.logspace(-6, 3, shape[0]).unsqueeze(1)
    weight[1] = 0.0
    weight[2] = 0.3
    weight[3, 7] = -50.0
    return weight.bfloat16()


def rounded(library: NativeLibrary, weight: torch.Tensor, format: Format) -> torch.Tensor:
    found = weight.clone()
    library.packer.round(found, format)
    return found


def in_groups(weight: torch.Tensor) -> torch.Tensor:
    """Return `[outputs, groups, 128]` in float32, filled up with zeros."""
    missing = -weight.shape[1] % GROUP
    return pad(weight.float(), (0, missing)).view(len(weight), -1, GROUP)


def shortened(scale: torch.Tensor, num_bits: int, last: int = 0) -> torch.Tensor:
    """Cut scales to some significant bits, of which the last one may be set."""
    unit = 1 << (24 - num_bits)
    bits = scale.view(torch.int32)
    return (bits - bits % unit | last * unit).view(torch.float32)


def eight_bits(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes of 8 bits, and the scale of each output."""
    greatest = weight.float().abs().amax(1, keepdim=True)
    scales = shortened(greatest / 127, 14, 1).where(greatest > 0, 0.0)
    return (weight.float() * (1 / scales)).nan_to_num().round(), scales


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("format", CODED, ids=str)
def test_rounded_weights_stay_as_they_are(
    format: Format, shape: tuple[int, int], library: NativeLibrary
) -> None:
    once = rounded(library, random_weight(shape), format)
    assert torch.equal(rounded(library, once, format), once)
    assert not once[1].any()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("format", CODED, ids=str)
def test_rounded_weights_get_the_same_codes_and_scales(
    format: Format, shape: tuple[int, int], library: NativeLibrary
) -> None:
    """Several values of a group may have the greatest magnitude after the rounding."""
    weight = random_weight(shape)
    first, again = (
        library.packer.pack(each, None, format)
        for each in (weight, rounded(library, weight, format))
    )
    assert first.scales is not None
    assert again.scales is not None
    assert torch.equal(first.panels, again.panels)
    assert torch.equal(first.scales, again.scales)


@pytest.mark.parametrize("format", CODED, ids=str)
@pytest.mark.parametrize("exponent", [-95, -70, 70, 110])
def test_the_size_of_weights_does_not_matter(
    exponent: int, format: Format, library: NativeLibrary
) -> None:
    weight = torch.randn(16, 256, generator=torch.Generator().manual_seed(2)).bfloat16()
    factor = 2.0**exponent
    found = rounded(library, weight * factor, format)
    assert torch.equal(found, rounded(library, weight, format) * factor)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_eight_bits_round_to_the_nearest_multiple_of_a_scale(
    shape: tuple[int, int], library: NativeLibrary
) -> None:
    weight = random_weight(shape)
    found = rounded(library, weight, Format.INT8).float()
    codes, scales = eight_bits(weight)
    greatest = weight.float().abs().amax(1, keepdim=True)
    assert int(codes.abs().max()) == 127
    assert torch.equal((codes * scales).bfloat16().float(), found)
    assert bool(((found - weight.float()).abs() <= 0.501 * scales + 2**-8 * greatest).all())
    assert torch.equal(found.abs().amax(1, keepdim=True), greatest)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_four_bits_have_the_best_of_the_short_scales(
    shape: tuple[int, int], library: NativeLibrary
) -> None:
    """No scale of five significant bits with which the greatest value is near -7 loses less."""
    weight = random_weight(shape)
    groups, found = in_groups(weight), in_groups(rounded(library, weight, Format.INT4))
    greatest = groups.gather(2, groups.abs().argmax(2, keepdim=True))
    least = torch.full_like(greatest, torch.inf)
    for mantissa in range(16, 32):
        for exponent in range(-60, 20):
            size = torch.tensor(mantissa * 2.0**exponent)
            fits = (size <= greatest.abs() / 7) & (size * 10 > greatest.abs())
            if not fits.any():
                continue
            scale = -greatest.sign() * size
            codes = (groups / scale).round().clamp(-8, 7)
            error = ((codes * scale - groups) ** 2).sum(2, keepdim=True)
            least = torch.where(fits, torch.minimum(least, error), least)
    error = ((found - groups) ** 2).sum(2, keepdim=True)
    assert bool((error <= least.where(greatest != 0, 0.0) * 1.001).all())
    usual = torch.randn(64, 512, generator=torch.Generator().manual_seed(1)).bfloat16()
    lost = rounded(library, usual, Format.INT4).float() - usual.float()
    assert float(lost.norm() / usual.float().norm()) < 0.1


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("format", CODED, ids=str)
def test_sums_of_codes_are_exact_where_float32_holds_them(
    format: Format, shape: tuple[int, int], kernels: NativeLibrary
) -> None:
    """Rows of small whole numbers leave nothing to round, in any order of sums."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(4)).bfloat16()
    codes = kernels.packer.pack(weight, None, format)
    rows = torch.randint(-8, 9, (max(NUM_MANY_ROWS), shape[1])).bfloat16()
    if format is Format.INT8:
        numbers, scales = eight_bits(weight)
        want = ((rows.double() @ numbers.double().T).float() * scales.T).bfloat16()
    else:
        want = (rows.double() @ rounded(kernels, weight, format).double().T).bfloat16()
    for num_rows in (*range(MAX_ROWS + 1), *NUM_MANY_ROWS):
        found = product(kernels, codes, rows[:num_rows])[:, : shape[0]]
        assert torch.equal(want[:num_rows], found), num_rows


@pytest.mark.parametrize(
    ("shape", "format", "gates"), in_turn(SHAPES, CODED, [False, True]), ids=str
)
def test_codes_give_a_row_the_same_bits_among_any_others(
    format: Format, shape: tuple[int, int], gates: bool, kernels: NativeLibrary
) -> None:
    """Codes of rounded weights give the same.

    The bias leaves of a product what was rounded in float32.
    """
    num_outputs = shape[0] - shape[0] % 2
    weight = random_weight(shape)[:num_outputs]
    nearest = exact = rounded(kernels, weight, format)
    if format is Format.INT8:
        exact = torch.mul(*(part.double() for part in eight_bits(weight)))
    row = torch.randn(1, shape[1]).bfloat16()
    bias = -(row.double() @ exact.double().T)[0].float()
    codes, again = (
        kernels.packer.pack(each, bias, format, gates=gates) for each in (weight, nearest)
    )
    alone = product(kernels, codes, row, gates=gates)
    assert torch.equal(alone, product(kernels, again, row, gates=gates))
    for num_rows in (*range(2, MAX_ROWS + 1), *NUM_MANY_ROWS):
        found = product(kernels, codes, row.repeat(num_rows, 1), gates=gates)
        assert torch.equal(alone.expand_as(found), found), num_rows


@pytest.mark.parametrize("format", [*CODED, Format.INT8_FOR_CODES], ids=str)
def test_a_part_of_a_weight_is_that_part_packed(format: Format, library: NativeLibrary) -> None:
    weight, rows = torch.randn(160, 300).bfloat16(), torch.randn(3, 300).bfloat16()
    part = library.packer.pack(weight, None, format).outputs(64, 40)
    alone = library.packer.pack(weight[64:104], None, format)
    assert torch.equal(product(library, part, rows)[:, :40], product(library, alone, rows)[:, :40])

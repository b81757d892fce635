"""Weights in 12 bits a value give the bits of the same weights in bfloat16."""

import pytest
import torch

from tests.worker.quantization.products import product
from worker_proc.modules.coded_weights import pack_weight
from worker_proc.native.build import build, compiler
from worker_proc.native.kernels import NativeLibrary
from worker_proc.native.packed_weights import Format, PackedWeight

pytestmark = [
    pytest.mark.skipif(compiler() is None, reason="no C++ compiler"),
    pytest.mark.usefixtures("two_threads"),
]

SHAPES = ((96, 128), (70, 45), (33, 300), (160, 257))
"""Outputs and inputs; most fill no panel and no unit."""
ROWS = (*range(41), 64, 127, 128, 129, 256, 257, 300, 577)
MAX_EXCEPTIONS = 6
"""The most exceptions of a tile of 16 outputs and 32 inputs."""


@pytest.fixture
def library(kernels: NativeLibrary) -> NativeLibrary:
    weight = torch.ones(32, 32, dtype=torch.bfloat16)
    if kernels.packer.pack(weight, None, Format.COMPACT).format is not Format.COMPACT:
        pytest.skip("these kernels gain nothing by compact weights")
    return kernels


def random_weight(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator) * 0.02).bfloat16()


def even_weight(*shape: int) -> torch.Tensor:
    """Return values of 16 exponents, which are equally frequent."""
    generator = torch.Generator().manual_seed(sum(shape))
    exponents = torch.randint(-16, 0, shape, generator=generator)
    mantissas = torch.randint(128, 256, shape, generator=generator)
    signs = torch.randint(0, 2, shape, generator=generator) * 2 - 1
    return (signs * mantissas * 2.0 ** (exponents - 7)).bfloat16()


def both(
    library: NativeLibrary, weight: torch.Tensor, *, gates: bool = False
) -> tuple[PackedWeight, PackedWeight]:
    bias = torch.randn(len(weight)).bfloat16()
    units = library.packer.pack(weight, bias, gates=gates)
    compact = library.packer.pack(weight, bias, Format.COMPACT, gates=gates)
    assert (units.format, compact.format) == (Format.UNITS, Format.COMPACT)
    return units, compact


@pytest.mark.parametrize("gates", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_have_the_same_bits_for_any_number_of_rows(
    shape: tuple[int, int], gates: bool, library: NativeLibrary
) -> None:
    weight = random_weight(shape[0] - shape[0] % 2, shape[1])
    units, compact = both(library, weight, gates=gates)
    rows = torch.randn(max(ROWS), shape[1]).bfloat16()
    for num_rows in ROWS:
        want = product(library, units, rows[:num_rows], gates=gates)
        assert torch.equal(product(library, compact, rows[:num_rows], gates=gates), want), num_rows


def test_a_weight_takes_three_quarters_of_its_memory(library: NativeLibrary) -> None:
    units, compact = both(library, random_weight(512, 1024))
    assert compact.scales is not None
    assert compact.panels.nbytes + compact.scales.nbytes < 0.78 * units.panels.nbytes


@pytest.mark.parametrize("num_rows", [1, 12, 300])
def test_values_far_from_the_others_stay_exact(num_rows: int, library: NativeLibrary) -> None:
    """Zeros, subnormal and huge values, as many in one tile as it may have, on its borders, too."""
    weight = even_weight(64, 96)
    far = torch.tensor([0.0, -0.0, 1e-40, -1e30, 2.0**-100, -(2.0**90)], dtype=torch.bfloat16)
    assert len(far) == MAX_EXCEPTIONS
    weight[[0, 0, 0, 7, 15, 15], [0, 1, 31, 12, 30, 31]] = far
    weight[40, 95], weight[63, 64] = 2.0**-60, -(2.0**60)
    units, compact = both(library, weight)
    rows = torch.randn(num_rows, 96).bfloat16()
    assert torch.equal(product(library, compact, rows), product(library, units, rows))


@pytest.mark.parametrize("num_rows", [1, 12, 300])
def test_nan_and_infinities_stay_what_they_are(num_rows: int, library: NativeLibrary) -> None:
    weight = random_weight(64, 96)
    weight[3, 5], weight[40, 7], weight[50, 9] = torch.nan, torch.inf, -torch.inf
    units, compact = both(library, weight)
    rows = torch.ones(num_rows, 96).bfloat16()
    found, want = (product(library, each, rows) for each in (compact, units))
    assert torch.equal(found.view(torch.int16), want.view(torch.int16))
    assert found.isnan().any(0).nonzero().flatten().tolist() == [3]


def test_every_value_that_the_table_has(library: NativeLibrary) -> None:
    """The values have all signs and mantissas of 16 exponents, in all places of a tile."""
    bits = (120 << 7) + torch.arange(2**11).repeat(16, 1)
    for output in range(16):
        bits[output] = bits[output].roll(output)
    bits[::2] -= 2**15
    weight = torch.cat([bits, bits]).to(torch.int16).view(torch.bfloat16)
    units, compact = both(library, weight)
    one_hot = torch.eye(2**11, dtype=torch.bfloat16)
    found = product(library, compact, one_hot)
    assert torch.equal(found, product(library, units, one_hot))


@pytest.mark.parametrize("count", [MAX_EXCEPTIONS, MAX_EXCEPTIONS + 1])
def test_a_weight_with_too_many_exceptions_stays_as_it_is(
    count: int, library: NativeLibrary
) -> None:
    weight = even_weight(64, 96)
    weight[5, 33 : 33 + count] = 2.0 ** torch.arange(10, 10 + count)
    packed = library.packer.pack(weight, None, Format.COMPACT)
    has_room = count == MAX_EXCEPTIONS
    assert packed.format is (Format.COMPACT if has_room else Format.UNITS)
    rows = torch.randn(3, 96).bfloat16()
    want = product(library, library.packer.pack(weight, None), rows)
    assert torch.equal(product(library, packed, rows), want)


def test_experts_are_all_compact_or_none_is(library: NativeLibrary) -> None:
    weights = even_weight(3, 64, 96)
    assert library.packer.pack_experts(weights, Format.COMPACT).format is Format.COMPACT
    weights[1, 5, :20] = 2.0 ** torch.arange(10, 30)
    units, packed = (
        library.packer.pack_experts(weights, each) for each in (Format.UNITS, Format.COMPACT)
    )
    assert packed.format is Format.UNITS
    assert torch.equal(packed.panels, units.panels)


def test_a_part_of_a_weight_is_that_part_packed(library: NativeLibrary) -> None:
    weight, rows = random_weight(160, 300), torch.randn(3, 300).bfloat16()
    part = library.packer.pack(weight, None, Format.COMPACT).outputs(64, 40)
    alone = library.packer.pack(weight[64:104], None)
    assert torch.equal(product(library, part, rows)[:, :40], product(library, alone, rows)[:, :40])


def test_models_take_them_for_bfloat16_alone(library: NativeLibrary) -> None:
    weight = random_weight(64, 96)
    assert pack_weight(library, weight, None).format is Format.COMPACT
    assert pack_weight(library, weight.float(), None).format is Format.UNITS
    assert pack_weight(library, weight, None, Format.INT8).format is Format.INT8


def test_kernels_without_them_pack_units() -> None:
    library = NativeLibrary(build())
    library._library.troika_compact_bytes = lambda *_: None
    packed = library.packer.pack(random_weight(64, 96), None, Format.COMPACT)
    assert packed.format is Format.UNITS

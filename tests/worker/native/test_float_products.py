"""Products of many rows in bfloat16 by float32 (float_products.h): the bits stay the same."""

import shutil
import time

import pytest
import torch

from tests.combinations import in_turn
from tests.timing import within
from worker_proc.native.build import build, compiler
from worker_proc.native.instructions import projection
from worker_proc.native.kernels import NativeLibrary
from worker_proc.native.packed_weights import Format

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")

Libraries = tuple[NativeLibrary, NativeLibrary]
FORMATS = (Format.UNITS, Format.COMPACT, Format.INT8, Format.INT4)
SIZES = ((96, 64), (40, 100), (200, 290), (32, 1536))


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Libraries:
    """The kernels with and without products by float32."""
    made = []
    for uses_floats in (True, False):
        copied = tmp_path_factory.mktemp("native") / "copied.so"
        shutil.copy(build(), copied)
        made.append(NativeLibrary(copied, uses_tiles=False, uses_floats=uses_floats))
    return made[0], made[1]


def product(
    library: NativeLibrary, weight: torch.Tensor, rows: torch.Tensor, format: Format
) -> torch.Tensor:
    packed = library.packer.pack(weight, None, format)
    out = library.project(projection(packed), rows, packed.num_outputs)
    return out[:, : len(weight)].view(torch.int16)


def values(shape: tuple[int, int], kind: str) -> torch.Tensor:
    """Return values whose products have usual sizes, or are below the normal numbers."""
    made = torch.randn(shape)
    if kind == "tiny":
        made *= torch.exp2(torch.randint(-70, -60, shape).float())
    return made.bfloat16()


@pytest.mark.parametrize(
    ("size_and_kind", "format"),
    in_turn([(size, kind) for size in SIZES for kind in ("usual", "tiny")], FORMATS),
    ids=str,
)
def test_both_ways_give_the_same_bits(
    libraries: Libraries, size_and_kind: tuple[tuple[int, int], str], format: Format
) -> None:
    size, kind = size_and_kind
    torch.manual_seed(sum(size))
    weight = values(size, kind)
    for num_rows in (1, 5, 6, 12, 13, 35, 64, 150, 300):
        rows = values((num_rows, size[1]), kind)
        by_floats, by_pairs = (product(library, weight, rows, format) for library in libraries)
        assert torch.equal(by_floats, by_pairs)


@pytest.mark.parametrize("format", FORMATS)
def test_a_row_alone_has_the_bits_of_the_row_among_others(
    libraries: Libraries, format: Format
) -> None:
    weight, rows = values((96, 290), "usual"), values((150, 290), "usual")
    together = product(libraries[0], weight, rows, format)
    for row in (0, 5, 11, 12, 127, 128, 149):
        alone = product(libraries[0], weight, rows[row : row + 1], format)
        assert torch.equal(together[row : row + 1], alone)


def test_the_way_that_is_faster_here_is_taken(
    libraries: Libraries, tmp_path_factory: pytest.TempPathFactory
) -> None:
    copied = tmp_path_factory.mktemp("native") / "copied.so"
    shutil.copy(build(), copied)
    by_default = NativeLibrary(copied, uses_tiles=False)
    weight, rows = values((1024, 576), "usual"), values((256, 576), "usual")
    packed = by_default.packer.pack(weight, None, Format.UNITS)

    def min_s(library: NativeLibrary) -> float:
        times = []
        for _ in range(10):
            began = time.perf_counter()
            library.project(projection(packed), rows, packed.num_outputs)
            times.append(time.perf_counter() - began)
        return min(times)

    def measure() -> dict[str, float]:
        return {"ratio": min_s(by_default) / min(map(min_s, libraries))}

    within(5, measure, ratio=1.25)


def test_a_thread_keeps_its_own_small_numbers(libraries: Libraries) -> None:
    """The kernels set how the processor rounds, for as long as they compute."""
    product(libraries[0], values((64, 64), "usual"), values((64, 64), "usual"), Format.UNITS)
    smallest = torch.tensor([2.0**-140], dtype=torch.float64).float()
    assert (smallest * 2).item() == 2.0**-139

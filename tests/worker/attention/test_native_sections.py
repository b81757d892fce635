"""Contexts of several sections: the same bits however threads share them, and the right values."""

import copy
from array import array

import pytest
import torch

from tests.combinations import in_turn
from tests.worker.attention.texts import Texts, native_backend
from worker_proc.attention.native import NativeBackend
from worker_proc.attention.work import SECTION
from worker_proc.kv.kv_groups import LayerSpec
from worker_proc.native.build import compiler
from worker_proc.native.kernels import NativeLibrary

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")

NUM_BLOCKS = 700
LENGTH = 2 * SECTION + 300
OTHERS = (20,) * 16
SPECS = (
    LayerSpec(num_heads=6, num_kv_heads=2, head_dim=32, value_head_dim=32, window=None),
    LayerSpec(num_heads=9, num_kv_heads=1, head_dim=32, value_head_dim=64, window=SECTION + 190),
    LayerSpec(num_heads=2, num_kv_heads=1, head_dim=24, value_head_dim=12, window=None),
    LayerSpec(num_heads=2, num_kv_heads=2, head_dim=15, value_head_dim=16, window=SECTION - 90),
    LayerSpec(16, 1, head_dim=74, value_head_dim=44, window=None, is_latent=True),
    LayerSpec(9, 1, head_dim=48, value_head_dim=32, window=SECTION + 190, is_latent=True),
)
KERNELS = ("float32", "bfloat16", "bfloat16 without tiles")


class Context:
    """One long text and some short ones; its rows are known, as one thread computes them."""

    def __init__(
        self, spec: LayerSpec, kernel: str, block_size: int, without_tiles: NativeLibrary
    ) -> None:
        dtype = torch.float32 if kernel == "float32" else torch.bfloat16
        library = without_tiles if kernel.endswith("without tiles") else None
        self.texts = Texts(spec, block_size, dtype, (LENGTH, *OTHERS), num_blocks=NUM_BLOCKS)
        # The highest score of a row is in another section than the last one.
        self.texts.rows[0][1][SECTION + 40 : SECTION + 60] *= 3
        self.backend = native_backend(block_size, dtype, [spec.window], library, [spec])
        self.layer = self.texts.layer(self.backend)
        torch.set_num_threads(1)
        parts = [(i, 0, len(rows[0])) for i, rows in enumerate(self.texts.rows)]
        self.expected, *_ = self.texts.attend(self.layer, parts)

    @property
    def num_splits(self) -> int:
        return int(self.backend.steps[0].num_splits)

    def check(self, start: int, count: int) -> None:
        """Compute some rows again; they must have the bits that are known."""
        (rows,) = self.texts.attend(self.layer, [(0, start, count)])
        assert torch.equal(rows, self.expected[start : start + count])


@pytest.mark.parametrize(
    ("spec", "block_size", "kernel"), in_turn(SPECS, [16, 24], KERNELS), ids=str
)
def test_bits_do_not_depend_on_threads_or_chunks(
    spec: LayerSpec, block_size: int, kernel: str, without_tiles: NativeLibrary
) -> None:
    context = Context(spec, kernel, block_size, without_tiles)
    assert context.num_splits == 0
    boundaries = [boundary + offset for boundary in (SECTION, 2 * SECTION) for offset in (-1, 0, 1)]
    for num_threads in (2, 4):
        torch.set_num_threads(num_threads)
        for start in (*boundaries, SECTION + 300, LENGTH - 1):
            context.check(start, 1)
            assert context.num_splits == 0 or start >= SECTION
        assert context.num_splits == 1
        for start in (SECTION - 5, 2 * SECTION - 9, LENGTH - 11):
            context.check(start, 11)
            assert context.num_splits >= 1
        layer, rows = context.texts.layer(context.backend), []
        for start in range(0, LENGTH, 100):
            count = min(100, LENGTH - start)
            rows += context.texts.attend(layer, [(0, start, count)])
        assert torch.equal(torch.cat(rows), context.expected)
        others = [(i + 1, length - 1, 1) for i, length in enumerate(OTHERS)]
        together = context.texts.attend(context.layer, [*others, (0, LENGTH - 1, 1)])
        assert torch.equal(together[-1], context.expected[-1:])


@pytest.mark.parametrize(
    ("num_shared", "kernel", "num_threads"),
    in_turn([SECTION - 64, SECTION, SECTION + 320, 2 * SECTION + 64], KERNELS, [1, 2, 4]),
)
def test_a_prefix_may_end_anywhere_in_a_section(
    num_shared: int, kernel: str, num_threads: int, without_tiles: NativeLibrary
) -> None:
    context = Context(SPECS[0], kernel, 16, without_tiles)
    texts, num_common = context.texts, num_shared // 16
    table = texts.requests[0].block_tables[0]
    free = iter(range(1, NUM_BLOCKS))
    used = {block for request in texts.requests for block in request.block_tables[0]}
    for _ in range(3):
        own = [next(block for block in free if block not in used) for _ in table[num_common:]]
        request = copy.copy(texts.requests[0])
        request.block_tables = [table[:num_common] + array("i", own)]
        texts.requests.append(request)
        texts.rows.append(texts.rows[0])
        number = len(texts.requests) - 1
        texts.attend(context.layer, [(number, num_shared, LENGTH - num_shared)])
    torch.set_num_threads(num_threads)
    parts = [(len(texts.requests) - 1 - i, LENGTH - 1 - 70 * i, 1) for i in range(3)]
    found = texts.attend(context.layer, parts)
    num_groups = 1 if num_threads < 4 else len(parts)  # with more threads, each text is alone
    assert context.num_splits == (0 if num_threads == 1 else num_groups)
    assert context.backend.steps[0].num_pieces == num_groups * (1 if num_threads == 1 else 3)
    for (_, start, _), row in zip(parts, found, strict=True):
        assert torch.equal(row, context.expected[start : start + 1])


@pytest.mark.parametrize(("spec", "kernel"), in_turn(SPECS, KERNELS), ids=str)
def test_values_are_those_of_one_softmax(
    spec: LayerSpec, kernel: str, without_tiles: NativeLibrary
) -> None:
    context = Context(spec, kernel, 16, without_tiles)
    query, key, value = (rows.double() for rows in context.texts.rows[0])
    heads = torch.arange(spec.num_heads) // (spec.num_heads // spec.num_kv_heads)
    some = torch.arange(LENGTH)[SECTION - 20 :: 37]
    scores = torch.einsum("qhd,khd->hqk", query[some], key[:, heads]) * 0.3
    distance = some[:, None] - torch.arange(LENGTH)
    hidden = (distance < 0) | (distance >= (spec.window or LENGTH))
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    exact = torch.einsum("hqk,khd->qhd", weights, value[:, heads])
    tolerance = 1e-5 if kernel == "float32" else 1e-2
    found = context.expected[some].double()
    torch.testing.assert_close(found, exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("kernel", "num_threads"), in_turn(KERNELS, [1, 2]))
def test_a_score_that_is_not_a_number_reaches_the_result_of_other_sections(
    kernel: str, num_threads: int, without_tiles: NativeLibrary
) -> None:
    context = Context(SPECS[0], kernel, 16, without_tiles)
    context.texts.rows[0][1][51] = torch.nan
    torch.set_num_threads(num_threads)
    context.texts.attend(context.layer, [(0, 0, SECTION)])
    (rows,) = context.texts.attend(context.layer, [(0, LENGTH - 1, 1)])
    assert rows.isnan().all()


@pytest.mark.parametrize(("kernel", "num_threads"), in_turn(KERNELS, [1, 2]))
def test_a_row_without_any_weight_is_not_a_number(
    kernel: str, num_threads: int, without_tiles: NativeLibrary
) -> None:
    """All of its scores are -infinity: nothing of an earlier result shows."""
    context = Context(SPECS[0], kernel, 16, without_tiles)
    queries, keys, _ = context.texts.rows[0]
    queries[-1, :, 0], keys[..., 0] = 1.0, -torch.inf
    torch.set_num_threads(num_threads)
    context.texts.attend(context.layer, [(0, 0, LENGTH - 1)])
    (row,) = context.texts.attend(context.layer, [(0, LENGTH - 1, 1)])
    assert context.num_splits == num_threads - 1
    assert row.isnan().all()


def test_the_sums_that_are_kept_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker_proc.attention.native.MAX_SUMS_BYTES", 1000)
    torch.set_num_threads(2)
    texts = Texts(SPECS[0], 16, torch.float32, (LENGTH,))
    backend = native_backend(16, torch.float32, specs=[SPECS[0]])
    assert isinstance(backend, NativeBackend)
    layer = texts.layer(backend)
    (whole,) = texts.attend(layer, [(0, 0, LENGTH)])
    (row,) = texts.attend(layer, [(0, LENGTH - 1, 1)])
    assert backend.steps[0].num_splits == 0
    assert torch.equal(row, whole[-1:])

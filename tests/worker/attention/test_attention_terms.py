"""Attention with more than scores of queries and keys: sinks, biases, chunks, shared KV.

Both backends give what float64 gives, and the native kernel the same bits however the work is cut.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch

from tests.combinations import in_turn
from tests.worker.attention.texts import CPU, DTYPES, LENGTHS, Texts, native_backend
from worker_proc.attention.interface import AttentionBackend, PagedLayer
from worker_proc.attention.sdpa import Rule, SdpaBackend
from worker_proc.attention.work import SECTION
from worker_proc.kv.kv_format import KVFormat, round_rows
from worker_proc.kv.kv_groups import LayerSpec
from worker_proc.native.build import compiler

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")

SCALE = 0.3  # of `Texts`
ROOM = 128
"""Columns of biases behind the last one, which the kernel may read."""
LONG = 2 * SECTION + 300


class Terms(NamedTuple):
    """A layer, and what its scores have beside products."""

    name: str
    spec: LayerSpec
    has_sinks: bool = False
    has_biases: bool = False
    is_by_distance: bool = False
    num_distances: int = 0
    """Over which each query has biases of its own."""
    has_row_sinks: bool = False


_WIDE = LayerSpec(num_heads=6, num_kv_heads=2, head_dim=64, value_head_dim=64, window=None)
_MANY = LayerSpec(num_heads=80, num_kv_heads=2, head_dim=16, value_head_dim=16, window=None)
_ODD = LayerSpec(num_heads=3, num_kv_heads=1, head_dim=15, value_head_dim=12, window=None)
SHORT_TERMS = (
    Terms("sinks", _WIDE, has_sinks=True),
    Terms("sinks_window", replace(_ODD, window=9), has_sinks=True),
    Terms("biases", _WIDE, has_biases=True),
    Terms("distances", _WIDE, has_biases=True, is_by_distance=True),
    Terms("many_sinks", _MANY, has_sinks=True),
    Terms("many_biases", _MANY, has_biases=True),
    Terms("biases_window", replace(_ODD, window=9), has_biases=True),
    Terms("distances_window", replace(_ODD, window=9), has_biases=True, is_by_distance=True),
    Terms("chunks", replace(_WIDE, window=13, is_chunked=True)),
    Terms("long_chunks", replace(_ODD, window=64, is_chunked=True), has_sinks=True),
    Terms("row_biases_and_sinks", _WIDE, num_distances=5, has_row_sinks=True),
)
SHORT_ROW_TERMS = (
    Terms("row_biases", _WIDE, num_distances=37),
    Terms("row_biases_window", replace(_ODD, window=9), num_distances=9),
    Terms("many_row_terms", _MANY, num_distances=70, has_row_sinks=True),
    Terms("row_biases_of_all", _ODD, num_distances=2 * max(LENGTHS)),
)
LONG_TERMS = (
    Terms("sinks", _ODD, has_sinks=True),
    Terms("biases", _ODD, has_biases=True),
    Terms("distances", _ODD, has_biases=True, is_by_distance=True),
    Terms("chunks", replace(_ODD, window=700, is_chunked=True)),
    Terms("long_chunks", replace(_ODD, window=SECTION + 190, is_chunked=True), has_sinks=True),
)
LONG_ROW_TERMS = (
    Terms("row_terms", _ODD, num_distances=SECTION + 100, has_row_sinks=True),
    Terms("near_row_terms", _WIDE, num_distances=40, has_row_sinks=True),
)


def cases(terms: Sequence[Terms], slow: Sequence[Terms], *columns: Sequence[Any]) -> list[Any]:
    """Return each of `terms` with values of the columns in turn, and all other combinations."""
    others = product(slow, *columns)
    return [
        *in_turn(terms, *columns),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in others),
    ]


def name_of(value: object) -> str:
    return value.name if isinstance(value, Terms) else str(value)


def make_layer(
    texts: Texts, terms: Terms, backend: AttentionBackend, length: int = max(LENGTHS)
) -> PagedLayer:
    """Return an empty layer with random sinks, and biases that grow with the position.

    Texts get random terms of their rows.
    """
    generator = torch.Generator().manual_seed(8)
    sinks = biases = None
    heads, counts = terms.spec.num_heads, [len(rows[0]) for rows in texts.rows]
    if terms.num_distances:
        shapes = [(count, heads, terms.num_distances) for count in counts]
        texts.biases = [torch.randn(s, generator=generator).to(texts.dtype) * 2 for s in shapes]
    if terms.has_row_sinks:
        texts.sinks = [torch.randn(count, heads, generator=generator) * 2 for count in counts]
    if terms.has_sinks:
        sinks = torch.randn(terms.spec.num_heads, generator=generator) * 2
    if terms.has_biases:
        slopes = 2.0 ** -torch.arange(1, terms.spec.num_heads + 1)
        first = LONG if terms.is_by_distance else 0  # the table is longer than the texts
        biases = slopes[:, None] * torch.arange(-first, length + ROOM)
        biases[:, first + length :] = torch.nan  # read, and never seen
    origin = biases.shape[1] - ROOM - 1 if biases is not None and terms.is_by_distance else None
    return texts.layer(backend, sinks, biases, origin)


def plain_backend(spec: LayerSpec, block_size: int, dtype: torch.dtype) -> SdpaBackend:
    return SdpaBackend({Rule(0, spec.window, spec.is_chunked)}, block_size, dtype, CPU)


def exact(layer: PagedLayer, texts: Texts, text: int, positions: torch.Tensor) -> torch.Tensor:
    """Return what some positions of a text get, in float64."""
    spec = layer.spec
    query, key, value = (each.double() for each in texts.rows[text])
    heads = torch.arange(spec.num_heads) // (spec.num_heads // spec.num_kv_heads)
    keys = torch.arange(len(key))
    scores = torch.einsum("qhd,khd->hqk", query[positions], key[:, heads]) * SCALE
    if layer.biases is not None:
        columns = keys[None] if layer.bias_origin is None else keys - positions[:, None]
        columns = (columns + (layer.bias_origin or 0)).clamp(max=layer.biases.shape[1] - 1)
        scores += layer.biases[:, columns].double()  # those of later keys are hidden
    distances = positions[:, None] - keys
    for position, row in enumerate(positions.tolist()):
        if texts.biases is not None:
            own = texts.biases[text][row].double()
            is_near = (distances[position] >= 0) & (distances[position] < own.shape[1])
            scores[:, position, is_near] += own[:, distances[position, is_near]]
    seen = keys <= positions[:, None]
    if spec.window is not None and spec.is_chunked:
        seen &= keys // spec.window == positions[:, None] // spec.window
    elif spec.window is not None:
        seen &= keys > positions[:, None] - spec.window
    scores = scores.masked_fill(~seen, -torch.inf)
    if layer.sinks is not None or texts.sinks is not None:
        of_rows = None if texts.sinks is None else texts.sinks[text][positions].double()
        of_layer = None if layer.sinks is None else layer.sinks.double()[:, None, None]
        sinks = of_layer if of_rows is None else of_rows.t()[:, :, None]
        assert sinks is not None
        scores = torch.cat([scores, sinks.expand(-1, len(positions), 1)], dim=-1)
    weights = scores.softmax(-1)[..., : len(key)]
    return torch.einsum("hqk,khd->qhd", weights, value[:, heads])


def check_values(texts: Texts, layer: PagedLayer, tolerance: float) -> None:
    """Compute all texts in two steps: the second one reads what the first one has stored."""
    half = [(i, 0, (length + 1) // 2) for i, length in enumerate(LENGTHS)]
    rest = [(i, done, LENGTHS[i] - done) for i, _, done in half if LENGTHS[i] > done]
    for parts in (half, rest):
        for (i, start, count), found in zip(parts, texts.attend(layer, parts), strict=True):
            want = exact(layer, texts, i, torch.arange(start, start + count))
            torch.testing.assert_close(found.double(), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("terms", "dtype", "block_size"),
    cases(SHORT_TERMS, SHORT_ROW_TERMS, DTYPES, [4, 16]),
    ids=name_of,
)
def test_both_backends_give_what_float64_gives(
    terms: Terms, dtype: torch.dtype, block_size: int
) -> None:
    texts = Texts(terms.spec, block_size, dtype)
    tolerance = 2e-5 if dtype == torch.float32 else 4e-2
    native = native_backend(block_size, dtype, [terms.spec.window], specs=[terms.spec])
    for backend in (native, plain_backend(terms.spec, block_size, dtype)):
        check_values(texts, make_layer(texts, terms, backend), tolerance)


@pytest.mark.parametrize(
    ("terms", "dtype", "format"),
    cases(SHORT_TERMS, SHORT_ROW_TERMS, DTYPES, [KVFormat.INT8, KVFormat.FP8]),
    ids=name_of,
)
def test_codes_have_the_same_terms(terms: Terms, dtype: torch.dtype, format: KVFormat) -> None:
    texts = Texts(terms.spec, 16, dtype, format=format)
    for rows in texts.rows:
        rows[1], rows[2] = (round_rows(each.float(), format).to(dtype) for each in rows[1:])
    backend = native_backend(16, dtype, [terms.spec.window], specs=[terms.spec], format=format)
    check_values(texts, make_layer(texts, terms, backend), 4e-2)


@pytest.mark.parametrize(
    ("terms", "dtype"), cases(SHORT_TERMS, SHORT_ROW_TERMS, DTYPES), ids=name_of
)
def test_bits_do_not_depend_on_the_cut(terms: Terms, dtype: torch.dtype) -> None:
    texts = Texts(terms.spec, 16, dtype)
    backend = native_backend(16, dtype, [terms.spec.window], specs=[terms.spec])
    together = texts.attend(
        make_layer(texts, terms, backend), [(i, 0, length) for i, length in enumerate(LENGTHS)]
    )
    for i, length in enumerate(LENGTHS):
        for chunk in (1, 7, 32):
            layer, rows = make_layer(texts, terms, backend), []
            for start in range(0, length, chunk):
                rows += texts.attend(layer, [(i, start, min(chunk, length - start))])
            assert torch.equal(together[i], torch.cat(rows))


@pytest.mark.parametrize(("terms", "dtype"), cases(LONG_TERMS, LONG_ROW_TERMS, DTYPES), ids=name_of)
def test_sections_are_merged_with_the_terms_once(terms: Terms, dtype: torch.dtype) -> None:
    texts = Texts(terms.spec, 16, dtype, (LONG, 20))
    backend = native_backend(16, dtype, [terms.spec.window], specs=[terms.spec])
    layer = make_layer(texts, terms, backend, LONG)
    torch.set_num_threads(1)
    expected, _ = texts.attend(layer, [(0, 0, LONG), (1, 0, 20)])
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    some = torch.arange(LONG)[::37]
    want = exact(layer, texts, 0, some)
    torch.testing.assert_close(expected[some].double(), want, rtol=tolerance, atol=tolerance)
    num_splits = 0
    for num_threads in (2, 4):
        torch.set_num_threads(num_threads)
        for start in (SECTION - 1, SECTION, 1399, 1400, 2 * SECTION + 1, LONG - 1):
            for count in (1, 11):
                end = min(start + count, LONG)
                (rows,) = texts.attend(layer, [(0, start, end - start)])
                num_splits += backend.steps[0].num_splits
                assert torch.equal(rows, expected[start:end])
    assert num_splits > 0


@pytest.mark.parametrize("backend_of", [native_backend, plain_backend])
def test_a_sink_far_above_all_scores_takes_all_weight_and_one_far_below_none(
    backend_of: object,
) -> None:
    """A sink far above all scores leaves nothing; one far below changes nothing."""
    texts = Texts(_ODD, 16, torch.float32)
    parts = [(i, 0, length) for i, length in enumerate(LENGTHS)]
    backend: AttentionBackend
    if backend_of is native_backend:
        backend = native_backend(16, torch.float32)
    else:
        backend = plain_backend(_ODD, 16, torch.float32)
    without = texts.attend(texts.layer(backend), parts)
    sinks = torch.tensor([1e4, -1e4, -torch.inf])
    for found, plain in zip(texts.attend(texts.layer(backend, sinks), parts), without, strict=True):
        assert found[:, 0].abs().max() < 1e-30
        torch.testing.assert_close(found[:, 1:], plain[:, 1:])


@pytest.mark.parametrize("format", KVFormat, ids=str)
def test_a_layer_that_shares_kv_stores_nothing(format: KVFormat) -> None:
    texts = Texts(_WIDE, 16, torch.float32, format=format)
    sharing = replace(_WIDE, kv_source=0)
    backends: list[AttentionBackend] = [native_backend(16, torch.float32, format=format)]
    if format is KVFormat.PLAIN:
        backends.append(plain_backend(_WIDE, 16, torch.float32))
    # One step of single tokens, which read all that they need from the pool.
    parts = [(i, length - 1, 1) for i, length in enumerate(LENGTHS)]
    for backend in backends:
        owner = texts.layer(backend)
        texts.attend(owner, [(i, 0, length) for i, length in enumerate(LENGTHS)])
        expected = texts.attend(owner, parts)
        stored = owner.kv.keys.clone()
        texts.rows = [[query, key + 1, value + 1] for query, key, value in texts.rows]
        found = texts.attend(replace(owner, spec=sharing), parts)
        assert torch.equal(owner.kv.keys, stored)
        assert all(map(torch.equal, found, expected))

"""The native kernel equals the plain backend, with the same bits however the work is cut."""

import copy
import shutil
from array import array
from itertools import product

import pytest
import torch

from tests.combinations import in_turn
from tests.worker.attention.texts import (
    CODES,
    CPU,
    DTYPES,
    LATENT_SPECS,
    LENGTHS,
    NUM_BLOCKS,
    SCALE,
    SPECS,
    Texts,
    native_backend,
)
from worker_proc.attention.interface import PagedLayer
from worker_proc.attention.native import can_attend
from worker_proc.attention.sdpa import Rule, SdpaBackend
from worker_proc.kv.kv_format import KVFormat, round_rows
from worker_proc.kv.kv_groups import LayerSpec
from worker_proc.native.build import build, compiler, library_path
from worker_proc.native.kernels import NativeLibrary, load_library

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")


FULL_GROUPS = LayerSpec(num_heads=8, num_kv_heads=2, head_dim=32, value_head_dim=32, window=None)
TINY = 2.0**-64
"""A factor of values whose squares are not normal numbers of bfloat16 or float32."""


@pytest.fixture(scope="module")
def with_floats(tmp_path_factory: pytest.TempPathFactory) -> NativeLibrary:
    """The same, where products of float32 are faster."""
    copied = tmp_path_factory.mktemp("native") / "copy.so"
    shutil.copy(build(), copied)
    return NativeLibrary(copied, uses_tiles=False, uses_floats=True)


def in_chunks(texts: Texts, layer: PagedLayer, chunk: int) -> list[torch.Tensor]:
    """Attend step by step to all texts that have not ended, and return each text's rows."""
    rows: list[list[torch.Tensor]] = [[] for _ in LENGTHS]
    for start in range(0, max(LENGTHS), chunk):
        left = [(i, start, min(chunk, length - start)) for i, length in enumerate(LENGTHS)]
        parts = [part for part in left if part[2] > 0]
        for (i, _, _), found in zip(parts, texts.attend(layer, parts), strict=True):
            rows[i].append(found)
    return [torch.cat(each) for each in rows]


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.usefixtures("two_threads")
def test_vectors_compute_what_tiles_do(spec: LayerSpec, without_tiles: NativeLibrary) -> None:
    texts = Texts(spec, 16, torch.bfloat16)
    parts = [(i, 0, length) for i, length in enumerate(LENGTHS)]
    outputs = []
    for library in (None, without_tiles):
        layer = texts.layer(native_backend(16, torch.bfloat16, library=library))
        outputs.append(torch.cat(texts.attend(layer, parts)))
        assert torch.equal(torch.cat(in_chunks(texts, texts.layer(layer.backend), 1)), outputs[-1])
    torch.testing.assert_close(outputs[0], outputs[1], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("spec", "scale", "format"), in_turn(SPECS, (1.0, TINY), KVFormat), ids=str
)
@pytest.mark.usefixtures("two_threads")
def test_floats_give_the_bits_of_pairs(
    spec: LayerSpec,
    scale: float,
    format: KVFormat,
    without_tiles: NativeLibrary,
    with_floats: NativeLibrary,
) -> None:
    texts = Texts(spec, 16, torch.bfloat16, format=format)
    texts.rows = [[row * scale for row in rows] for rows in texts.rows]
    parts = [(i, 0, length) for i, length in enumerate(LENGTHS)]
    outputs = []
    for library in (without_tiles, with_floats):
        layer = texts.layer(native_backend(16, torch.bfloat16, library=library, format=format))
        outputs.append(torch.cat(texts.attend(layer, parts)))
    assert torch.equal(*outputs)
    layer = texts.layer(native_backend(16, torch.bfloat16, library=with_floats, format=format))
    assert torch.equal(torch.cat(in_chunks(texts, layer, 1)), outputs[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("spec", "block_size", "softcap"),
    in_turn(SPECS, [1, 4, 16, 24, 32, 48], [None, 1.5]),
    ids=str,
)
def test_equals_the_plain_backend(
    spec: LayerSpec, block_size: int, dtype: torch.dtype, softcap: float | None
) -> None:
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    check_against_the_plain_backend(spec, block_size, dtype, softcap, tolerance)


@pytest.mark.parametrize(
    ("spec", "block_size", "dtype"), in_turn(LATENT_SPECS, [1, 24, 16, 48], DTYPES), ids=str
)
@pytest.mark.usefixtures("two_threads")
def test_latent_rows_equal_the_plain_backend(
    spec: LayerSpec, block_size: int, dtype: torch.dtype
) -> None:
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2  # more dimensions, and greater scores
    check_against_the_plain_backend(spec, block_size, dtype, None, tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spec", LATENT_SPECS, ids=str)
def test_latent_rows_give_what_float64_gives(spec: LayerSpec, dtype: torch.dtype) -> None:
    texts = Texts(spec, 16, dtype)
    layer = texts.layer(native_backend(16, dtype))
    found = texts.attend(layer, [(i, 0, length) for i, length in enumerate(LENGTHS)])
    for rows, got in zip(texts.rows, found, strict=True):
        query, key, value = (each.double() for each in rows)
        distance = torch.arange(len(key))[:, None] - torch.arange(len(key))
        hidden = (distance < 0) | (distance >= (spec.window or len(key)))
        scores = torch.einsum("qhd,kd->hqk", query, key[:, 0]) * 0.3
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        exact = torch.einsum("hqk,kd->qhd", weights, value[:, 0])
        error = (got - exact).norm(dim=-1) / exact.norm(dim=-1)
        assert float(error.max()) < (1e-5 if dtype == torch.float32 else 4e-3)


def check_against_the_plain_backend(
    spec: LayerSpec, block_size: int, dtype: torch.dtype, softcap: float | None, tolerance: float
) -> None:
    """Compute two steps with both backends: the second one reads what the first has stored."""
    texts = Texts(spec, block_size, dtype)
    plain = texts.layer(SdpaBackend({Rule(0, spec.window)}, block_size, dtype, CPU))
    native = texts.layer(native_backend(block_size, dtype))
    half = [(i, 0, (length + 1) // 2) for i, length in enumerate(LENGTHS)]
    rest = [(i, done, LENGTHS[i] - done) for i, _, done in half if LENGTHS[i] > done]
    for parts in (half, rest):
        for want, got in zip(
            texts.attend(plain, parts, softcap), texts.attend(native, parts, softcap), strict=True
        ):
            torch.testing.assert_close(want, got, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("format", CODES, ids=str)
@pytest.mark.parametrize(
    ("spec", "block_size", "dtype", "softcap"),
    in_turn(SPECS, [1, 16, 24, 48], DTYPES, [None, 1.5]),
    ids=str,
)
def test_codes_are_attended_to_as_what_they_stand_for(
    spec: LayerSpec, block_size: int, softcap: float | None, dtype: torch.dtype, format: KVFormat
) -> None:
    """The plain backend, in float32, is given the rounded rows."""
    texts = Texts(spec, block_size, dtype, format=format)
    for i, rows in enumerate(texts.rows):
        for kind in (1, 2):  # some tokens much greater or smaller than others
            rows[kind] *= torch.logspace(-1.5, 1, LENGTHS[i]).view(-1, 1, 1).to(dtype)
            rows[kind][LENGTHS[i] // 2, 0] = 0.0
    rounded = Texts(spec, block_size, torch.float32)
    rounded.rows = [
        [query.float(), round_rows(key.float(), format), round_rows(value.float(), format)]
        for query, key, value in texts.rows
    ]
    plain = rounded.layer(SdpaBackend({Rule(0, spec.window)}, block_size, torch.float32, CPU))
    native = texts.layer(native_backend(block_size, dtype, format=format))
    half = [(i, 0, (length + 1) // 2) for i, length in enumerate(LENGTHS)]
    rest = [(i, done, LENGTHS[i] - done) for i, _, done in half if LENGTHS[i] > done]
    for parts in (half, rest):
        for want, got in zip(
            rounded.attend(plain, parts, softcap), texts.attend(native, parts, softcap), strict=True
        ):
            error = (got.float() - want).norm(dim=-1) / want.norm(dim=-1).clamp_min(1e-3)
            assert float(error.max()) < (1e-4 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize(
    ("spec", "format", "dtype"),
    [
        *in_turn(SPECS, KVFormat, DTYPES),
        *product(LATENT_SPECS, [KVFormat.PLAIN], DTYPES),
    ],
    ids=str,
)
@pytest.mark.usefixtures("two_threads")
def test_a_row_has_the_same_bits_in_every_batch_and_chunk(
    spec: LayerSpec, dtype: torch.dtype, format: KVFormat
) -> None:
    texts = Texts(spec, 16, dtype, format=format)
    backend = native_backend(16, dtype, format=format)
    together = texts.attend(
        texts.layer(backend), [(i, 0, length) for i, length in enumerate(LENGTHS)]
    )
    for i, length in enumerate(LENGTHS):
        (alone,) = texts.attend(texts.layer(backend), [(i, 0, length)])
        assert torch.equal(together[i], alone)
    for chunk in (1, 7):
        rows = in_chunks(texts, texts.layer(backend), chunk)
        assert all(map(torch.equal, together, rows))


@pytest.mark.parametrize(
    ("kernel", "spec", "format"),
    in_turn(
        [
            (16, True, torch.bfloat16),
            (48, False, torch.bfloat16),
            (48, True, torch.float32),
            (16, False, torch.bfloat16),
            (48, True, torch.bfloat16),
            (16, True, torch.float32),
        ],
        [SPECS[0], SPECS[1], SPECS[5], FULL_GROUPS],
        KVFormat,
    ),
    ids=str,
)
@pytest.mark.usefixtures("two_threads")
def test_a_shared_prefix_is_read_once_and_changes_no_bit(
    kernel: tuple[int, bool, torch.dtype],
    spec: LayerSpec,
    format: KVFormat,
    without_tiles: NativeLibrary,
) -> None:
    """Rows of a group have the bits that each has alone, whatever part of their text is shared."""
    block_size, uses_tiles, dtype = kernel
    texts = Texts(spec, block_size, dtype, format=format)
    longest = len(LENGTHS) - 1
    library = None if uses_tiles else without_tiles
    backend = native_backend(block_size, dtype, library=library, specs=[spec], format=format)
    layer, length = texts.layer(backend), LENGTHS[longest]
    common = texts.requests[longest].block_tables[0]
    used = {block for request in texts.requests for block in request.block_tables[0]}
    free = iter(sorted(set(range(1, NUM_BLOCKS)) - used))
    for i in range(24):
        num_common = (0, 3, len(common) - 1)[i % 3]
        own = array("i", [next(free) for _ in common[num_common:]])
        request = copy.copy(texts.requests[longest])
        request.block_tables = [common[:num_common] + own]
        texts.requests.append(request)
        texts.rows.append(texts.rows[longest])
        (rows,) = texts.attend(layer, [(len(texts.requests) - 1, 0, length)])
    sharing = range(len(LENGTHS), len(texts.requests))
    # Some contexts end with a span, and one part is a chunk.
    parts = [(index, length - 1 - index % 24, 1) for index in sharing]
    parts.insert(5, (longest, 3, length - 3))
    together = texts.attend(layer, parts)
    num_chunk_items = -(-(length - 3) // backend.steps[0].item_size)
    num_other_pieces = backend.steps[0].num_pieces - num_chunk_items
    assert 1 < num_other_pieces < len(sharing)
    for (_, start, count), got in zip(parts, together, strict=True):
        assert torch.equal(rows[start : start + count], got)


@pytest.mark.parametrize(
    ("dtype", "uses_tiles"),
    [(torch.bfloat16, True), (torch.bfloat16, False), (torch.float32, False)],
    ids=str,
)
@pytest.mark.parametrize("rise", [-0.3, 0.05, 0.15, 0.3, 4.0])
def test_scores_may_rise_and_fall_with_the_position(
    rise: float, dtype: torch.dtype, uses_tiles: bool, without_tiles: NativeLibrary
) -> None:
    """Slowly, within the bound up to which weights stay relative to an earlier score, and fast."""
    texts = Texts(SPECS[0], 16, dtype, lengths=(300,))
    query, key, value = texts.rows[0]
    query[..., 0] = 1
    key[..., 0] = (rise / SCALE * torch.arange(300))[:, None]
    library = None if uses_tiles else without_tiles
    layer = texts.layer(native_backend(16, dtype, library=library))
    (found,) = texts.attend(layer, [(0, 0, 300)])
    heads = [each.double().transpose(0, 1) for each in (query, key, value)]
    wanted = torch.nn.functional.scaled_dot_product_attention(
        *heads, is_causal=True, scale=SCALE, enable_gqa=True
    )
    tolerance = 2e-2 if dtype == torch.bfloat16 else 2e-3  # scores are as large as 1,200
    torch.testing.assert_close(
        found.double(), wanted.transpose(0, 1), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("uses_tiles", [True, False])
def test_a_score_that_is_not_a_number_reaches_the_result(
    uses_tiles: bool, without_tiles: NativeLibrary
) -> None:
    """It does so even if it is the only one of its span."""
    texts = Texts(SPECS[0], 16, torch.bfloat16)
    library = None if uses_tiles else without_tiles
    layer = texts.layer(native_backend(16, torch.bfloat16, library=library))
    longest = len(LENGTHS) - 1
    texts.rows[longest][1][51] = torch.nan
    (rows,) = texts.attend(layer, [(longest, 0, LENGTHS[longest])])
    assert rows[51:].isnan().all()
    assert rows[:51].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spec", LATENT_SPECS, ids=str)
def test_a_latent_row_that_is_not_a_number_changes_no_row_before_it(
    spec: LayerSpec, dtype: torch.dtype
) -> None:
    """It is in the values, too, which a weight of zero does not remove."""
    texts = Texts(spec, 16, dtype)
    backend = native_backend(16, dtype)
    whole = [(len(LENGTHS) - 1, 0, LENGTHS[-1])]
    (expected,) = texts.attend(texts.layer(backend), whole)
    for place in (3, 50, LENGTHS[-1] - 1):
        before = texts.rows[-1][1][place, 0, 1].clone()
        texts.rows[-1][1][place, 0, 1] = torch.nan
        (rows,) = texts.attend(texts.layer(backend), whole)
        assert torch.equal(rows[:place], expected[:place])
        assert rows[place].isnan().all()
        texts.rows[-1][1][place, 0, 1] = before


@pytest.mark.parametrize(
    ("kernel", "spec", "kind"),
    in_turn(
        [
            (dtype, uses_tiles, format)
            for dtype, uses_tiles in (
                (torch.float32, True),
                (torch.bfloat16, True),
                (torch.bfloat16, False),
            )
            for format in KVFormat
        ],
        SPECS[:2],
        [1, 2],  # keys, values
    ),
    ids=str,
)
@pytest.mark.usefixtures("two_threads")
def test_a_token_changes_no_row_before_it(
    spec: LayerSpec,
    kernel: tuple[torch.dtype, bool, KVFormat],
    kind: int,
    without_tiles: NativeLibrary,
) -> None:
    """Its key or value may be NaN, which a weight of zero does not remove."""
    dtype, uses_tiles, format = kernel
    texts = Texts(spec, 16, dtype, format=format)
    library = None if uses_tiles else without_tiles
    backend = native_backend(16, dtype, library=library, format=format)
    longest = len(LENGTHS) - 1
    whole = [(longest, 0, LENGTHS[longest])]
    (expected,) = texts.attend(texts.layer(backend), whole)
    given = texts.rows[longest][kind]
    for place in (3, 50, LENGTHS[longest] - 1):
        texts.rows[longest][kind] = given.clone()
        texts.rows[longest][kind][place, -1, 1] = torch.nan
        (rows,) = texts.attend(texts.layer(backend), whole)
        assert torch.equal(rows[:place], expected[:place])
        last_head = rows[place, -1] if kind == 1 else rows[place, -1, 1]
        assert last_head.isnan().all()


def test_rows_of_the_null_slot_leave_no_trace() -> None:
    """A fully cached prompt's last token attends to the stored KV, and stores none."""
    texts = Texts(SPECS[0], 16, torch.float32)
    layer = texts.layer(native_backend(16, torch.float32))
    length = LENGTHS[-1]
    index = len(LENGTHS) - 1
    texts.attend(layer, [(index, 0, length)])
    keys, values = layer.kv.keys.clone(), layer.kv.values.clone()
    texts.requests[index].num_cached_tokens = length
    for kind in (1, 2):
        texts.rows[index][kind][-1] += 1
    texts.attend(layer, [(index, length - 1, 1)])
    assert torch.equal(keys, layer.kv.keys)
    assert torch.equal(values, layer.kv.values)
    assert not keys[0].any()


def test_refuses_what_the_kernel_does_not_cover() -> None:
    spec = SPECS[0]
    assert can_attend([spec], torch.bfloat16, CPU)
    assert not can_attend([spec], torch.float16, CPU)
    assert not can_attend([LayerSpec(4, 4, 1024, 64, None)], torch.float32, CPU)
    assert can_attend([LayerSpec(64, 1, 64, 64, None)], torch.float32, CPU)
    encoder = LayerSpec(64, 1, 64, 64, None, is_causal=False)
    assert not can_attend([encoder], torch.float32, CPU)
    assert can_attend(LATENT_SPECS, torch.float32, CPU)
    assert not can_attend([LayerSpec(4, 1, 656, 512, None, is_latent=True)], torch.float32, CPU)
    assert not can_attend([LayerSpec(4, 1, 576, 528, None, is_latent=True)], torch.float32, CPU)


def test_nothing_is_loaded_that_was_not_built(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert not library_path().exists()
    assert load_library() is None

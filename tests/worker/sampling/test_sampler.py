"""Properties of the sampler: exactness, purity, order of stages, logprobs, robustness.

`reference_token` states the whole algorithm in plain Python over a fully sorted vocabulary; the
sampler, which avoids sorting, must agree with it token for token.
"""

import itertools
import math
import random
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from protocol.sampling import SamplingParams
from tests.combinations import in_turn
from tests.worker.sampling.rows import (
    CPU,
    EOS,
    VOCAB,
    WORD,
    Row,
    make_row,
    philox_words,
    random_logits,
    random_rows,
    reference_token,
)
from worker_proc.native.kernels import NativeLibrary
from worker_proc.sampling.inverse_cdf import (
    Filters,
    _distance,
    _weigh,
    sample_full,
    sample_top_k,
    scale,
)
from worker_proc.sampling.philox import draw, philox4x32
from worker_proc.sampling.sampler import Sampler

LIBRARY: NativeLibrary | None = None
"""Set for each test."""


@pytest.fixture(autouse=True)
def _choice(sampling_library: NativeLibrary | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test with both ways to choose tokens."""
    monkeypatch.setattr(sys.modules[__name__], "LIBRARY", sampling_library)


def _sampler(vocab_size: int = VOCAB) -> Sampler:
    return Sampler(vocab_size, EOS, CPU, LIBRARY)


def _tokens(logits: Tensor, rows: Sequence[Row]) -> list[int]:
    return _sampler(logits.shape[1]).sample(logits, rows).token_ids


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([WORD] * 4, [WORD] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_gives_the_known_answers(
    counter: list[int], key: list[int], expected: list[int]
) -> None:
    """The generator is Random123's philox4x32-10, also with neighbours in the tensor."""
    counters = torch.tensor([counter, [9, 8, 7, 6]]).T
    keys = torch.tensor([key, [5, 4]]).T
    assert philox4x32(counters, keys)[:, 0].tolist() == expected


def test_draw_reads_all_bits_of_seed_and_position() -> None:
    """Draws equal the plain-Python generator's for extreme and negative seeds, far positions."""
    seeds = [0, 1, -1, -(2**63), 2**63 - 1, 2**32, 2**31]
    positions = [0, 1, 2**31, 2**32 + 5, 7, 7, 2**20]
    expected = []
    for seed, position in zip(seeds, positions, strict=True):
        words = philox_words(seed, position)
        expected.append((words[0] << 32 | words[1]) >> 2)
    assert draw(seeds, positions).tolist() == expected


def test_scale_is_exact() -> None:
    """Scaling a 62-bit draw to a total equals arbitrary-precision arithmetic at every corner."""
    rng = random.Random(1)
    numbers = [0, 1, 2**31 - 1, 2**31, 2**40, 2**62 - 1, *(rng.getrandbits(62) for _ in range(30))]
    draws, totals = zip(*itertools.product(numbers, numbers), strict=True)
    scaled = scale(torch.tensor(draws), torch.tensor(totals)).tolist()
    assert scaled == [(a * b) >> 62 for a, b in zip(draws, totals, strict=True)]


@pytest.mark.parametrize("top_p", [1.0, 0.75])
def test_draws_at_the_corners_take_their_token(top_p: float) -> None:
    """Each token owns [its sum before, its sum): first, last and boundary draws take it."""
    scores = torch.tensor([[-50.0, 1.0, 1.0, -math.inf, 1.0, 1.0, -math.inf]])
    owners = [1, 2, 4] + ([5] if top_p == 1.0 else [])  # 0.75 of the mass ends with the third
    total = len(owners) * 2**40
    for place, owner in enumerate(owners):
        for target in (place * 2**40, (place + 1) * 2**40 - 1):
            at = torch.tensor([-(-(target << 62) // total)])
            one = torch.ones(1)
            filters = Filters(one, torch.zeros(1).double(), torch.tensor([top_p]).double(), at)
            full = sample_full(scores, filters, with_top_p=top_p < 1.0)
            assert full.tolist() == [owner]
            assert sample_top_k(scores, filters, torch.tensor([6])).tolist() == [owner]


@pytest.mark.parametrize("top_k", [0, 5])
def test_top_p_ends_with_the_token_that_reaches_it_exactly(top_k: int) -> None:
    """Of four equal tokens 0.75 keeps three, and each of them is drawn."""
    logits = torch.full((300, VOCAB), -math.inf)
    logits[:, [7, 30, 31, 400]] = 1.5
    rows = [make_row(SamplingParams(seed=seed, top_p=0.75, top_k=top_k)) for seed in range(300)]
    assert set(_tokens(logits, rows)) == {7, 30, 31}


def test_top_p_may_end_far_from_the_best_token() -> None:
    """Half of the tokens that are 12.2 nats under the best one are kept: those with low ids."""
    vocab_size = 30_000
    logits = torch.zeros(1, vocab_size)
    logits[0, 7] = 12.2
    others = vocab_size * math.exp(-12.2)
    top_p = (1 + others / 2) / (1 + others)
    rows = [make_row(SamplingParams(seed=seed, top_p=top_p)) for seed in range(80)]
    found = set(_tokens(logits.expand(80, -1), rows)) - {7}
    assert len(found) > 2
    assert max(found) < vocab_size * 0.51


@pytest.mark.parametrize("seed", range(4))
def test_equals_full_sort_reference(seed: int) -> None:
    """Random parameters and bf16 logits full of ties give the tokens of a plain sorted version."""
    logits = random_logits(160, seed, spread=(0.02, 1.0, 3.0, 12.0)[seed])
    rows = random_rows(160, seed)
    expected = [reference_token(logits[i], row) for i, row in enumerate(rows)]
    assert _tokens(logits, rows) == expected


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_other_dtypes_equal_reference(dtype: torch.dtype) -> None:
    """Any float dtype works, and gives the reference's tokens."""
    logits = (random_logits(60, 8).double() + 1e-3 * random_logits(60, 9).double()).to(dtype)
    rows = random_rows(60, 8)
    expected = [reference_token(logits[i], row) for i, row in enumerate(rows)]
    assert _tokens(logits, rows) == expected


def test_large_vocabulary_equals_reference() -> None:
    """The vocabulary spans many buckets, vector widths and threads."""
    logits = random_logits(6, 3, vocab_size=49152)
    shapes: list[dict[str, Any]] = [{}, {"top_p": 0.9}, {"top_k": 50}, {"top_k": 1000}]
    shapes += [{"min_p": 0.02}, {"temperature": 0.2}]
    rows = [make_row(SamplingParams(seed=i, **kw)) for i, kw in enumerate(shapes)]
    assert _tokens(logits, rows) == [reference_token(logits[i], row) for i, row in enumerate(rows)]


def test_token_does_not_depend_on_the_batch() -> None:
    """It is the same alone, in a shuffled batch of 32, in another split, and after others."""
    logits, rows = random_logits(32, 5), random_rows(32, 5)
    sampler = _sampler()
    alone = [sampler.sample(logits[i : i + 1], [row]) for i, row in enumerate(rows)]
    rng = random.Random(0)
    for size in (32, 32, 11, 2):
        order = rng.sample(range(32), size)
        result = sampler.sample(logits[order], [rows[i] for i in order])
        assert result.token_ids == [alone[i].token_ids[0] for i in order]
        assert result.logprobs == [alone[i].logprobs[0] for i in order]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab_size", [509, 4096, 50_257])
def test_logprobs_and_weights_are_the_same_bits_in_every_batch(
    vocab_size: int, dtype: torch.dtype
) -> None:
    """Rows end inside vectors, so that each row lies at another offset."""
    logits = random_logits(9, seed=3, spread=4.0, vocab_size=vocab_size).to(dtype)
    params = SamplingParams(temperature=0.7, seed=5, logprobs=4)
    sampler = _sampler(vocab_size)
    alone = [sampler.sample(logits[i : i + 1], [make_row(params)]) for i in range(len(logits))]
    weights = [_weights(logits[i : i + 1], params) for i in range(len(logits))]
    for rows in ([3, 0], [8, 1, 2, 7], list(range(9))[::-1]):
        together = sampler.sample(logits[rows], [make_row(params)] * len(rows))
        for place, row in enumerate(rows):
            assert together.logprobs[place] == alone[row].logprobs[0]
            assert together.token_ids[place] == alone[row].token_ids[0]
        assert torch.equal(_weights(logits[rows], params), torch.cat([weights[i] for i in rows]))


def _weights(logits: Tensor, params: SamplingParams) -> Tensor:
    """The integer weights that tokens are drawn by."""
    columns = [torch.tensor([value] * len(logits)) for value in (params.temperature, 0.0, 1.0)]
    filters = Filters(columns[0].float(), columns[1].double(), columns[2].double(), columns[0])
    scores = logits.float()
    return _weigh(_distance(scores, scores.amax(dim=-1, keepdim=True), filters), filters)


def test_chunked_batches_equal_whole_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows are treated in chunks that fit the cache; their size changes nothing."""
    logits, rows = random_logits(64, 6), random_rows(64, 6)
    whole = _sampler().sample(logits, rows)
    monkeypatch.setattr("worker_proc.sampling.sampler._CPU_CHUNK_ELEMENTS", 3 * VOCAB)
    assert _sampler().sample(logits, rows) == whole


def test_inputs_stay_as_they_are() -> None:
    """Neither the logits nor the rows are written to, whatever the dtype."""
    rows = random_rows(40, 7)
    for logits in (random_logits(40), random_logits(40).float()):
        before, ids = logits.clone(), [list(row.token_ids) for row in rows]
        _sampler().sample(logits, rows)
        assert torch.equal(before, logits)
        assert ids == [row.token_ids for row in rows]


def test_only_seed_and_position_move_the_draw() -> None:
    """The prompt's and outputs' contents do not touch the draw; seed and length do."""
    logits = random_logits(1).expand(50, VOCAB)
    params = SamplingParams(seed=4)
    same = [make_row(params, [i, i + 1, i + 2]) for i in range(50)]
    assert len(set(_tokens(logits, same))) == 1
    assert len(set(_tokens(logits, [make_row(params, [0] * n) for n in range(1, 51)]))) > 10
    assert len(set(_tokens(logits, [make_row(SamplingParams(seed=i)) for i in range(50)]))) > 10
    split = [make_row(params, [1, 2, 3]), make_row(params, [1], [2, 3])]
    assert len(set(_tokens(logits[:2], split))) == 1


def _exact_probabilities(logits: Tensor, p: SamplingParams) -> list[float]:
    """Return the filtered softmax in double precision, by vocabulary id."""
    values, ids = (logits.double() / p.temperature).sort(descending=True, stable=True)
    probabilities = values.softmax(-1)
    probabilities[probabilities < p.min_p * probabilities[0]] = 0.0
    if p.top_k > 0:
        probabilities[p.top_k :] = 0.0
    probabilities /= probabilities.sum()
    before = probabilities.cumsum(-1) - probabilities
    probabilities[before >= p.top_p] = 0.0
    result = torch.zeros_like(probabilities)
    result[ids] = probabilities / probabilities.sum()
    return [float(x) for x in result]


@pytest.mark.parametrize(
    ("kwargs", "by"),
    in_turn(
        [
            {},
            {"temperature": 0.5},
            {"temperature": 2.0},
            {"top_p": 0.8},
            {"top_k": 5},
            {"min_p": 0.1},
            {"top_k": 12, "top_p": 0.7, "min_p": 0.02, "temperature": 1.3},
        ],
        ["seed", "position"],
    ),
    ids=str,
)
def test_draws_follow_the_filtered_softmax(kwargs: dict[str, Any], by: str) -> None:
    """Over many seeds, and over many positions of one seed, counts follow the filtered softmax."""
    vocab_size, num_draws = 24, 4000
    row_logits = random_logits(1, 11, vocab_size=vocab_size)[0].float()
    ids = [0] * num_draws
    if by == "seed":
        rows = [make_row(SamplingParams(seed=s * 7919, **kwargs)) for s in range(num_draws)]
    else:
        rows = [Row(SamplingParams(seed=3, **kwargs), ids[:n], 1) for n in range(1, num_draws + 1)]
    counts = Counter(_tokens(row_logits.expand(num_draws, -1), rows))
    probabilities = _exact_probabilities(row_logits, rows[0].sampling_params)
    assert set(counts) <= {i for i, p in enumerate(probabilities) if p > 0}
    # Cells with few expected draws are merged into one, as the test's approximation asks.
    expected = [(counts[i], p * num_draws) for i, p in enumerate(probabilities)]
    large = [(c, e) for c, e in expected if e >= 8.0]
    rest = (num_draws - sum(c for c, _ in large), num_draws - sum(e for _, e in large))
    cells = large + ([rest] if rest[1] > 1.0 else [])
    chi_square = sum((c - e) ** 2 / e for c, e in cells)
    freedom = len(cells) - 1
    assert chi_square < freedom + 4.5 * math.sqrt(2 * freedom)


def test_filters_that_leave_one_token_equal_greedy() -> None:
    """They are top_k=1, a tiny top_p, min_p=1 without ties, and a tiny temperature."""
    logits = random_logits(64, 12)
    logits[:, 100] = logits.max(dim=-1).values  # a tie at the top in most rows
    greedy = _tokens(logits, [make_row(SamplingParams(temperature=0.0))] * 64)
    shapes: list[dict[str, Any]] = [{"top_k": 1}, {"top_p": 1e-9}, {"top_k": 1, "min_p": 0.1}]
    for kwargs in shapes:
        rows = [make_row(SamplingParams(seed=i, **kwargs)) for i in range(64)]
        assert _tokens(logits, rows) == greedy
    untied = random_logits(64, 13).float()
    untied[:, 77] += 20.0
    shapes = [{"min_p": 1.0}, {"temperature": 2e-5}]
    for kwargs in shapes:
        rows = [make_row(SamplingParams(seed=i, **kwargs)) for i in range(64)]
        assert _tokens(untied, rows) == [77] * 64


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("num_rows", [1, 3, 40])
def test_greedy_takes_the_lowest_id_of_equals(dtype: torch.dtype, num_rows: int) -> None:
    """Ties go to the lowest id, as in argmax, with and without edits in the batch."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randint(0, 3, (num_rows, 5000), generator=generator).to(dtype)
    logits[:, : 1000 + num_rows] -= 5
    expected = [row.index(max(row)) for row in logits.tolist()]
    plain, edited = SamplingParams(temperature=0.0), SamplingParams(temperature=0.0, min_tokens=9)
    for params in (plain, edited):
        assert _tokens(logits, [make_row(params)] * num_rows) == expected

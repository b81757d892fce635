"""The native kernel and torch choose the same tokens, whatever a row asks for."""

import math
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest
import torch
from torch import Tensor

from protocol.sampling import SamplingParams
from tests.combinations import in_turn
from tests.worker.sampling.rows import CPU, EOS, Row, random_params
from worker_proc.grammar.masks import RowMasks
from worker_proc.native.build import build, compiler
from worker_proc.native.kernels import NativeLibrary
from worker_proc.sampling.row_edits import RowEdits
from worker_proc.sampling.sampler import Sampler

pytestmark = pytest.mark.usefixtures("two_threads")

NUM_ROWS = 96
DTYPES = (torch.bfloat16, torch.float32)
LARGE = 40_009


def make_row(rng: random.Random, vocab_size: int) -> Row:
    ids = [rng.randrange(vocab_size) for _ in range(rng.randrange(2, 30))]
    return Row(random_params(rng), ids, rng.randrange(1, len(ids)))


def _masks(rng: random.Random, num_words: int, vocab_size: int) -> RowMasks:
    """Return masks of all, none, one or about half of the tokens, for two thirds of the rows."""
    rows = [row for row in range(NUM_ROWS) if rng.random() < 2 / 3]
    words = []
    for _ in rows:
        kind = rng.randrange(4)
        line = [kind - 1 if kind < 2 else 0] * num_words  # none or all of them
        if kind == 2:
            line[rng.randrange(num_words)] = 1 << rng.randrange(31)
        elif kind == 3:
            line = [rng.getrandbits(32) - 2**31 for _ in range(num_words)]
        words.append(line)
    lines = {row: line for line, row in enumerate(rows)}
    return RowMasks(torch.tensor(words, dtype=torch.int32), lines, vocab_size)


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize(
    ("sizes", "dtype"),
    in_turn([(512, 16), (509, 16), (1003, 20), (700, 30)], DTYPES),
    ids=str,
)
def test_both_choose_the_same_tokens(sizes: tuple[int, int], dtype: torch.dtype) -> None:
    """Masks may have fewer or more tokens than the model, and rows may not be finite."""
    vocab_size, num_words = sizes
    native = Sampler(vocab_size, EOS, CPU, NativeLibrary(build()))
    portable = Sampler(vocab_size, EOS, CPU)
    for seed in range(6):
        rng = random.Random(seed)
        generator = torch.Generator().manual_seed(seed)
        spread = rng.choice([0.05, 1.0, 4.0, 40.0])
        logits = (torch.randn(NUM_ROWS, vocab_size, generator=generator) * spread).to(dtype)
        for row, value in enumerate((math.nan, math.inf, -math.inf)):
            logits[row, rng.randrange(vocab_size)] = value
            logits[8 + row] = value
        logits[20:30, : vocab_size // 2] = -math.inf
        rows = [make_row(rng, vocab_size) for _ in range(NUM_ROWS)]
        for masks in (None, _masks(rng, num_words, vocab_size)):
            found, expected = (each.sample(logits, rows, masks) for each in (native, portable))
            assert found == expected


def _flat(generator: torch.Generator) -> Tensor:
    return torch.randn(LARGE, generator=generator) * 2


def _peaked(generator: torch.Generator) -> Tensor:
    scores = _flat(generator)
    scores[torch.randperm(LARGE, generator=generator)[:300]] = torch.linspace(24, 6, 300)
    return scores


def _tail(generator: torch.Generator) -> Tensor:
    """Most of the weight is in tokens far under the best one."""
    return torch.cat([torch.tensor([13.0]), torch.rand(LARGE - 1, generator=generator)])


def _equal(_: torch.Generator) -> Tensor:
    return torch.full((LARGE,), 3.25)


def _few_values(generator: torch.Generator) -> Tensor:
    return torch.randint(0, 3, (LARGE,), generator=generator).float() * 2


def _few_tokens(generator: torch.Generator) -> Tensor:
    scores = torch.full((LARGE,), -math.inf)
    scores[torch.randperm(LARGE, generator=generator)[:5]] = 1.0
    return scores


def _extreme(generator: torch.Generator) -> Tensor:
    return torch.randn(LARGE, generator=generator).sign() * torch.finfo(torch.bfloat16).max


def _near_zero(generator: torch.Generator) -> Tensor:
    """Most scores differ from 0 by less than a rounding error of the best one."""
    scores = torch.randn(LARGE, generator=generator) * 1e-9
    scores[::3] = 0.0
    scores[:20] = torch.linspace(-1.0, 2.0, 20)
    return scores


def _negative(generator: torch.Generator) -> Tensor:
    return _flat(generator) - 60.0


def _against_the_sample(generator: torch.Generator) -> Tensor:
    """The tokens by which the kernel estimates where top_p ends are unlike all others."""
    scores = _flat(generator)
    for chunk in range(LARGE // 512):
        first = chunk * 512 + chunk * 7 % 32 * 16
        scores[first : first + 16] -= 9.0
    return scores


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize(
    ("make", "dtype"),
    in_turn(
        [
            *(_flat, _peaked, _tail, _equal, _few_values, _few_tokens, _extreme),
            *(_near_zero, _negative, _against_the_sample),
        ],
        DTYPES,
    ),
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_both_choose_the_same_tokens_of_large_vocabularies(
    make: Callable[[torch.Generator], Tensor], dtype: torch.dtype
) -> None:
    """top_k and top_p may end anywhere, whatever the kernel guesses of it."""
    native = Sampler(LARGE, EOS, CPU, NativeLibrary(build()))
    portable = Sampler(LARGE, EOS, CPU)
    logits = make(torch.Generator().manual_seed(1)).to(dtype).expand(24, -1)
    rng = random.Random(2)
    rows = []
    for seed in range(24):
        params = SamplingParams(
            seed=seed,
            temperature=rng.choice([2e-5, 0.5, 1.0, 1.0, 2.0]),
            top_p=[1e-9, 0.3, 0.95, 0.999, 1 - 1e-9, 1.0][seed % 6],
            top_k=rng.choice([0, 0, 0, 1, 40, 5000, LARGE - 1]),
            min_p=rng.choice([0.0, 0.0, 0.0, 1e-4, 0.1]),
        )
        rows.append(Row(params, [1, 2, 3], 2))
    assert native.sample(logits, rows) == portable.sample(logits, rows)


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize("make", [_flat, _peaked, _tail, _few_values, _near_zero])
@pytest.mark.parametrize("has_masks", [False, True])
def test_both_choose_the_same_tokens_of_large_vocabularies_with_edits(
    make: Callable[[torch.Generator], Tensor], has_masks: bool
) -> None:
    """The best tokens and others have penalties, alone and with some tokens allowed.

    In rows of few values, presence penalties give tokens the scores of others.
    """
    native = Sampler(LARGE, EOS, CPU, NativeLibrary(build()))
    portable = Sampler(LARGE, EOS, CPU)
    scores = make(torch.Generator().manual_seed(5)).bfloat16()
    best = scores.float().topk(60).indices.tolist()
    rng = random.Random(6)
    rows = []
    for seed in range(24):
        params = SamplingParams(
            seed=seed,
            temperature=rng.choice([0.0, 0.5, 1.0, 1.0]),
            top_p=[0.3, 0.95, 0.999, 1.0][seed % 4],
            top_k=rng.choice([0, 0, 0, 40]),
            repetition_penalty=rng.choice([1.0, 1.1, 0.8]),
            frequency_penalty=rng.choice([0.0, 0.4]),
            presence_penalty=rng.choice([0.0, 2.0]),
        )
        ids = [rng.choice(best) if rng.random() < 0.2 else rng.randrange(LARGE) for _ in range(200)]
        rows.append(Row(params, ids, 100))
    masks = None
    if has_masks:
        num_words = -(-LARGE // 32)
        words = torch.randint(-(2**31), 2**31, (12, num_words)).to(torch.int32)
        masks = RowMasks(words, {2 * line: line for line in range(12)}, LARGE)
    logits = scores.expand(24, -1)
    assert native.sample(logits, rows, masks) == portable.sample(logits, rows, masks)


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
def test_penalties_may_give_tokens_the_scores_of_all_others() -> None:
    """Of equal tokens, top_p keeps the first ones, whether a penalty has made them equal or not."""
    native = Sampler(LARGE, EOS, CPU, NativeLibrary(build()))
    portable = Sampler(LARGE, EOS, CPU)
    ids = random.Random(7).sample(range(LARGE), 9000)
    logits = torch.full((LARGE,), 2.0, dtype=torch.bfloat16)
    logits[ids] = 4.0
    rows = [
        Row(SamplingParams(seed=seed, top_p=top_p, presence_penalty=2.0), [1, *ids], 1)
        for seed in range(12)
        for top_p in (0.1, 0.5, 0.95)
    ]
    scores = logits.expand(len(rows), -1)
    assert native.sample(scores, rows) == portable.sample(scores, rows)


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize("offset", [0.0, -60.0])
def test_top_p_may_end_with_a_best_score_between_two_bfloat16_values(offset: float) -> None:
    """A bias has lifted two tokens of a flat row above all others, to equal or different scores."""
    native = Sampler(LARGE, EOS, CPU, NativeLibrary(build()))
    portable = Sampler(LARGE, EOS, CPU)
    scores = _flat(torch.Generator().manual_seed(9)).bfloat16()
    biases = [{700: 10.03, 30_000: 10.03}, {700: 10.03, 30_000: 10.01}, {700: 10.01, 30_000: 10.03}]
    lifted = list(biases[0])
    scores[lifted] = 0.0
    scores = (scores + offset).bfloat16()
    rows = [
        Row(SamplingParams(seed=seed, top_p=top_p, logit_bias=bias), [1, 2], 1)
        for seed in range(4)
        for top_p in (0.04, 0.1, 0.2, 0.5)
        for bias in biases
    ]
    logits = scores.expand(len(rows), -1)
    found = native.sample(logits, rows)
    assert found == portable.sample(logits, rows)
    assert set(found.token_ids) >= set(lifted)


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize("has_masks", [False, True])
def test_tokens_that_cannot_be_chosen_may_have_the_highest_scores(has_masks: bool) -> None:
    """They are the tokens that end an answer, which may not end yet, or are not in the mask."""
    native = Sampler(LARGE, EOS, CPU, NativeLibrary(build()))
    portable = Sampler(LARGE, EOS, CPU)
    logits = _flat(torch.Generator().manual_seed(8)).bfloat16()
    excluded = torch.arange(0, LARGE, 7) if has_masks else torch.tensor(EOS)
    logits[excluded] = torch.finfo(torch.bfloat16).max
    rows = [
        Row(SamplingParams(seed=seed, top_p=0.95, min_tokens=0 if has_masks else 9), [1, 3], 1)
        for seed in range(12)
    ]
    masks = None
    if has_masks:
        allowed = torch.ones(-(-LARGE // 32) * 32, dtype=torch.int64)
        allowed[excluded] = 0
        words = (allowed.view(-1, 32) << torch.arange(32)).sum(1).to(torch.int32)
        masks = RowMasks(words.expand(12, -1).contiguous(), {row: row for row in range(12)}, LARGE)
    scores = logits.expand(12, -1)
    found = native.sample(scores, rows, masks)
    assert found == portable.sample(scores, rows, masks)
    assert not set(found.token_ids) & set(excluded.tolist())


@pytest.mark.slow  # compiles all kernels once more
@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
def test_no_index_is_past_the_end_of_a_vector() -> None:
    """The other tests of this file pass with the checks of libstdc++."""
    program = (
        "import sys, pytest\n"
        "from worker_proc.native import build\n"
        "build.FLAGS = (*build.FLAGS, '-D_GLIBCXX_ASSERTIONS')\n"
        f"sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', {__file__!r}]))"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.97])
def test_a_tail_that_the_kernel_only_bounds_is_drawn_exactly(top_p: float) -> None:
    """One token has 94.5 % of the weight, and ten thousand others have the rest."""
    vocab_size, num_rows = 10_007, 300
    generator = torch.Generator().manual_seed(4)
    scores = torch.rand(vocab_size, generator=generator)
    scores[5000] = 12.6
    rows = [Row(SamplingParams(seed=seed, top_p=top_p), [1, 2, 3], 2) for seed in range(num_rows)]
    logits = scores.expand(num_rows, -1)
    native = Sampler(vocab_size, EOS, CPU, NativeLibrary(build())).sample(logits, rows)
    assert native == Sampler(vocab_size, EOS, CPU).sample(logits, rows)
    num_others = sum(token_id != 5000 for token_id in native.token_ids)
    assert num_others == 0 if top_p == 0.9 else 0 < num_others < 50


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize(
    ("best", "temperature"), [(50.0, 1e-5), (50.0, 2e-5), (200.0, 1e-4), (3000.0, 1e-3)]
)
def test_min_p_keeps_tokens_that_are_a_rounding_error_below_the_best(
    best: float, temperature: float, steps: int
) -> None:
    """The scores of a hundred tokens are 1 to 3 steps of float32 below the best."""
    vocab_size = 4000
    distance = steps * 2.0 ** (math.floor(math.log2(best)) - 23)
    logits = torch.full((vocab_size,), best - 1000.0 * temperature)
    logits[7], logits[1000:1100] = best, best - distance
    min_p = math.exp(-distance / temperature - 0.005)
    rows = [
        Row(SamplingParams(seed=seed, temperature=temperature, min_p=min_p), [1, 2], 1)
        for seed in range(64)
    ]
    native = Sampler(vocab_size, EOS, CPU, NativeLibrary(build()))
    portable = Sampler(vocab_size, EOS, CPU)
    scores = logits.expand(64, -1)
    assert native.sample(scores, rows) == portable.sample(scores, rows)


class _KnownPart(Row):
    """A row whose last outputs are not counted yet, as those of a draft are not."""

    num_counted = 0

    @property
    def edits(self) -> RowEdits:
        known = self.token_ids[: self.num_counted]
        return RowEdits(self.sampling_params, known, self.num_prompt_tokens)


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
def test_outputs_that_are_not_counted_are_penalized_too() -> None:
    """Tokens are of the prompt, of counted outputs, or new, each once or often."""
    rng = random.Random(3)
    sampler = Sampler(64, EOS, CPU, NativeLibrary(build()))
    logits = torch.randn(200, 64, generator=torch.Generator().manual_seed(4))
    whole, parts = [], []
    for seed in range(200):
        params = SamplingParams(
            seed=seed,
            temperature=rng.choice([0.0, 1.0]),
            repetition_penalty=rng.choice([1.0, 1.7, 0.4]),
            frequency_penalty=rng.choice([0.0, 0.9]),
            presence_penalty=rng.choice([0.0, -1.2]),
        )
        ids = [rng.randrange(12) for _ in range(rng.randrange(8, 16))]
        whole.append(Row(params, ids, 4))
        part = _KnownPart(params, ids, 4)
        part.num_counted = rng.randrange(4, len(ids) + 1)
        parts.append(part)
    found = sampler.sample(logits, parts)
    assert found == sampler.sample(logits, whole)
    assert found == Sampler(64, EOS, CPU).sample(logits, whole)
    free = [replace(row, sampling_params=_without_penalties(row)) for row in whole]
    assert found != sampler.sample(logits, free)


def _without_penalties(row: Row) -> SamplingParams:
    return msgspec.structs.replace(
        row.sampling_params, repetition_penalty=1.0, frequency_penalty=0.0, presence_penalty=0.0
    )


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
def test_greedy_steps_of_any_size_take_the_most_likely_tokens() -> None:
    """Larger and smaller steps come before, whose orders are kept."""
    native = Sampler(64, EOS, CPU, NativeLibrary(build()))
    row = Row(SamplingParams(temperature=0.0), [1, 2], 1)
    generator = torch.Generator().manual_seed(1)
    for num_rows in (3, 1, 40, 7, 41):
        logits = torch.randn(num_rows, 64, generator=generator)
        found = native.sample(logits, [row] * num_rows)
        assert found.token_ids == logits.argmax(1).tolist()

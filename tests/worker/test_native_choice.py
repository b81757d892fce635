"""The native kernel and torch choose the same tokens, whatever a row asks for."""

import math
import random

import pytest
import torch

from tests.worker.test_sampler import CPU, EOS, Row, _random_params
from worker_proc.grammar.masks import RowMasks
from worker_proc.native.build import build, compiler
from worker_proc.native.kernels import NativeLibrary
from worker_proc.sampling.sampler import Sampler

NUM_ROWS = 96


def _row(rng: random.Random, vocab_size: int) -> Row:
    ids = [rng.randrange(vocab_size) for _ in range(rng.randrange(2, 30))]
    return Row(_random_params(rng), ids, rng.randrange(1, len(ids)))


def _masks(rng: random.Random, num_words: int, vocab_size: int) -> RowMasks:
    """Masks with all, none, one or about half of the tokens, for two thirds of the rows."""
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
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("vocab_size", "num_words"), [(512, 16), (509, 16), (1003, 20), (700, 30)])
def test_both_choose_the_same_tokens(vocab_size: int, num_words: int, dtype: torch.dtype) -> None:
    """With masks of fewer and of more tokens than the model has, and rows that are not finite."""
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
        rows = [_row(rng, vocab_size) for _ in range(NUM_ROWS)]
        for masks in (None, _masks(rng, num_words, vocab_size)):
            found, expected = (each.sample(logits, rows, masks) for each in (native, portable))
            assert found == expected

"""Random rows of logits, and a slow sampler that theirs is compared with."""

import itertools
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from protocol.sampling import SamplingParams
from worker_proc.sampling.row_edits import RowEdits

CPU = torch.device("cpu")
EOS = (2, 5)
VOCAB = 512
WORD = 0xFFFFFFFF


@dataclass
class Row:
    """The fields of a request that the sampler reads."""

    sampling_params: SamplingParams
    token_ids: list[int]
    num_prompt_tokens: int

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def edits_scores(self) -> bool:
        return self.sampling_params.edits_scores

    @property
    def is_greedy(self) -> bool:
        return self.sampling_params.greedy

    @property
    def edits(self) -> RowEdits:
        return RowEdits(self.sampling_params, self.token_ids, self.num_prompt_tokens)

    def token_ids_after(self, num_tokens: int) -> list[int]:
        return self.token_ids[num_tokens:]


def make_row(
    params: SamplingParams, prompt: Sequence[int] = (1, 2), outputs: Sequence[int] = ()
) -> Row:
    return Row(params, [*prompt, *outputs], len(prompt))


def random_logits(
    num_rows: int, seed: int = 0, spread: float = 2.0, vocab_size: int = VOCAB
) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(num_rows, vocab_size, generator=generator) * spread).bfloat16()


def philox_words(seed: int, position: int) -> list[int]:
    c = [position & WORD, position >> 32, 0, 0]
    k = [seed & WORD, (seed >> 32) & WORD]
    for _ in range(10):
        p, q = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(q >> 32) ^ c[1] ^ k[0], q & WORD, (p >> 32) ^ c[3] ^ k[1], p & WORD]
        k = [(k[0] + 0x9E3779B9) & WORD, (k[1] + 0xBB67AE85) & WORD]
    return c


def edited(logits: Tensor, row: Row) -> Tensor:
    """Return a row's scores after min_tokens, logit_bias and penalties, token by token."""
    p = row.sampling_params
    outputs = row.token_ids[row.num_prompt_tokens :]
    counts = Counter(outputs)
    scores = logits.float().clone()
    if len(outputs) < p.min_tokens:
        for token_id in (*EOS, *p.stop_token_ids):
            scores[token_id] = -math.inf
    for token_id, bias in p.logit_bias.items():
        scores[token_id] += bias
    for token_id in set(row.token_ids):
        x = scores[token_id]
        scores[token_id] = x / p.repetition_penalty if x > 0 else x * p.repetition_penalty
    for token_id, count in counts.items():
        penalty = torch.tensor(p.frequency_penalty) * count + torch.tensor(p.presence_penalty)
        scores[token_id] -= penalty
    return scores


def reference_token(logits: Tensor, row: Row) -> int:
    """Choose the token of one row by a full sort and Python integers."""
    p = row.sampling_params
    scores = edited(logits, row)
    if p.greedy:
        return int((scores == scores.max()).nonzero()[0])
    values, ids = scores.sort(dim=-1, descending=True, stable=True)
    nats = (values[0] - values) / torch.tensor(p.temperature)
    weights = [int(x) for x in ((-nats).exp() * 2.0**40).double().tolist()]
    weights = [w if w >= p.min_p * 2**40 else 0 for w in weights]
    if p.top_k > 0:
        weights = weights[: p.top_k]
    sums = list(itertools.accumulate(weights))
    if p.top_p < 1.0:
        bound = math.ceil(float(sums[-1]) * p.top_p)
        sums = sums[: next(i for i, s in enumerate(sums) if s >= bound) + 1]
    words = philox_words(p.seed, len(row.token_ids))
    target = (((words[0] << 32 | words[1]) >> 2) * sums[-1]) >> 62
    kept = sorted(zip(ids.tolist(), weights[: len(sums)], strict=False))
    running = itertools.accumulate(weight for _, weight in kept)
    return next(kept[i][0] for i, sum_ in enumerate(running) if sum_ > target)


def random_params(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice([0.0, 1e-3, 0.3, 0.7, 1.0, 1.0, 2.0]),
        top_p=rng.choice([1.0, 1.0, 0.95, 0.5, 1e-6, 1 - 1e-9]),
        top_k=rng.choice([-1, 0, 0, 1, 3, 50, 200, VOCAB, VOCAB + 9]),
        min_p=rng.choice([0.0, 0.0, 0.05, 0.5, 1.0]),
        seed=rng.getrandbits(64) - 2**63,
        presence_penalty=rng.choice([0.0, 0.0, 1.5, -2.0]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.3, -1.0]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.3, 0.5]),
        min_tokens=rng.choice([0, 0, 4]),
        ignore_eos=rng.random() < 0.5,
        stop_token_ids=rng.choice([[], [7, 9]]),
        logit_bias=rng.choice([{}, {3: 4.0, 8: -100.0}]),
        logprobs=rng.choice([None, 0, 3]),
    )


def random_rows(num_rows: int, seed: int) -> list[Row]:
    rng = random.Random(seed)
    return [
        make_row(
            random_params(rng),
            [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 20))],
            [rng.randrange(40) for _ in range(rng.randrange(8))],
        )
        for _ in range(num_rows)
    ]

"""Ranks and logprobs, in one order of the vocabulary: descending score, then ascending id.

All code that ranks tokens uses it, so that top-k, top-p, sampling and logprobs agree on ties, which
are frequent because bf16 logits take few distinct values.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from protocol.core_worker import TokenLogprobs

MIN_LOGPROB = -9999.0  # keeps values finite on the wire and in JSON


def sorted_members(scores: Tensor, members: Tensor) -> tuple[Tensor, Tensor]:
    """Sort those tokens of each row that `members`, bool [n, vocab], marks; no score is NaN.

    Returns scores and token ids, both [n, width]; width is the largest number of members in a row.
    Shorter rows are padded with score -inf and id 0.
    """
    rows, ids = members.nonzero(as_tuple=True)
    num_members = rows.bincount(minlength=scores.shape[0])
    starts = num_members.cumsum(dim=0) - num_members
    columns = torch.arange(rows.numel(), device=rows.device) - starts[rows]
    shape = (scores.shape[0], int(num_members.max()))
    packed_scores = scores.new_full(shape, -math.inf)
    packed_scores[rows, columns] = scores[rows, ids]
    packed_ids = ids.new_zeros(shape)
    packed_ids[rows, columns] = ids
    # nonzero() lists each row's ids in ascending order, and the stable sort preserves it.
    values, order = packed_scores.sort(dim=-1, descending=True, stable=True)
    return values, packed_ids.gather(1, order)


def head(scores: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the first `size` tokens of each row, in the form of `sorted_members`.

    Tokens at -inf are left out, so there may be fewer columns. torch.topk picks any of the tokens
    that tie for the last place; only its last value is used here, and ties are settled by id.
    """
    last = scores.topk(min(size, scores.shape[1]), dim=-1).values[:, -1:]
    last = last.clamp(min=torch.finfo(scores.dtype).min)
    values, ids = sorted_members(scores, scores >= last)
    return values[:, :size], ids[:, :size]


def token_logprobs(
    logits: Tensor,
    token_ids: Sequence[int],
    num_tops: Sequence[int],
    candidates: Sequence[Sequence[int]] | None = None,
) -> list[TokenLogprobs]:
    """Describe one token per row of raw logits, with top lists of `num_tops`; NaN is -inf.

    If a row has `candidates`, its list holds these tokens instead.
    """
    limits = torch.finfo(torch.float32)
    scores = logits.float().nan_to_num(nan=limits.min, posinf=limits.max, neginf=limits.min)
    logprobs = scores.log_softmax(dim=-1).clamp_(min=MIN_LOGPROB)
    tokens = torch.tensor(token_ids, device=logits.device)[:, None]
    chosen = logprobs.gather(1, tokens)[:, 0].tolist()
    ranks = _ranks(scores, tokens).tolist()
    tops: list[list[int]] = [[]] * len(ranks)
    top_logprobs: list[list[float]] = [[]] * len(ranks)
    num_top = min(max(num_tops, default=0), logits.shape[1])
    if num_top:
        _, ids = head(scores, num_top)
        tops, top_logprobs = ids.tolist(), logprobs.gather(1, ids).tolist()
    num_tops = list(num_tops)
    for row, asked in enumerate(candidates or ()):
        if asked:
            tops[row] = [token_id for token_id in asked if token_id < logits.shape[1]]
            top_logprobs[row] = logprobs[row, tops[row]].tolist()
            num_tops[row] = len(tops[row])
    columns = zip(token_ids, chosen, ranks, tops, top_logprobs, num_tops, strict=True)
    return [
        TokenLogprobs(token_id, logprob, rank, top[:num], values[:num])
        for token_id, logprob, rank, top, values, num in columns
    ]


def _ranks(scores: Tensor, tokens: Tensor) -> Tensor:
    """Return the ranks of `tokens` (int64 [n, 1]) in their rows, from 1; int64 [n]."""
    own = scores.gather(1, tokens)
    lower_id = torch.arange(scores.shape[1], device=scores.device) < tokens
    return 1 + ((scores > own) | ((scores == own) & lower_id)).sum(dim=-1)

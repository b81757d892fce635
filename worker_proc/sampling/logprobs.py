"""Log-probabilities of given tokens and of the most likely ones, from raw logits."""

from collections.abc import Sequence

import torch
from torch import Tensor

from protocol.core_worker import TokenLogprobs
from worker_proc.sampling.ranking import head

MIN_LOGPROB = -9999.0
"""Least value, so that values stay finite on the wire and in JSON."""


def token_logprobs(
    logits: Tensor, token_ids: Sequence[int], num_tops: Sequence[int]
) -> list[TokenLogprobs]:
    """Describe one token per row of raw logits, with top lists of `num_tops` tokens.

    NaN counts as -inf. The top lists and ranks order tokens by logit, ties by id, so the greedy
    token has rank 1.
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
    columns = zip(token_ids, chosen, ranks, tops, top_logprobs, num_tops, strict=True)
    return [
        TokenLogprobs(token_id, logprob, rank, top[:num], values[:num])
        for token_id, logprob, rank, top, values, num in columns
    ]


def _ranks(scores: Tensor, tokens: Tensor) -> Tensor:
    """Places of `tokens` (int64 [n, 1]) in their rows' order, from 1; int64 [n]."""
    own = scores.gather(1, tokens)
    lower_id = torch.arange(scores.shape[1], device=scores.device) < tokens
    return 1 + ((scores > own) | ((scores == own) & lower_id)).sum(dim=-1)

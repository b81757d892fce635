"""Edits a row's scores before a token is chosen: min_tokens, logit_bias, penalties and others.

All of this is computed from the row's ids at every step, so no state has to survive a preemption.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from protocol.sampling import SamplingParams
from worker_proc.sampling.row_edits import MIN_REPETITION_PENALTY, RowEdits
from worker_proc.sampling.thinking import forced_token


class SamplingRow(Protocol):
    """The part of a request that the sampler reads."""

    sampling_params: SamplingParams
    num_prompt_tokens: int
    edits_scores: bool
    """`sampling_params.edits_scores`, computed once."""
    edits: RowEdits | None
    """Edits that follow from the parameters and known tokens; None if `edits_scores` is False."""
    is_greedy: bool
    """`sampling_params.greedy`, computed once."""

    @property
    def token_ids(self) -> list[int]:
        """Prompt and outputs; the next token has position len(token_ids)."""

    @property
    def num_tokens(self) -> int:
        """Length of `token_ids`, which is read more often than the ids."""

    def token_ids_after(self, num_tokens: int) -> list[int]:
        """Return `token_ids[num_tokens:]` without copying the preceding ids."""


def edited_scores(
    logits: Tensor,
    rows: Sequence[SamplingRow],
    eos_token_ids: Sequence[int],
    allowed: Tensor | None = None,
) -> Tensor:
    """Return float32 scores without NaN or +inf, edited as the rows require.

    Overwrites `logits` if they are float32. See `edit_scores`.
    """
    largest = torch.finfo(torch.float32).max
    scores = logits.float().nan_to_num_(nan=-math.inf, posinf=largest, neginf=-math.inf)
    if any(row.edits_scores for row in rows):
        edit_scores(scores, rows, eos_token_ids, allowed)
    return scores


def edit_scores(
    scores: Tensor,
    rows: Sequence[SamplingRow],
    eos_token_ids: Sequence[int],
    allowed: Tensor | None = None,
) -> None:
    """Apply min_tokens, bad_words, logit_bias, penalties, allowed_token_ids and thinking budgets.

    While a row has fewer outputs than min_tokens, the EOS ids and its stop_token_ids are banned
    (-inf); the EOS ids also with ignore_eos. Ids outside the vocabulary are ignored. A score that a
    penalty pushes above the largest float becomes the largest float. A token that a thinking budget
    forces is the only one left, unless grammars do not allow it: `allowed`, bool [n, vocab].
    `scores` are float32 [n, vocab], without NaN or +inf, and are changed in place.
    """
    _ban(scores, ((i, banned_stops(row, eos_token_ids)) for i, row in enumerate(rows)))
    _ban(scores, ((i, banned_words(row)) for i, row in enumerate(rows)))
    _add_biases(scores, rows)
    _penalize_repetition(scores, rows)
    _penalize_outputs(scores, rows)
    _allow_only(scores, rows)
    _end_reasoning(scores, rows, allowed)


def banned_stops(row: SamplingRow, eos_token_ids: Sequence[int]) -> Sequence[int]:
    """Return the tokens that would end a row's output before it has min_tokens."""
    params = row.sampling_params
    if row.num_tokens - row.num_prompt_tokens >= params.min_tokens:
        return ()
    return (*eos_token_ids, *params.stop_token_ids)


def banned_words(row: SamplingRow) -> list[int]:
    """Return the last token of each bad word whose preceding tokens end the output."""
    num_outputs = row.num_tokens - row.num_prompt_tokens
    banned = []
    for word in row.sampling_params.bad_words:
        num_before = len(word) - 1
        if num_before > num_outputs:
            continue
        if not num_before or row.token_ids_after(row.num_tokens - num_before) == word[:-1]:
            banned.append(word[-1])
    return banned


def _ban(scores: Tensor, banned: Iterable[tuple[int, Sequence[int]]]) -> None:
    places = [
        (i, token_id)
        for i, token_ids in banned
        for token_id in token_ids
        if token_id < scores.shape[1]
    ]
    if places:
        scores[torch.tensor(places, device=scores.device).unbind(dim=1)] = -math.inf


def _allow_only(scores: Tensor, rows: Sequence[SamplingRow]) -> None:
    """Ban all other tokens; if every allowed one is banned, allow the first of them."""
    for i, row in enumerate(rows):
        allowed = row.sampling_params.allowed_token_ids
        if allowed:
            # Without duplicates, since repeated indices would be written in any order.
            inside = [token_id for token_id in dict.fromkeys(allowed) if token_id < scores.shape[1]]
            ids = torch.tensor(inside, device=scores.device)
            kept = scores[i, ids]
            if kept.isneginf().all():
                kept[0] = 0.0
            scores[i] = -math.inf
            scores[i, ids] = kept


def _end_reasoning(scores: Tensor, rows: Sequence[SamplingRow], allowed: Tensor | None) -> None:
    """Ban all tokens except the one that a thinking budget forces."""
    for i, row in enumerate(rows):
        budget = row.sampling_params.thinking_budget
        if budget is None:
            continue
        token_id = forced_token(row.token_ids, row.num_prompt_tokens, budget)
        if token_id is None or token_id >= scores.shape[1]:
            continue
        if allowed is None or allowed[i, token_id]:
            scores[i] = -math.inf
            scores[i, token_id] = 0.0


def _add_biases(scores: Tensor, rows: Sequence[SamplingRow]) -> None:
    places, biases = [], []
    for i, row in enumerate(rows):
        for token_id, bias in row.sampling_params.logit_bias.items():
            if token_id < scores.shape[1]:
                places.append((i, token_id))
                biases.append(bias)
    if places:
        index = torch.tensor(places, device=scores.device).unbind(dim=1)
        values = torch.tensor(biases, dtype=torch.float32, device=scores.device)
        scores[index] = _bounded(scores[index] + values)


def _penalize_repetition(scores: Tensor, rows: Sequence[SamplingRow]) -> None:
    factors = [row.sampling_params.repetition_penalty for row in rows]
    chosen = [i for i, factor in enumerate(factors) if factor != 1.0]
    if not chosen:
        return
    row_ids, token_ids = _places(scores, ((i, rows[i].token_ids) for i in chosen))
    factor = torch.tensor(factors, dtype=torch.float32, device=scores.device)[row_ids]
    factor.clamp_(min=MIN_REPETITION_PENALTY)
    old = scores[row_ids, token_ids]
    # Repeated places read and write the same values, so they need no merging.
    scores[row_ids, token_ids] = _bounded(torch.where(old > 0, old / factor, old * factor))


def _penalize_outputs(scores: Tensor, rows: Sequence[SamplingRow]) -> None:
    penalties = [
        (row.sampling_params.frequency_penalty, row.sampling_params.presence_penalty)
        for row in rows
    ]
    chosen = [i for i, pair in enumerate(penalties) if any(pair)]
    if not chosen:
        return
    outputs = ((i, rows[i].token_ids[rows[i].num_prompt_tokens :]) for i in chosen)
    row_ids, token_ids = _places(scores, outputs)
    ones = torch.ones_like(row_ids, dtype=torch.int32)
    counts = torch.zeros(scores.shape, dtype=torch.int32, device=scores.device)
    counts.index_put_((row_ids, token_ids), ones, accumulate=True)
    both = torch.tensor(penalties, dtype=torch.float32, device=scores.device)
    frequency, presence = both[row_ids].unbind(dim=1)
    penalty = frequency * counts[row_ids, token_ids] + presence
    scores[row_ids, token_ids] = _bounded(scores[row_ids, token_ids] - penalty)


def _places(scores: Tensor, lists: Iterable[tuple[int, list[int]]]) -> tuple[Tensor, Tensor]:
    """Return row and token indices of all ids in the vocabulary, with repeats; int64 [m] each."""
    row_ids: list[int] = []
    lengths: list[int] = []
    flat: list[int] = []
    for i, token_ids in lists:
        row_ids.append(i)
        lengths.append(len(token_ids))
        flat += token_ids
    rows = torch.tensor(row_ids, dtype=torch.int64).repeat_interleave(torch.tensor(lengths))
    tokens = torch.tensor(flat, dtype=torch.int64)
    inside = tokens < scores.shape[1]
    return rows[inside].to(scores.device), tokens[inside].to(scores.device)


def _bounded(scores: Tensor) -> Tensor:
    return scores.clamp_(max=torch.finfo(torch.float32).max)

"""Chooses the next token of each row: a pure function of logits, parameters, seed and ids.

Stages, in order: raw logprobs if asked for; min_tokens, bad_words, logit_bias, penalties,
allowed_token_ids and thinking budget (`logit_edits`); greedy rows take the most likely token; the
others go through temperature, min_p, top_k, top_p and one draw (`inverse_cdf`). A row goes only
through the stages that its parameters ask for, and its token never depends on the other rows.
"""

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from protocol.core_worker import TokenLogprobs
from worker_proc.grammar.masks import RowMasks
from worker_proc.sampling.inverse_cdf import MAX_VOCAB_SIZE, Filters, sample_full, sample_top_k
from worker_proc.sampling.logit_edits import SamplingRow, edit_scores
from worker_proc.sampling.philox import draw
from worker_proc.sampling.ranking import token_logprobs

_SMALL_TOP_K = 128
"""Heads are as wide as their group's largest top_k, so rows with large ones are grouped apart."""
_CPU_CHUNK_ELEMENTS = 2**19
_CUDA_CHUNK_ELEMENTS = 2**24
"""Scores processed at a time, with temporaries of about 40 bytes each. On the CPU larger chunks are
twice as slow: the allocator returns their pages, and every tensor faults them in again."""


class _Path(enum.Enum):
    """Way in which the token of a row is chosen."""

    RAW_MAX = enum.auto()
    EDITED_MAX = enum.auto()
    SMALL_TOP_K = enum.auto()
    LARGE_TOP_K = enum.auto()
    TOP_P = enum.auto()
    FULL = enum.auto()


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One entry per row, in row order."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]  # None for rows without the parameter
    not_finite: list[int]
    """Rows whose logits hold NaN or +inf, or nothing but -inf: their tokens mean nothing."""


class Sampler:
    """Samples next tokens; keeps no state."""

    def __init__(self, vocab_size: int, eos_token_ids: Sequence[int], device: torch.device) -> None:
        if not 1 <= vocab_size <= MAX_VOCAB_SIZE:
            raise ValueError(f"vocab_size is {vocab_size}, not in 1..{MAX_VOCAB_SIZE}")
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        on_cpu = device.type == "cpu"
        num_elements = _CPU_CHUNK_ELEMENTS if on_cpu else _CUDA_CHUNK_ELEMENTS
        self._chunk_rows = max(1, num_elements // vocab_size)

    @torch.inference_mode()
    def sample(
        self, logits: Tensor, rows: Sequence[SamplingRow], masks: RowMasks | None = None
    ) -> SampledTokens:
        """Choose one token per row of raw logits, float [n, vocab], which are not changed.

        A row in which no token is possible, since its edits ban every one whose logit is not -inf,
        takes the most likely token of its raw logits; a row with a mask chooses among all that the
        mask allows. A row that is not finite takes token 0.
        """
        assert logits.shape == (len(rows), self._vocab_size), logits.shape
        # Unlike argmax, max over one dimension is vectorised for bf16 on the CPU (5 times faster);
        # of equal values both return the first. The maximum of a row with a NaN is NaN.
        maxima, token_ids = logits.max(dim=-1)
        self._choose(logits, rows, masks, token_ids)
        is_finite = maxima.isfinite()
        chosen = token_ids.masked_fill_(~is_finite, 0).tolist()
        not_finite = [row for row, finite in enumerate(is_finite.tolist()) if not finite]
        return SampledTokens(chosen, self._logprobs(logits, rows, chosen), not_finite)

    @torch.inference_mode()
    def prompt_logprobs(
        self, logits: Tensor, next_token_ids: Sequence[int], num_top: int
    ) -> list[TokenLogprobs]:
        """Describe the prompt tokens that follow the positions of `logits`, float [m, vocab]."""
        assert logits.shape == (len(next_token_ids), self._vocab_size), logits.shape
        entries: list[TokenLogprobs] = []
        for start in range(0, len(next_token_ids), self._chunk_rows):
            ids = next_token_ids[start : start + self._chunk_rows]
            part = logits[start : start + self._chunk_rows]
            entries += token_logprobs(part, ids, [num_top] * len(ids))
        return entries

    def _choose(
        self,
        logits: Tensor,
        rows: Sequence[SamplingRow],
        masks: RowMasks | None,
        token_ids: Tensor,
    ) -> None:
        """Replace the most likely tokens, int64 [n], in rows that choose in another way."""
        groups: dict[tuple[_Path, bool], list[int]] = {}
        for i, row in enumerate(rows):
            path, is_masked = self._path(row), masks is not None and i in masks
            if is_masked and path is _Path.RAW_MAX:
                path = _Path.EDITED_MAX
            groups.setdefault((path, is_masked), []).append(i)
        groups.pop((_Path.RAW_MAX, False), None)
        for (path, is_masked), members in groups.items():
            for start in range(0, len(members), self._chunk_rows):
                part = members[start : start + self._chunk_rows]
                index = torch.tensor(part, device=logits.device)
                part_rows = [rows[i] for i in part]
                allowed = None
                if is_masked and masks is not None:
                    allowed = masks.allowed(part, logits.device)
                scores = self._edited(logits.index_select(0, index), part_rows, allowed)
                if allowed is not None:
                    is_lost = _confine(scores, allowed)
                else:
                    is_lost = scores.amax(dim=-1).isneginf()
                if is_lost.any():
                    scores[is_lost] = 0.0
                chosen = _sample(path, scores, part_rows)
                token_ids[index] = torch.where(is_lost, token_ids[index], chosen)

    def _path(self, row: SamplingRow) -> _Path:
        params = row.sampling_params
        if params.greedy:
            return _Path.EDITED_MAX if row.edits_scores else _Path.RAW_MAX
        if 0 < params.top_k < self._vocab_size:
            return _Path.SMALL_TOP_K if params.top_k <= _SMALL_TOP_K else _Path.LARGE_TOP_K
        return _Path.TOP_P if params.top_p < 1.0 else _Path.FULL

    def _edited(
        self, logits: Tensor, rows: Sequence[SamplingRow], allowed: Tensor | None
    ) -> Tensor:
        """Return float32 scores without NaN or +inf. Overwrites float32 logits."""
        largest = torch.finfo(torch.float32).max
        scores = logits.float().nan_to_num_(nan=-math.inf, posinf=largest, neginf=-math.inf)
        if any(row.edits_scores for row in rows):
            edit_scores(scores, rows, self._eos_token_ids, allowed)
        return scores

    def _logprobs(
        self, logits: Tensor, rows: Sequence[SamplingRow], token_ids: Sequence[int]
    ) -> list[TokenLogprobs | None]:
        entries: list[TokenLogprobs | None] = [None] * len(rows)
        wanted = [row.sampling_params.logprobs for row in rows]
        asking = [(i, num_top) for i, num_top in enumerate(wanted) if num_top is not None]
        for start in range(0, len(asking), self._chunk_rows):
            part, num_tops = zip(*asking[start : start + self._chunk_rows], strict=True)
            chosen = [token_ids[i] for i in part]
            candidates = [rows[i].sampling_params.logprob_token_ids for i in part]
            found = token_logprobs(logits[list(part)], chosen, num_tops, candidates)
            for i, entry in zip(part, found, strict=True):
                entries[i] = entry
        return entries


def _confine(scores: Tensor, allowed: Tensor) -> Tensor:
    """Ban the tokens that are not allowed, in place; returns the rows in which none is possible.

    Where edits ban all that is allowed, each of these tokens is equally likely: so a grammar that
    has come to its end ends, whatever min_tokens is.
    """
    scores.masked_fill_(~allowed, -math.inf)
    is_lost = scores.amax(dim=-1).isneginf()
    if is_lost.any():
        scores[is_lost] = torch.zeros_like(scores[is_lost]).masked_fill_(
            ~allowed[is_lost], -math.inf
        )
        is_lost = ~allowed.any(dim=-1)
    return is_lost


def _sample(path: _Path, scores: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Choose tokens of rows with at least one finite score each; int64 [n]."""
    if path is _Path.EDITED_MAX:
        return scores.max(dim=-1).indices
    params = [row.sampling_params for row in rows]
    columns = [(p.temperature, p.min_p, p.top_p) for p in params]
    numbers = torch.tensor(columns, dtype=torch.float64, device=scores.device)
    draws = draw([p.seed for p in params], [row.num_tokens for row in rows]).to(scores.device)
    filters = Filters(numbers[:, 0].float(), numbers[:, 1], numbers[:, 2], draws)
    if path in {_Path.TOP_P, _Path.FULL}:
        return sample_full(scores, filters, with_top_p=path is _Path.TOP_P)
    top_k = torch.tensor([p.top_k for p in params], device=scores.device)
    return sample_top_k(scores, filters, top_k)

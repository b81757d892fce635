"""The scores of rows with edits or masks, and the rows in which no token is possible."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from worker_proc.grammar.masks import RowMasks
from worker_proc.inputs import to_device
from worker_proc.sampling.logit_edits import SamplingRow, edited_scores


class EditedRows(NamedTuple):
    """Scores of some rows of a step."""

    places: Tensor
    """`[n]`, int64: indices of the rows in the step."""
    scores: Tensor
    """`[n, vocab_size]`, float32; 0 if the row is lost."""
    is_lost: Tensor
    """`[n]`, bool: true if no token is possible."""


def edit_rows(
    logits: Tensor,
    rows: Sequence[SamplingRow],
    part: list[int],
    masks: RowMasks | None,
    eos_token_ids: Sequence[int],
) -> EditedRows:
    """Edit the scores of the rows `part` of a step, and ban tokens that `masks` does not allow.

    With masks, each of these rows must have one.
    """
    places = to_device(part, logits.device)
    allowed = None if masks is None else masks.allowed(part, logits.device)
    part_rows = [rows[i] for i in part]
    scores = edited_scores(logits.index_select(0, places), part_rows, eos_token_ids, allowed)
    is_lost = scores.amax(dim=-1).isneginf() if allowed is None else confine(scores, allowed)
    return EditedRows(places, scores.masked_fill_(is_lost[:, None], 0.0), is_lost)


def confine(scores: Tensor, allowed: Tensor) -> Tensor:
    """Ban tokens that are not allowed, in place; return the rows in which none is possible.

    If edits ban all allowed tokens, each of these becomes equally likely: a grammar that has
    reached its end can end, regardless of min_tokens.
    """
    scores.masked_fill_(~allowed, -math.inf)
    is_lost = scores.amax(dim=-1).isneginf()
    if is_lost.any():
        scores[is_lost] = torch.zeros_like(scores[is_lost]).masked_fill_(
            ~allowed[is_lost], -math.inf
        )
        is_lost = ~allowed.any(dim=-1)
    return is_lost

"""The one order of a vocabulary: descending score, ties by ascending token id.

All code that ranks tokens uses it, so that top-k, top-p, sampling and logprobs agree on ties, which
are frequent, because bf16 logits take few distinct values.
"""

import math

import torch
from torch import Tensor


def sorted_members(scores: Tensor, members: Tensor) -> tuple[Tensor, Tensor]:
    """Sort those tokens of each row that `members`, bool [n, vocab], marks; no score is NaN.

    Returns scores and token ids, both [n, width], where width is the largest number of members in a
    row. Shorter rows end in score -inf and id 0.
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
    # nonzero() lists each row's ids in ascending order, and the stable sort keeps them so.
    values, order = packed_scores.sort(dim=-1, descending=True, stable=True)
    return values, packed_ids.gather(1, order)


def head(scores: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the first `size` tokens of each row, as `sorted_members` does.

    Tokens at -inf are left out, so there may be fewer columns. torch.topk picks any of the tokens
    that tie for the last place; only its last value is used here, and the ties are settled by id.
    """
    last = scores.topk(min(size, scores.shape[1]), dim=-1).values[:, -1:]
    last = last.clamp(min=torch.finfo(scores.dtype).min)
    values, ids = sorted_members(scores, scores >= last)
    return values[:, :size], ids[:, :size]

"""Exact inverse-CDF sampling from filtered softmax distributions.

Probabilities are integers: the most likely token of a row weighs 2**40, and every other one
floor(exp((score - max) / temperature) * 2**40). Integer sums do not depend on the order of
summation, so neither the other rows of the batch, nor the device's reduction strategy, nor the
shortcut taken here can change a token. The result of each function is defined as follows: sort the
row by descending score with ties by token id, drop weights under the min-p bound, cut to top_k
tokens, and cut after the first token at which the running sum reaches top_p of the remaining total.
Then, in the order of token ids, take the first token at which the running sum of the remaining
weights exceeds `draw` (as a fraction). `worker_proc/native/sampling/choice.h` does the same on
the CPU.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from worker_proc.sampling.philox import NUM_DRAW_BITS
from worker_proc.sampling.ranking import head, sorted_members

MAX_VOCAB_SIZE = 2**22 - 1  # the weights of a row of this size sum to less than 2**62

_UNIT = 2**40
_NUM_BUCKETS = 2048
_BUCKETS_PER_NAT = _NUM_BUCKETS / 28.0
"""Weights are 0 from 27.8 nats below the maximum on, so the last bucket has weight 0."""
_HALF = NUM_DRAW_BITS // 2
_HALF_MASK = (1 << _HALF) - 1


class Filters(NamedTuple):
    """Parameters of n rows, on the device of their scores."""

    temperature: Tensor  # float32 [n], positive
    min_p: Tensor  # float64 [n]; 0: off
    top_p: Tensor  # float64 [n]; 1: off
    draws: Tensor  # int64 [n], uniform in [0, 2**62)


def scale(draws: Tensor, totals: Tensor) -> Tensor:
    """Return floor(draws * totals / 2**62), exactly; int64 [n], both in [0, 2**62)."""
    draw_high, draw_low = draws >> _HALF, draws & _HALF_MASK
    total_high, total_low = totals >> _HALF, totals & _HALF_MASK
    middle = draw_high * total_low + draw_low * total_high + ((draw_low * total_low) >> _HALF)
    return draw_high * total_high + (middle >> _HALF)


def sample_top_k(scores: Tensor, filters: Filters, top_k: Tensor) -> Tensor:
    """Sample rows that have a top_k: only the first max(top_k) tokens are ever weighed.

    Takes float32 scores without NaN or +inf, with at least one finite score in each row; returns
    the token ids, int64 [n].
    """
    values, ids = head(scores, int(top_k.max()))
    weights = _weigh(_distance(values, values[:, :1], filters), filters)
    places = torch.arange(values.shape[1], device=values.device)
    weights.masked_fill_(places >= top_k[:, None], 0)
    sums = weights.cumsum(dim=-1)
    last = _first_above(sums, _top_p_bound(sums[:, -1], filters))
    weights.masked_fill_(places > last[:, None], 0)
    ids, order = ids.sort(dim=-1)
    chosen = _choose(weights.gather(1, order), filters)
    return ids.gather(1, chosen)[:, 0]


def sample_full(scores: Tensor, filters: Filters, *, with_top_p: bool) -> Tensor:
    """Sample rows without a top_k, and without sorting all scores; see `sample_top_k`."""
    distance = _distance(scores, scores.amax(dim=-1, keepdim=True), filters)
    if not with_top_p:
        return _choose(_weigh(distance, filters), filters)[:, 0]
    histogram = _Histogram(scores, distance, filters)
    last_ids = histogram.locate(_top_p_bound(histogram.sums[:, -1], filters))
    last_scores = scores.gather(1, last_ids)
    is_later = torch.arange(scores.shape[1], device=scores.device) > last_ids
    dropped = (scores < last_scores) | ((scores == last_scores) & is_later)
    return _choose(histogram.weights.masked_fill_(dropped, 0), filters)[:, 0]


class _Histogram:
    """Weights of all tokens, summed in buckets of similar score.

    A bucket holds a run of the sorted vocabulary, because its number is monotonic in the score.
    Finding a place in the running sum therefore needs only the sums of the buckets and a sort of
    one bucket.
    """

    def __init__(self, scores: Tensor, distance: Tensor, filters: Filters) -> None:
        """`distance` is that of each score from the best one; it is overwritten."""
        self._scores = scores
        self._buckets = (distance * _BUCKETS_PER_NAT).clamp_(max=_NUM_BUCKETS - 1).long()
        self.weights = _weigh(distance, filters)
        sums = self.weights.new_zeros(scores.shape[0], _NUM_BUCKETS)
        sums.scatter_add_(1, self._buckets, self.weights)
        self.sums = sums.cumsum_(dim=-1)  # int64 [n, buckets]: up to the end of each bucket

    def locate(self, targets: Tensor) -> Tensor:
        """Return the first token whose sorted running sum exceeds the target; int64 [n, 1]."""
        buckets = _first_above(self.sums, targets)[:, None]
        values, ids = sorted_members(self._scores, self._buckets == buckets)
        weights = self.weights.gather(1, ids).masked_fill_(values.isneginf(), 0)
        before = self.sums.gather(1, (buckets - 1).clamp_(min=0)).masked_fill_(buckets == 0, 0)
        sums = weights.cumsum(dim=-1).add_(before)
        return ids.gather(1, _first_above(sums, targets)[:, None])


def _choose(weights: Tensor, filters: Filters) -> Tensor:
    """Return the place at which the running sum of weights first exceeds the draw; int64 [n, 1]."""
    sums = weights.cumsum(dim=-1)
    return _first_above(sums, scale(filters.draws, sums[:, -1]))[:, None]


def _distance(scores: Tensor, maxima: Tensor, filters: Filters) -> Tensor:
    """Return nats below the maximum after temperature, at least 0; float32 [n, vocab]."""
    return (maxima - scores).div_(filters.temperature[:, None])


def _weigh(distance: Tensor, filters: Filters) -> Tensor:
    """Return integer weights, 0 under the min-p bound; int64. Overwrites `distance`."""
    weights = distance.neg_().exp_().mul_(_UNIT).long()
    bound = (filters.min_p * _UNIT).ceil_().long()[:, None]
    return weights.masked_fill_(weights < bound, 0)


def _top_p_bound(totals: Tensor, filters: Filters) -> Tensor:
    """Return the sum above which the last kept token is the first; int64 [n]."""
    bound = (totals.double() * filters.top_p).ceil_().long()
    return torch.minimum(bound, totals).clamp_(min=1) - 1


def _first_above(sums: Tensor, targets: Tensor) -> Tensor:
    """Return the index of the first running sum above the target in each row; int64 [n]."""
    return torch.searchsorted(sums, targets[:, None], right=True)[:, 0]

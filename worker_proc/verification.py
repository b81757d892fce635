"""What follows from drafts that a step computed: rows to sample, and how many of them count.

Sampling is a pure function of logits, parameters, seed, position and ids. So each row is sampled as
if the drafts before it were right, and the rows up to the first draft that differs from what was
sampled are exactly what would have come without drafts. The other rows are thrown away.
"""

from collections.abc import Sequence

from protocol.sampling import SamplingParams
from worker_proc.mirror import MirroredRequest


class DraftedRow:
    """A request as it is once its first drafts are known: a row for the sampler."""

    __slots__ = ("_num_drafts", "_request", "_token_ids")

    def __init__(self, request: MirroredRequest, num_drafts: int) -> None:
        self._request = request
        self._num_drafts = num_drafts
        self._token_ids: list[int] | None = None

    @property
    def sampling_params(self) -> SamplingParams:
        """Those of the request."""
        return self._request.sampling_params

    @property
    def num_prompt_tokens(self) -> int:
        """That of the request."""
        return self._request.num_prompt_tokens

    @property
    def num_tokens(self) -> int:
        """With the first drafts."""
        return self._request.num_tokens + self._num_drafts

    @property
    def token_ids(self) -> list[int]:
        """The known ids and the first drafts; greedy rows without edits never ask."""
        if self._token_ids is None:
            request = self._request
            self._token_ids = request.token_ids + request.draft_token_ids[: self._num_drafts]
        return self._token_ids


def sampling_rows(request: MirroredRequest, num_drafts: int) -> list[MirroredRequest | DraftedRow]:
    """Return the rows that verify a request's first drafts: one more than they are."""
    return [request, *(DraftedRow(request, count) for count in range(1, num_drafts + 1))]


def count_sampled(sampled_token_ids: Sequence[int], draft_token_ids: Sequence[int]) -> int:
    """Return how many tokens count: those that agree with their drafts, and one more.

    Args:
        sampled_token_ids: one for each row of a request.
        draft_token_ids: of the request; there may be more of them than were verified.
    """
    last = len(sampled_token_ids) - 1
    for index in range(last):
        if sampled_token_ids[index] != draft_token_ids[index]:
            return index + 1
    return last + 1

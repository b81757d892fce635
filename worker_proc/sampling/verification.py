"""Verifies drafts: makes the rows to sample, and counts the sampled tokens that are valid.

Sampling is a pure function of logits, parameters, seed, position and ids. So each row is sampled as
if the drafts before it were right. The rows up to the first draft that differs from the sampled
token give exactly the tokens of a run without drafts; the other rows are dropped.
"""

from collections.abc import Sequence

from protocol.sampling import SamplingParams
from worker_proc.mirror import MirroredRequest


class DraftedRow:
    """A row for the sampler: a request as if its first drafts were known tokens."""

    __slots__ = ("_num_drafts", "_request", "_token_ids")

    def __init__(self, request: MirroredRequest, num_drafts: int) -> None:
        self._request = request
        self._num_drafts = num_drafts
        self._token_ids: list[int] | None = None

    @property
    def sampling_params(self) -> SamplingParams:
        return self._request.sampling_params

    @property
    def num_prompt_tokens(self) -> int:
        return self._request.num_prompt_tokens

    @property
    def num_tokens(self) -> int:
        """Known tokens and the first drafts."""
        return self._request.num_tokens + self._num_drafts

    @property
    def token_ids(self) -> list[int]:
        """The known ids and the first drafts, concatenated on first use."""
        if self._token_ids is None:
            request = self._request
            self._token_ids = request.token_ids + request.draft_token_ids[: self._num_drafts]
        return self._token_ids


def sampling_rows(request: MirroredRequest, num_drafts: int) -> list[MirroredRequest | DraftedRow]:
    """Return `num_drafts` + 1 rows, which verify a request's first drafts."""
    return [request, *(DraftedRow(request, count) for count in range(1, num_drafts + 1))]


def count_sampled(sampled_token_ids: Sequence[int], draft_token_ids: Sequence[int]) -> int:
    """Return how many tokens are valid: those that equal their drafts, and one more.

    Args:
        sampled_token_ids: one for each row of a request.
        draft_token_ids: of the request, possibly more than were verified.
    """
    last = len(sampled_token_ids) - 1
    for index in range(last):
        if sampled_token_ids[index] != draft_token_ids[index]:
            return index + 1
    return last + 1

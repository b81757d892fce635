"""Verifies drafts: creates the rows to sample, and counts the sampled tokens that are valid.

Sampling is a pure function of logits, parameters, seed, position and ids. Each row is therefore
sampled as if the drafts before it were right. The rows up to the first draft that differs from the
sampled token give exactly the tokens of a run without drafts; the other rows are dropped.
"""

from collections.abc import Sequence
from functools import cached_property

from worker_proc.request import MirroredRequest, ScheduledRequest


class DraftedRow:
    """A row for the sampler: a request as if its first drafts were known tokens."""

    def __init__(self, request: MirroredRequest, num_drafts: int) -> None:
        self._request = request
        self._num_drafts = num_drafts
        self.req_id = request.req_id
        self.sampling_params = request.sampling_params
        self.edits_scores = request.edits_scores
        self.edits = request.edits
        self.is_greedy = request.is_greedy
        self.num_prompt_tokens = request.num_prompt_tokens
        self.num_tokens = request.num_tokens + num_drafts

    @cached_property
    def token_ids(self) -> list[int]:
        """The known ids and the first drafts, concatenated on first use."""
        return self.token_ids_after(0)

    def token_ids_after(self, num_tokens: int) -> list[int]:
        """Return the ids after the first `num_tokens`, including drafts."""
        known = self._request.token_ids
        first_draft = max(num_tokens - len(known), 0)
        drafts = self._request.draft_token_ids[first_draft : self._num_drafts]
        return known[num_tokens:] + drafts


def rows_to_sample(parts: Sequence[ScheduledRequest]) -> Sequence[MirroredRequest | DraftedRow]:
    """Return, for each part that samples, a row for its last known token and one for each draft."""
    rows: list[MirroredRequest | DraftedRow] = []
    for part in parts:
        request = part.request
        rows.append(request)
        if part.num_tokens > 1:
            rows += [DraftedRow(request, 1 + place) for place in range(part.num_drafts)]
    return rows


def count_valid(
    parts: Sequence[ScheduledRequest], token_ids: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Return the number of valid tokens of each part, and the rows of the valid tokens."""
    counts: list[int] = []
    valid: list[int] = []
    first = 0
    for part in parts:
        num_drafts, drafts = part.num_drafts, part.request.draft_token_ids
        num_right = 0
        while num_right < num_drafts and token_ids[first + num_right] == drafts[num_right]:
            num_right += 1
        counts.append(num_right + 1)
        valid += range(first, first + num_right + 1)
        first += num_drafts + 1
    return counts, valid

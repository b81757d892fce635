"""Makes drafts from repetitions in the texts of the requests that a step has computed."""

from collections.abc import Sequence

from worker_proc.drafting.ngram_index import NgramIndex
from worker_proc.request import ScheduledRequest


def propose_repetitions(scheduled: Sequence[ScheduledRequest]) -> None:
    """Make drafts for the requests that sampled, after their tokens have been appended."""
    for part in scheduled:
        request = part.request
        if request.draft_limit == 0:  # its index is extended when drafts are wanted again
            request.draft_token_ids = []
            continue
        index = request.ngram_index = request.ngram_index or NgramIndex()
        if part.samples:
            index.extend(request.token_ids, request.num_tokens)
            request.draft_token_ids = index.propose(request.token_ids, request.draft_limit)
        else:  # in parts, instead of a whole long prompt when it begins to sample
            index.extend(request.token_ids, part.end)

"""Sends the drafts of the rank that has the draft model to the other ranks of its stage.

All of these ranks must verify the same drafts. Only one rank computes the draft model: the drafts
are then the same whatever the bits of its results, and its weights are in memory once.
"""

from collections.abc import Sequence

import torch

from worker_proc.parallel.exchange import RankExchange
from worker_proc.request import ScheduledRequest


class SharedDrafts:
    """One rank's view of the drafts; all ranks of the stage compute the same steps."""

    def __init__(self, exchange: RankExchange, num_speculative_tokens: int) -> None:
        """`exchange` connects the ranks of the stage, the first of which has the draft model."""
        self._exchange = exchange
        self._width = 1 + num_speculative_tokens

    def share(self, scheduled: Sequence[ScheduledRequest]) -> None:
        """Set the drafts of each request that has sampled to the drafts of the first rank.

        Raises the errors of `RankExchange.gather_on_host`.
        """
        requests = [part.request for part in scheduled if part.samples]
        if not requests:
            return
        rows = torch.zeros(len(requests), self._width, dtype=torch.long)
        if self._exchange.rank == 0:
            for row, request in zip(rows, requests, strict=True):
                drafts = request.draft_token_ids
                row[: 1 + len(drafts)] = torch.tensor([len(drafts), *drafts])
        found = self._exchange.gather_on_host(rows)[:, : self._width].tolist()
        for (count, *drafts), request in zip(found, requests, strict=True):
            request.draft_token_ids = drafts[:count]

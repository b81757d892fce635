"""Gives the drafts of the rank that has the draft model to the other ranks of its stage.

They sample the same tokens, and must verify the same drafts. So that this does not depend on the
bits of the draft model, and its weights are in memory once, one rank computes it, and the others
wait.
"""

from collections.abc import Sequence

import torch

from worker_proc.mirror import ScheduledRequest
from worker_proc.parallel.exchange import RankExchange


class SharedDrafts:
    """One rank's side; all ranks of the stage compute the same steps."""

    def __init__(self, exchange: RankExchange, num_speculative_tokens: int) -> None:
        """Take what is exchanged with the others, of which the first one has the draft model."""
        self._exchange = exchange
        self._width = 1 + num_speculative_tokens

    def share(self, scheduled: Sequence[ScheduledRequest]) -> None:
        """Set the drafts of each request that sampled to those that the first rank has made for it.

        Raises as the exchange's `gather_on_host` does.
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

"""What changes a request's scores before a token is chosen, as the native kernel takes it.

It follows from the parameters and the ids alone (`logit_edits` defines it). A mirrored request
keeps it, so that a step costs as much as the tokens that are new.
"""

from array import array
from collections.abc import Iterable, Sequence

from protocol.sampling import SamplingParams


class TokenCounts:
    """The distinct tokens of a request, and how often each is among its outputs."""

    def __init__(self, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        self._places: dict[int, int] = {}
        self.ids = array("i")
        self.counts = array("i")
        self.num_tokens = num_prompt_tokens
        """How many tokens of the request are counted."""
        for token_id in dict.fromkeys(token_ids[:num_prompt_tokens]):
            self._place(token_id)
        self.add(token_ids[num_prompt_tokens:])

    def add(self, outputs: Iterable[int]) -> None:
        """Count outputs that follow the known tokens."""
        for token_id in outputs:
            place = self._places.get(token_id)
            self.counts[self._place(token_id) if place is None else place] += 1
            self.num_tokens += 1

    def _place(self, token_id: int) -> int:
        place = self._places[token_id] = len(self.ids)
        self.ids.append(token_id)
        self.counts.append(0)
        return place


class RowEdits:
    """The edits of one request."""

    def __init__(
        self, params: SamplingParams, token_ids: Sequence[int], num_prompt_tokens: int
    ) -> None:
        self.bias_ids = array("i", params.logit_bias)
        self.biases = array("f", params.logit_bias.values())
        self.allowed_ids = array("i", params.allowed_token_ids or ())
        self.token_counts: TokenCounts | None = None
        if params.penalizes:
            self.token_counts = TokenCounts(token_ids, num_prompt_tokens)

    def add(self, outputs: Iterable[int]) -> None:
        """Take outputs that follow the known tokens."""
        if self.token_counts is not None:
            self.token_counts.add(outputs)

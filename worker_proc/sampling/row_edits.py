"""The edits of a request's scores before a token is chosen, in the form of the native kernel.

They depend on the parameters and the ids alone (`logit_edits` defines them). A mirrored request
keeps them, so that a step costs only as much as its new tokens.
"""

from array import array
from collections.abc import Iterable, Sequence

from protocol.sampling import SamplingParams

MIN_REPETITION_PENALTY = 2.0**-126
"""Smaller penalties count as this: as a float one may be 0, and 0 times -inf is NaN."""


class TokenCounts:
    """The distinct tokens of a request, and the number of times each occurs in its outputs."""

    def __init__(self, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        self.ids = array("i", dict.fromkeys(token_ids[:num_prompt_tokens]))
        self.counts = array("i", [0]) * len(self.ids)
        self._places = {token_id: place for place, token_id in enumerate(self.ids)}
        self.num_tokens = num_prompt_tokens
        """The number of the request's tokens that are counted."""
        self.add(token_ids[num_prompt_tokens:])

    def add(self, outputs: Iterable[int]) -> None:
        """Count outputs that follow the known tokens."""
        for token_id in outputs:
            place = self._places.setdefault(token_id, len(self.ids))
            if place == len(self.ids):
                self.ids.append(token_id)
                self.counts.append(0)
            self.counts[place] += 1
            self.num_tokens += 1


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
        """Add outputs that follow the known tokens."""
        if self.token_counts is not None:
            self.token_counts.add(outputs)

"""Large values of sampling parameters, of which equal ones are kept once.

The sequences of an HTTP request have the same biases, token lists and grammar. Each of up to 2,048
sequences arrives as a message of its own, in which a list of 4,096 ids takes 150 kB when decoded.
"""

from collections import deque
from typing import Any, NamedTuple, Self

import msgspec

from protocol.sampling import Grammar, SamplingParams, ThinkingBudget

_NUM_KEPT = 4
"""Requests whose sequences may arrive in turns without losing their common values."""


class LargeValues(NamedTuple):
    """The parameters that may be large."""

    grammar: Grammar | None
    logit_bias: dict[int, float]
    allowed_token_ids: list[int] | None
    bad_words: list[list[int]]
    stop_token_ids: list[int]
    logprob_token_ids: list[int]
    thinking_budget: ThinkingBudget | None

    @classmethod
    def of(cls, params: SamplingParams) -> Self:
        """Return the large values of these parameters."""
        return cls(*[getattr(params, name) for name in cls._fields])

    def put_into(self, params: SamplingParams) -> SamplingParams:
        """Return these parameters with the large values replaced."""
        values: dict[str, Any] = self._asdict()
        return msgspec.structs.replace(params, **values)


class SharedParams:
    """The large values of the latest requests, for the requests that have equal ones."""

    def __init__(self) -> None:
        self._latest: deque[LargeValues] = deque(maxlen=_NUM_KEPT)

    def shared(self, params: SamplingParams) -> SamplingParams:
        """Return equal parameters whose large values are those of an earlier request, if any."""
        values = LargeValues.of(params)
        if not any(values):
            return params
        for known in self._latest:
            if known == values:
                return known.put_into(params)
        self._latest.append(values)
        return params

"""The results of a step that the last stage passes to the others, with speculation.

The other stages need the number of correct drafts among those that the step has verified, and the
drafts that the next step may verify.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class RequestResult(NamedTuple):
    """The result of one request in one step."""

    token_ids: list[int]
    """The sampled tokens: one, and one more for each correct draft."""
    drafts: list[int]
    """The drafts of the tokens that follow."""


def max_words(num_requests: int, num_speculative_tokens: int) -> int:
    """Return the most words that the results of a step take; without speculation, the tokens."""
    if num_speculative_tokens == 0:
        return num_requests
    return num_requests * (2 + 2 * num_speculative_tokens + 1)


def pack_results(results: Iterable[RequestResult]) -> list[int]:
    """Return the results as words."""
    words: list[int] = []
    for token_ids, drafts in results:
        words += (len(token_ids), len(drafts), *token_ids, *drafts)
    return words


def unpack_results(words: Sequence[int]) -> list[RequestResult]:
    """Return the results that `pack_results` has packed."""
    results: list[RequestResult] = []
    first = 0
    while first < len(words):
        num_tokens, num_drafts = words[first : first + 2]
        drafts = first + 2 + num_tokens
        end = drafts + num_drafts
        results.append(RequestResult(list(words[first + 2 : drafts]), list(words[drafts:end])))
        first = end
    return results

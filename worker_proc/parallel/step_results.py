"""What the last stage passes to the others for each request that has sampled.

With speculation, a stage learns from it how many of the drafts that a step verifies are right, and
which drafts the next step may verify.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class RequestResult(NamedTuple):
    """Of one request in one step."""

    token_ids: list[int]
    """One, and one more for each right draft."""
    drafts: list[int]
    """For the tokens after these."""


def max_words(num_requests: int, num_speculative_tokens: int) -> int:
    """Return the most words that the results of a step take."""
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

"""Lists of token ids that share their integer objects: 8 bytes per id instead of 40."""

from collections.abc import Iterable
from functools import cache

NUM_SHARED = 2**18
"""Number of shared ids: the size of the largest vocabularies."""


def shared_ids(token_ids: Iterable[int]) -> list[int]:
    """Return these ids as a list in which ids below NUM_SHARED are shared objects."""
    numbers = _numbers()
    try:
        return list(map(numbers.__getitem__, token_ids))
    except IndexError:
        return [numbers[i] if i < NUM_SHARED else i for i in token_ids]


@cache
def _numbers() -> list[int]:
    """Return all shared numbers; they use 10 MiB, from the first long prompt on."""
    return list(range(NUM_SHARED))

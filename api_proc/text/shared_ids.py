"""Lists of token ids that share their numbers: 8 bytes an id instead of 40."""

from collections.abc import Iterable
from functools import cache

NUM_SHARED = 2**18
"""As many ids as the largest vocabularies have."""


def shared_ids(token_ids: Iterable[int]) -> list[int]:
    """Return equal ids; those below NUM_SHARED are the same objects in every such list."""
    numbers = _numbers()
    try:
        return list(map(numbers.__getitem__, token_ids))
    except IndexError:
        return [numbers[i] if i < NUM_SHARED else i for i in token_ids]


@cache
def _numbers() -> list[int]:
    """Return all numbers; they take 10 MiB, from the first long prompt on."""
    return list(range(NUM_SHARED))

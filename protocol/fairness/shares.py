"""How much one client may hold of what all clients share.

Both rules are dynamic thresholds (Choudhury and Hahne, 1998): the limit of a client follows from
what is free, so that one that takes all that it can leaves room for others.
"""

import math
from collections import Counter

from protocol.fairness.account import Account

SHARE = 8
"""A client may hold this many times what is free."""


def has_share(held: int, free: int, more: int = 1) -> bool:
    """Return whether a client may take `more` of what all clients share, one by one.

    It may while it holds less than `SHARE` times what is free. So a client that takes all that it
    can leaves a ninth, and k such clients leave one part of 8 k + 1. A client that holds nothing
    may take all that is free at once.
    """
    return not held or held + more - 1 < SHARE * (free - more + 1)


def largest_share(limit: int) -> int:
    """Return what a client that takes one by one holds of `limit` if no other holds anything."""
    return math.ceil(SHARE * limit / (SHARE + 1))


class Shares:
    """Limits on the places that an origin (at most half of them) or a tenant (a third) occupies.

    An account gets another place while it has fewer than its origin could still have, and an origin
    while it has fewer than are free.
    """

    def __init__(self, num_places: int) -> None:
        self._num_places = num_places
        self._taken: Counter[Account] = Counter()
        self._taken_by_origin: Counter[str] = Counter()
        self._num_taken = 0

    def has_room(self, account: Account) -> bool:
        num_free = self._num_places - self._num_taken
        return self._taken[account] < num_free - self._taken_by_origin[account.origin]

    def __contains__(self, account: Account) -> bool:
        """Return whether an account has a place."""
        return account in self._taken

    def enter(self, account: Account) -> None:
        """Take a place, whether or not there is room."""
        self._num_taken += 1
        self._taken[account] += 1
        self._taken_by_origin[account.origin] += 1

    def leave(self, account: Account) -> None:
        self._num_taken -= 1
        self._taken[account] -= 1
        self._taken_by_origin[account.origin] -= 1
        if not self._taken[account]:
            del self._taken[account]
        if not self._taken_by_origin[account.origin]:
            del self._taken_by_origin[account.origin]

    def clear(self) -> None:
        self._num_taken = 0
        self._taken.clear()
        self._taken_by_origin.clear()

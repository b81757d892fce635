"""Fair queues: clients are served in turns, and none can fill a queue."""

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class Account(NamedTuple):
    """The client that a piece of work is for."""

    origin: str = ""
    """The API key or the address that sent the request; clients cannot choose it freely."""
    tenant: str = ""
    """The request's tenant among those of its origin."""


class Turns(Generic[T]):
    """One queue per account, served round-robin: over origins, and over the tenants of each.

    The account of the last turn comes after all others, even those that arrive later.
    """

    def __init__(self) -> None:
        self._origins: OrderedDict[str, OrderedDict[str, deque[T]]] = OrderedDict()
        self._last = Account()

    def put(self, account: Account, item: T) -> None:
        tenants = self._origins.setdefault(account.origin, OrderedDict())
        tenants.setdefault(account.tenant, deque()).append(item)

    def take(self, may: Callable[[Account], bool] = lambda _: True) -> tuple[Account, T] | None:
        """Remove and return the next item of an account for which `may` is true, or None."""
        if self._last.origin in self._origins:
            self._origins.move_to_end(self._last.origin)
            tenants = self._origins[self._last.origin]
            if self._last.tenant in tenants:
                tenants.move_to_end(self._last.tenant)
        for origin, tenants in self._origins.items():
            for tenant, items in tenants.items():
                account = Account(origin, tenant)
                if may(account):
                    item = items.popleft()
                    self._last = account
                    if not items:
                        self._remove(account)
                    return account, item
        return None

    def keep(self, is_kept: Callable[[T], bool]) -> None:
        """Remove all other items."""
        for origin, tenants in list(self._origins.items()):
            for tenant, items in list(tenants.items()):
                tenants[tenant] = deque(filter(is_kept, items))
                if not tenants[tenant]:
                    self._remove(Account(origin, tenant))

    def clear(self) -> None:
        self._origins.clear()

    def _remove(self, account: Account) -> None:
        tenants = self._origins[account.origin]
        del tenants[account.tenant]
        if not tenants:
            del self._origins[account.origin]


SHARE = 8
"""A client may hold this many times what is free."""


def has_share(held: int, free: int, more: int = 1) -> bool:
    """Return whether a client may take `more` of what all clients share, one by one.

    It may while it holds less than `SHARE` times what is free (dynamic thresholds: Choudhury and
    Hahne, 1998). So a client that takes all that it can leaves a ninth, and k such clients leave
    one part of 8 k + 1. A client that holds nothing may take all that is free at once.
    """
    return not held or held + more - 1 < SHARE * (free - more + 1)


def largest_share(limit: int) -> int:
    """Return what a client that takes one by one holds of `limit` if no other holds anything."""
    return math.ceil(SHARE * limit / (SHARE + 1))


class Shares:
    """Limits on the places that an origin (at most half of them) or a tenant (a third) occupies.

    An account gets another place while it has fewer than its origin could still have, and an origin
    while it has fewer than are free (dynamic thresholds: Choudhury and Hahne, 1998). So one that
    takes all that it can leaves room for others, and these for further ones.
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

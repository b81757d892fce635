"""A queue in which clients are served in turns, however much one of them puts there."""

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Generic, TypeVar

from protocol.fairness.account import Account

T = TypeVar("T")


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

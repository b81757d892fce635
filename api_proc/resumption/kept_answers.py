"""Answers that were sent completely, and whose requests make room for others.

They are kept because the end of an answer may have been lost on its way. There may be 16,384 of
them, so a request for which none of them can make room is refused without a look at each.
"""

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from api_proc.fairness.budget import Budget, Freed, Lease


class _Kept(NamedTuple):
    request_id: str
    origin: str
    """The client that sent the request."""
    lease: Lease


class KeptAnswers:
    """The answers without a connection, in the order in which the last one of each has ended."""

    def __init__(self, budget: Budget) -> None:
        """`budget` counts all open requests, those of these answers included."""
        self._budget = budget
        self._all: dict[str, _Kept] = {}
        self._by_origin: dict[str, dict[str, _Kept]] = {}
        self._num_held: Counter[str | None] = Counter()
        """Number of answers by the holder of their leases."""
        self._bytes_held: Counter[str | None] = Counter()
        self._num_bytes = 0

    def add(self, request_id: str, origin: str, lease: Lease) -> None:
        """Keep the answer to a request of a client, whose last connection has ended."""
        self.discard(request_id)
        kept = self._all[request_id] = _Kept(request_id, origin, lease)
        self._by_origin.setdefault(origin, {})[request_id] = kept
        self._num_held[lease.holder] += 1
        self._bytes_held[lease.holder] += lease.num_bytes
        self._num_bytes += lease.num_bytes

    def discard(self, request_id: str) -> None:
        """Forget an answer that is removed or read again; other ids are ignored."""
        kept = self._all.pop(request_id, None)
        if kept is None:
            return
        own = self._by_origin[kept.origin]
        del own[request_id]
        if not own:
            del self._by_origin[kept.origin]
        holder = kept.lease.holder
        self._num_held[holder] -= 1
        self._bytes_held[holder] -= kept.lease.num_bytes
        self._num_bytes -= kept.lease.num_bytes
        if not self._num_held[holder]:
            del self._num_held[holder], self._bytes_held[holder]

    def to_remove_for(self, num_bytes: int, origin: str | None) -> list[str]:
        """Return the requests whose removal makes room for another one; empty: that of none does.

        The client's own ones come first. Those of others are removed only as far as the bounds of
        all are reached, and only if the shares of this client permit the request then.
        """
        if not self._is_enough(num_bytes, self._freed_by_all(origin)):
            return []
        freed, removed = Freed(origin), list[str]()
        for kept, is_own in self._in_order(origin):
            has_room = self._budget.has_room(num_bytes, freed)
            if has_room and not (is_own and not self._budget.has_share(num_bytes, freed)):
                break
            freed.add(kept.lease)
            removed.append(kept.request_id)
        return removed if self._is_enough(num_bytes, freed) else []

    def _is_enough(self, num_bytes: int, freed: Freed) -> bool:
        budget = self._budget
        return budget.has_room(num_bytes, freed) and budget.has_share(num_bytes, freed)

    def _freed_by_all(self, origin: str | None) -> Freed:
        """Return what the removal of all answers would free, the most that any removal frees."""
        freed = Freed(origin)
        freed.num_requests, freed.num_bytes = len(self._all), self._num_bytes
        freed.num_own_requests = self._num_held[origin]
        freed.num_own_bytes = self._bytes_held[origin]
        return freed

    def _in_order(self, origin: str | None) -> Iterator[tuple[_Kept, bool]]:
        """Yield the answers, those of a client before all others, and with True."""
        own = {} if origin is None else self._by_origin.get(origin, {})
        for kept in own.values():
            yield kept, True
        for kept in self._all.values():
            if kept.request_id not in own:
                yield kept, False

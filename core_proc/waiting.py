"""The queue of requests that wait, in the policy's order."""

import heapq
import itertools
from collections.abc import Callable

from core_proc.policy import Key, Policy
from core_proc.request import BLOCKED, Request

_Row = tuple[Key, int, Request]


class WaitingQueue:
    """New, blocked and preempted requests.

    Heaps with lazy removal: an aborted request leaves at once, its row when it surfaces or when
    dead rows outnumber live ones. So neither abort nor a look at the front depends on the length.
    Long prompts lie on a heap of their own: where no more of them may start, others overtake.
    Blocked requests lie on no heap, and as keys are constant, they find their old place again.
    """

    def __init__(self, policy: Policy, is_long: Callable[[Request], bool]) -> None:
        self._policy = policy
        self._is_long = is_long
        self._row_numbers = itertools.count()
        self._short: list[_Row] = []
        self._long: list[_Row] = []
        self._row_of: dict[Request, int] = {}
        self._blocked: set[Request] = set()
        self.num_prompt_tokens = 0
        """Of all that wait."""

    def __len__(self) -> int:
        return len(self._row_of) + len(self._blocked)

    def __contains__(self, request: Request) -> bool:
        return request in self._row_of or request in self._blocked

    def push(self, request: Request) -> None:
        """Enter a request at its place; if its status says that it is blocked, out of sight."""
        assert request not in self
        self.num_prompt_tokens += request.num_prompt_tokens
        key = self._policy.order(request)
        if request.status in BLOCKED:
            self._blocked.add(request)
            return
        number = self._row_of[request] = next(self._row_numbers)
        heap = self._long if self._is_long(request) else self._short
        heapq.heappush(heap, (key, number, request))

    def front(self, *, with_long: bool = True) -> Request | None:
        """Return the request that is next, without taking it."""
        short = self._top(self._short)
        long = self._top(self._long) if with_long else None
        rows = [row for row in (short, long) if row is not None]
        return min(rows)[2] if rows else None

    def front_of(
        self, condition: Callable[[Request], bool], *, with_long: bool = True
    ) -> Request | None:
        """Return who is next of those that meet a condition (looks at all that wait)."""
        rows = self._live(self._short + self._long if with_long else self._short)
        rows = [row for row in rows if condition(row[2])]
        return min(rows)[2] if rows else None

    def _top(self, heap: list[_Row]) -> _Row | None:
        while heap:
            row = heap[0]
            if self._row_of.get(row[2]) == row[1]:
                return row
            heapq.heappop(heap)
        return None

    def remove(self, request: Request) -> None:
        """Take out a request, wherever it stands."""
        self.num_prompt_tokens -= request.num_prompt_tokens
        if request in self._blocked:
            self._blocked.remove(request)
            return
        del self._row_of[request]
        if len(self._short) + len(self._long) > 2 * len(self._row_of) + 16:
            for heap in (self._short, self._long):
                heap[:] = self._live(heap)
                heapq.heapify(heap)

    def _live(self, rows: list[_Row]) -> list[_Row]:
        return [row for row in rows if self._row_of.get(row[2]) == row[1]]

    def in_order(self) -> list[Request]:
        """List all, front first (sorts: for tests and displays)."""
        rows = self._live(self._short + self._long)
        rows += [(self._policy.order(request), -1, request) for request in self._blocked]
        return [row[2] for row in sorted(rows, key=lambda row: row[:2])]

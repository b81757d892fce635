"""The queue of waiting requests, in the policy's order."""

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Iterable

from core_proc.policy import Key, Policy
from core_proc.request import BLOCKED, Request

_Row = tuple[Key, int, Request]


class WaitingQueue:
    """New, blocked and preempted requests.

    These are heaps with lazy removal: an aborted request leaves at once, its row when it reaches
    the top, or when dead rows outnumber live ones. The time of an abort, and of a look at the
    front, therefore does not depend on the length. There is a heap for each kind that the front may
    exclude: long prompts if no more of them may begin, and new requests during a pause. Blocked
    requests are in no heap; since keys are constant, they return to their old place.
    """

    def __init__(self, policy: Policy, is_long: Callable[[Request], bool]) -> None:
        self._policy = policy
        self._is_long = is_long
        self._row_numbers = itertools.count()
        self._heaps: dict[tuple[bool, bool], list[_Row]] = {
            (is_long, is_new): [] for is_long in (False, True) for is_new in (False, True)
        }
        self._row_of: dict[Request, int] = {}
        self._blocked: set[Request] = set()
        self.num_prompt_tokens = 0
        self.num_of: Counter[str] = Counter()
        """Requests of each origin."""
        self.num_prompt_tokens_of: Counter[str] = Counter()
        """Tokens of their prompts."""

    def __len__(self) -> int:
        return len(self._row_of) + len(self._blocked)

    def __contains__(self, request: Request) -> bool:
        return request in self._row_of or request in self._blocked

    def push(self, request: Request) -> None:
        """Add a request at its place, or aside if its status is a blocked one."""
        assert request not in self
        self._count(request, 1)
        key = self._policy.order(request)
        if request.status in BLOCKED:
            self._blocked.add(request)
            return
        number = self._row_of[request] = next(self._row_numbers)
        heap = self._heaps[self._is_long(request), not request.has_begun()]
        heapq.heappush(heap, (key, number, request))

    def _count(self, request: Request, sign: int) -> None:
        """Add a request to the totals, or subtract it if `sign` is -1."""
        origin, num_tokens = request.origin, sign * request.num_prompt_tokens
        self.num_prompt_tokens += num_tokens
        self.num_prompt_tokens_of[origin] += num_tokens
        self.num_of[origin] += sign
        if not self.num_of[origin]:
            del self.num_of[origin], self.num_prompt_tokens_of[origin]

    @property
    def num_admissible(self) -> int:
        """Number of requests that are not blocked."""
        return len(self._row_of)

    def front(self, *, with_long: bool = True, with_new: bool = True) -> Request | None:
        """Return the next request without removing it: of all, or without long or new ones."""
        rows = [
            row
            for (is_long, is_new), heap in self._heaps.items()
            if heap and is_long <= with_long and is_new <= with_new
            if (row := self._top(heap)) is not None
        ]
        return min(rows)[2] if rows else None

    def _top(self, heap: list[_Row]) -> _Row | None:
        while heap:
            row = heap[0]
            if self._row_of.get(row[2]) == row[1]:
                return row
            heapq.heappop(heap)
        return None

    def remove(self, request: Request) -> None:
        self._count(request, -1)
        if request in self._blocked:
            self._blocked.remove(request)
            return
        del self._row_of[request]
        if sum(map(len, self._heaps.values())) > 2 * len(self._row_of) + 16:
            for heap in self._heaps.values():
                heap[:] = self._live(heap)
                heapq.heapify(heap)

    def _live(self, rows: Iterable[_Row]) -> list[_Row]:
        return [row for row in rows if self._row_of.get(row[2]) == row[1]]

    def in_order(self) -> list[Request]:
        """Return all requests, front first (sorts them: for tests and displays)."""
        rows = self._live(itertools.chain(*self._heaps.values()))
        rows += [(self._policy.order(request), -1, request) for request in self._blocked]
        return [row[2] for row in sorted(rows, key=lambda row: row[:2])]

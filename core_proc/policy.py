"""Scheduling policies, and the waiting queue that they order.

A policy is an ordering, not a loop: who waits in front, and who loses its blocks when memory runs
out. To add one, write a class with `order` and `victim` and name it in `POLICIES`.
"""

import heapq
import itertools
from collections.abc import Sequence
from typing import Any, Protocol

from core_proc.request import Request


class Policy(Protocol):
    """What the scheduler asks of a policy."""

    def order(self, request: Request) -> tuple[Any, ...]:
        """Sort key in the waiting queue, smallest first; must not change while it waits."""
        ...

    def victim(self, running: Sequence[Request]) -> Request:
        """Who is preempted, given all that run (at least one)."""
        ...


class Fcfs:
    """First come, first served: the order is that of arrival at the scheduler.

    Whoever runs arrived before whoever waits, so a preempted request returns to the front.
    """

    def order(self, request: Request) -> tuple[int]:
        return (request.arrival_index,)

    def victim(self, running: Sequence[Request]) -> Request:
        return running[-1]


class Priority:
    """Lower `priority` first, then earlier arrival. Waiting requests never preempt running ones.

    Among equal victims the first in `running` goes. As a resumed request runs last, two of them
    could take turns in evicting each other for ever; so after some rounds the ids decide.
    """

    MAX_EVEN_PREEMPTIONS = 64

    def order(self, request: Request) -> tuple[int, float, int]:
        return (request.priority, request.arrival_time, request.req_id)

    def victim(self, running: Sequence[Request]) -> Request:
        return max(running, key=self._victim_key)

    def _victim_key(self, request: Request) -> tuple[int, float, int]:
        tie_breaker = request.req_id if request.num_preemptions > self.MAX_EVEN_PREEMPTIONS else -1
        return (request.priority, request.arrival_time, tie_breaker)


POLICIES: dict[str, type[Policy]] = {"fcfs": Fcfs, "priority": Priority}


class WaitingQueue:
    """Waiting and preempted requests in the policy's order.

    A heap with lazy removal: an aborted request leaves at once, its heap entry when it surfaces or
    when dead entries outnumber live ones. So neither abort nor look at the front depends on length.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._tie_breaker = itertools.count()
        self._heap: list[tuple[tuple[Any, ...], int, Request]] = []
        self._entry_of: dict[Request, int] = {}

    def __len__(self) -> int:
        return len(self._entry_of)

    def __contains__(self, request: Request) -> bool:
        return request in self._entry_of

    def push(self, request: Request) -> None:
        """Enter a request at its place."""
        assert request not in self._entry_of
        entry = next(self._tie_breaker)
        self._entry_of[request] = entry
        heapq.heappush(self._heap, (self._policy.order(request), entry, request))

    def front(self) -> Request | None:
        """Return the request that is next, without taking it."""
        heap = self._heap
        while heap:
            _, entry, request = heap[0]
            if self._entry_of.get(request) == entry:
                return request
            heapq.heappop(heap)
        return None

    def remove(self, request: Request) -> None:
        """Take out a request, wherever it stands."""
        del self._entry_of[request]
        if len(self._heap) > 2 * len(self._entry_of) + 16:
            self._heap = [row for row in self._heap if self._entry_of.get(row[2]) == row[1]]
            heapq.heapify(self._heap)

    def in_order(self) -> list[Request]:
        """List all, front first (sorts: for tests and displays)."""
        live = (row for row in self._heap if self._entry_of.get(row[2]) == row[1])
        return [request for _, _, request in sorted(live, key=lambda row: row[:2])]

"""Decides which adapters have a turn, and which of their requests may run meanwhile.

Theory of operation. An adapter has a turn while requests with it may run; at most `max_loras` have
one, so a step never has more adapters than that.

* A turn begins, in the order in which adapters asked for one, as soon as there is room. It ends
  when another adapter waits and the last request of the turn has ended.
* While another adapter waits, a turn takes at most as many further requests as fit in a step, in
  the order of the scheduling policy. All others wait for the adapter's next turn, also those that
  came before another adapter waited. So every adapter gets its turn, however many requests there
  are for the others.
"""

import heapq
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from core_proc.policy import Key
from core_proc.request import Request, RequestStatus
from core_proc.scheduler import Scheduler

_Row = tuple[Key, int, Request]
"""A request, after its place in the order of the policy and its id."""


@dataclass(slots=True, eq=False)
class AdapterRequests:
    """The requests with one adapter: those of its turn, and those that wait for its next turn."""

    has_turn: bool = False
    num_left: int = 0
    """Requests that its turn still takes while another adapter waits."""
    taken: dict[Request, None] = field(default_factory=dict)
    """Requests of its turn, in the order in which they joined it. Some of them may have ended."""
    waiting: list[_Row] = field(default_factory=list)
    """Requests for its next turn: a heap. Some of them may have ended."""
    is_cut: bool = False
    """Whether its turn was limited because another adapter waits; the requests beyond the limit
    wait for its next turn."""

    @property
    def is_empty(self) -> bool:
        return not (self.taken or self.waiting)

    def all(self) -> list[Request]:
        """Return the requests of the turn, and those that wait."""
        return [*self.taken, *(request for _, _, request in self.waiting)]

    def forget_ended(self) -> None:
        self.taken = {request: None for request in self.taken if not request.is_finished}
        if any(request.is_finished for _, _, request in self.waiting):
            self.waiting = [row for row in self.waiting if not row[2].is_finished]
            heapq.heapify(self.waiting)


class AdapterTurns:
    """The turns of the adapters of a scheduler's requests."""

    def __init__(self, scheduler: Scheduler, *, max_loras: int, num_taken: int) -> None:
        """Begin without adapters.

        Args:
            scheduler: the scheduler whose requests name adapters.
            max_loras: maximum number of adapters that have a turn.
            num_taken: maximum number of requests in a turn for which another adapter waits.
        """
        self._scheduler = scheduler
        self._max_loras = max_loras
        self._num_taken = num_taken
        self._with_turn: list[AdapterRequests] = []
        self._queue: deque[AdapterRequests] = deque()
        """Adapters that wait for a turn."""

    @property
    def are_awaited(self) -> bool:
        """Whether an adapter waits for a turn."""
        return bool(self._queue)

    def add(self, requests: AdapterRequests, request: Request) -> None:
        """Add a request to the turn of its adapter, or let it wait for the next one."""
        if requests.has_turn and (not self._queue or requests.num_left > 0):
            requests.num_left -= bool(self._queue)
            requests.taken[request] = None
        else:
            self._put_waiting(requests, request)
            self._ask_for_turn(requests)

    def _put_waiting(self, requests: AdapterRequests, request: Request) -> None:
        row = self._scheduler.policy.order(request), request.req_id, request
        heapq.heappush(requests.waiting, row)

    def _ask_for_turn(self, requests: AdapterRequests) -> None:
        if not requests.has_turn and requests not in self._queue:
            self._queue.append(requests)
            for other in self._with_turn:
                self._cut(other)

    def _cut(self, requests: AdapterRequests) -> None:
        """Limit a turn to some further requests, because another adapter waits."""
        if requests.is_cut:
            return
        requests.is_cut = True
        order = self._scheduler.policy.order
        others = [request for request in requests.taken if not _has_begun(request)]
        others.sort(key=lambda request: (order(request), request.req_id))
        for request in others[requests.num_left :]:
            del requests.taken[request]
            self._put_waiting(requests, request)
            self._scheduler.hold(request, RequestStatus.WAITING_FOR_ADAPTER)
        requests.num_left -= len(others[: requests.num_left])

    def waits_for_others(self, requests: AdapterRequests, request: Request) -> bool:
        """Return whether a request gets its turn only after requests of other adapters end."""
        if request in requests.taken or request.is_finished:
            return False
        busy = [one for one in self._with_turn if any(not r.is_finished for r in one.taken)]
        return requests.has_turn or len(busy) >= self._max_loras

    def pass_on(self) -> list[Request]:
        """Let turns end and begin; return the requests that have joined a turn."""
        self._queue = deque(requests for requests in self._queue if requests.waiting)
        if self._queue:
            for requests in self._with_turn:
                requests.has_turn = bool(requests.taken)
                if not requests.has_turn and requests.waiting:
                    self._queue.append(requests)
            self._with_turn = [requests for requests in self._with_turn if requests.has_turn]
        while self._queue and len(self._with_turn) < self._max_loras:
            requests = self._queue.popleft()
            requests.has_turn, requests.num_left = True, self._num_taken
            requests.is_cut = True  # it has taken nothing yet
            self._with_turn.append(requests)
        return [request for one in self._with_turn for request in self._take_waiting(one)]

    def _take_waiting(self, requests: AdapterRequests) -> Iterator[Request]:
        """Let requests join the turn of their adapter, and yield them."""
        if not self._queue:
            requests.is_cut, requests.num_left = False, self._num_taken
        while requests.waiting and (not self._queue or requests.num_left > 0):
            requests.num_left -= bool(self._queue)
            _, _, request = heapq.heappop(requests.waiting)
            requests.taken[request] = None
            yield request

    def end(self, requests: AdapterRequests) -> None:
        """End the turn of an adapter that has no requests in it, if it has one."""
        if requests.has_turn:
            requests.has_turn = False
            self._with_turn.remove(requests)


def _has_begun(request: Request) -> bool:
    holds_blocks = (RequestStatus.RUNNING, RequestStatus.WAITING_FOR_REMOTE_KV)
    return request.is_finished or request.status in holds_blocks or request.has_begun()

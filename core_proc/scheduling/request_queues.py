"""The queues of waiting and of running requests."""

from itertools import count

from core_proc.request import Request, RequestStatus
from core_proc.scheduling.answer_size import row_bytes
from core_proc.scheduling.due_index import DueIndex
from core_proc.scheduling.waiting import WaitingQueue
from protocol.sampling import FinishReason


class RequestQueues:
    """Every unfinished request is in exactly one queue, according to its status.

    The waiting queue is in the policy's order, the running queue in order of admission. A request
    leaves the running queue by a change of its status; all requests that have left are removed
    together when the queue is read next, so that the end of n requests costs O(n) instead of O(n²).
    """

    def __init__(self, waiting: WaitingQueue) -> None:
        self.requests: dict[int, Request] = {}
        """The requests of both queues, by id."""
        self.waiting = waiting
        self.due_index = DueIndex()
        self.num_moves = 0
        """Changes whenever a request begins to run or stops running."""
        self.num_row_bytes = 0
        """Sum of `row_bytes` over the running requests."""
        self._running: list[Request] = []
        self._some_left = False
        self._arrivals = count()
        self._admissions = count()

    @property
    def running(self) -> list[Request]:
        """The running requests; a new list after some have left, safe for iteration."""
        if self._some_left:
            self._some_left = False
            running = RequestStatus.RUNNING
            self._running = [request for request in self._running if request.status is running]
        return self._running

    def add(self, request: Request) -> None:
        request.arrival_index = next(self._arrivals)
        self.waiting.push(request)
        self.requests[request.req_id] = request

    def start(self, request: Request) -> None:
        """Move a request from the waiting queue to the end of the running queue."""
        running = self.running
        self.waiting.remove(request)
        request.become(RequestStatus.RUNNING)
        request.admission_index = next(self._admissions)
        running.append(request)
        self.num_moves += 1
        self.num_row_bytes += row_bytes(request.sampling_params)

    def requeue(self, request: Request) -> None:
        self._leave_running(request)
        request.become(RequestStatus.PREEMPTED)
        self.waiting.push(request)

    def change_waiting(self, request: Request, status: RequestStatus) -> None:
        """Change a waiting request to another waiting status: blocked, or no longer blocked."""
        self.waiting.remove(request)
        request.become(status)
        self.waiting.push(request)

    def unblock(self, request: Request) -> None:
        """Return a blocked request to its old place in the queue."""
        has_run = request.num_cached_tokens is not None
        self.change_waiting(request, RequestStatus.PREEMPTED if has_run else RequestStatus.WAITING)

    def finish(self, request: Request, reason: FinishReason, stop_token_id: int | None) -> None:
        """Remove a request from its queue, and end it."""
        if request.status is RequestStatus.RUNNING:
            self._leave_running(request)
        else:
            self.waiting.remove(request)
        request.finish(reason, stop_token_id)
        del self.requests[request.req_id]

    def _leave_running(self, request: Request) -> None:
        self._some_left = True
        self.num_moves += 1
        self.num_row_bytes -= row_bytes(request.sampling_params)

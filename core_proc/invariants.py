"""What must hold between any two steps of a scheduler: for tests and for debugging."""

from core_proc.request import Request, RequestStatus
from core_proc.scheduler import Scheduler


def check_invariants(scheduler: Scheduler) -> None:
    """Compare everything that must agree with everything else.

    Raises:
        AssertionError: at the first contradiction.
    """
    running, waiting = scheduler.running, scheduler.waiting.in_order()
    scheduler.kv.check_invariants(running)
    assert len(running) <= scheduler.max_num_running
    assert len(scheduler.in_flight) <= scheduler.max_steps_in_flight
    assert len(waiting) == scheduler.num_waiting
    assert len(running) + len(waiting) == len(scheduler.requests)
    assert {*running, *waiting} == set(scheduler.requests.values())
    for request in running:
        _check_running(request, _num_owed(scheduler, request), scheduler.kv.block_size)
    for request in waiting:
        assert request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
        assert request.num_late_tokens == _num_owed(scheduler, request)
        assert request.num_computed_tokens == 0
        assert request.block_ids == []


def _check_running(request: Request, num_owed: int, block_size: int) -> None:
    assert request.status is RequestStatus.RUNNING
    assert request.num_late_tokens == 0
    assert request.num_pending_tokens == num_owed
    assert request.num_tokens + num_owed <= request.max_num_tokens
    assert request.num_computed_tokens < request.num_tokens + max(num_owed, 1)
    assert request.num_computed_tokens <= len(request.block_ids) * block_size


def _num_owed(scheduler: Scheduler, request: Request) -> int:
    return sum(sampling.count(request) for _, sampling in scheduler.in_flight)

"""What must hold between any two steps of a scheduler: for tests and for debugging."""

from core_proc.request import BLOCKED, Request, RequestStatus
from core_proc.scheduler import Scheduler


def check_invariants(scheduler: Scheduler) -> None:
    """Compare everything that must agree with everything else.

    Raises:
        AssertionError: at the first contradiction.
    """
    running, waiting = scheduler.running, scheduler.waiting.in_order()
    scheduler.kv.check_invariants(scheduler.holders())
    assert len(running) <= scheduler.options.max_num_running
    assert len(scheduler.in_flight) <= scheduler.options.max_steps_in_flight
    assert len(waiting) == scheduler.num_waiting
    assert len(running) + len(waiting) == len(scheduler.requests)
    assert {*running, *waiting} == set(scheduler.requests.values())
    indices = [request.admission_index for request in running]
    assert indices == sorted(set(indices))
    for request in running:
        _check_running(request, _num_owed(scheduler, request), scheduler.kv.block_size)
    for request in waiting:
        _check_waiting(request, _num_owed(scheduler, request))
    scheduler.swapper.check_invariants(waiting)
    scheduler.partial_prefills.check_invariants(running)


def _check_running(request: Request, num_owed: int, block_size: int) -> None:
    assert request.status is RequestStatus.RUNNING
    assert request.num_late_tokens == 0
    assert request.swapped_out is None
    assert request.num_pending_tokens == num_owed
    assert request.num_tokens + num_owed <= request.max_num_tokens
    assert request.num_computed_tokens < request.num_tokens + max(num_owed, 1)
    assert request.num_computed_tokens <= len(request.block_tables[0]) * block_size


def _check_waiting(request: Request, num_owed: int) -> None:
    assert request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED, *BLOCKED)
    assert request.num_late_tokens == num_owed
    assert request.num_computed_tokens == 0
    is_loading = request.status is RequestStatus.WAITING_FOR_REMOTE_KV
    assert bool(request.block_tables) == is_loading


def _num_owed(scheduler: Scheduler, request: Request) -> int:
    return sum(sampling.count(request) for _, sampling in scheduler.in_flight)

"""The waiting queue alone: order, removal, blocked and long requests."""

import random

from core_proc.options import SchedulerOptions
from core_proc.policy import make_policy
from core_proc.request import Request, RequestStatus
from core_proc.scheduling.waiting import WaitingQueue
from protocol.sampling import SamplingParams

LONG = 10


def _queue(policy: str = "priority") -> WaitingQueue:
    return WaitingQueue(make_policy(SchedulerOptions(policy=policy)), lambda r: r.num_tokens > LONG)


def _request(req_id: int, priority: int = 0, length: int = 1) -> Request:
    request = Request(req_id, [1] * length, SamplingParams(), priority=priority)
    request.arrival_index = req_id
    return request


def test_removals_leave_no_trace() -> None:
    queue = _queue()
    requests = [_request(i, priority=i % 7, length=1 + i % 20) for i in range(500)]
    for request in requests:
        queue.push(request)
    for request in requests[::2] + requests[1::4]:
        queue.remove(request)
    left = sorted(requests[3::4], key=lambda request: (request.priority, request.req_id))
    assert queue.in_order() == left
    assert queue.front() is left[0]
    assert len(queue) == len(left)
    assert sum(map(len, queue._heaps.values())) <= 2 * len(left) + 16


def test_short_requests_overtake_long_ones_only_on_demand() -> None:
    queue = _queue("fcfs")
    requests = [_request(i, length=1 + LONG * (i % 2 == 0)) for i in range(6)]
    for request in requests:
        queue.push(request)
    assert queue.front() is requests[0]
    assert queue.front(with_long=False) is requests[1]
    assert queue.in_order() == requests


def test_under_a_pause_of_new_ones_the_front_is_the_first_that_has_begun() -> None:
    queue = _queue("fcfs")
    requests = [_request(i, length=1 + LONG * (i % 2 == 0)) for i in range(6)]
    for request in requests[2:5]:
        request.num_cached_tokens = 0
    for request in requests:
        queue.push(request)
    assert queue.front(with_new=False) is requests[2]
    assert queue.front(with_new=False, with_long=False) is requests[3]
    for request in requests[2:5]:
        queue.remove(request)
    assert queue.front(with_new=False) is None
    assert queue.front() is requests[0]


def test_a_blocked_request_is_never_in_front_and_finds_its_place_again() -> None:
    queue = _queue("fcfs")
    requests = [_request(i) for i in range(4)]
    requests[1].status = RequestStatus.WAITING_FOR_GRAMMAR
    for request in requests:
        queue.push(request)
    assert queue.in_order() == requests
    queue.remove(requests[0])
    assert queue.front() is requests[2]
    queue.remove(requests[1])
    requests[1].become(RequestStatus.WAITING)
    queue.push(requests[1])
    assert queue.front() is requests[1]
    assert requests[0] not in queue


def test_the_front_is_always_the_smallest_of_what_is_left() -> None:
    rng = random.Random(1)
    queue = _queue()
    live: list[Request] = []
    for req_id in range(2000):
        if live and rng.random() < 0.45:
            queue.remove(live.pop(rng.randrange(len(live))))
        else:
            live.append(_request(req_id, rng.randrange(5), rng.choice([1, 20])))
            queue.push(live[-1])
        order = sorted(live, key=lambda request: (request.priority, request.req_id))
        assert queue.front() is (order[0] if order else None)

"""The number of drafts follows acceptance and step times, with a worker whose times are computed.

A step takes as long as its rows and the passes of the draft model; the figures are in nanoseconds,
and time is what the worker has reported.
"""

from binascii import crc32
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from core_proc.invariants import check_invariants
from core_proc.options import SchedulerOptions
from core_proc.request import Request
from core_proc.scheduler import Scheduler
from protocol.core_worker import ModelRunnerOutput, SchedulerOutput
from protocol.sampling import SamplingParams

MS = 1_000_000
MAX_DRAFTS = 6
TOKEN = 7
Right = Callable[[int, int], bool]
"""Whether the draft for the output of a request at a position is right."""


@dataclass
class Mirrored:
    """One request of the worker."""

    num_known: int
    num_prompt_tokens: int
    num_computed: int
    draft_limit: int


class TimedWorker:
    """A worker that computes nothing: each draft is right or wrong as `right` has it."""

    def __init__(
        self, right: Right, *, row_ms: float = 0.2, pass_ms: float = 2.0, most: int = MAX_DRAFTS
    ) -> None:
        self._right = right
        self._row_ms = row_ms
        self._pass_ms = pass_ms
        self._max_drafts = most
        self._mirror: dict[int, Mirrored] = {}
        self.now_ms = 0.0
        self.num_drafts = 0

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        for req_id in step.finished_req_ids:
            del self._mirror[req_id]
        for new in step.scheduled_new_reqs:
            num_known = len(new.token_ids) // 4
            self._mirror[new.req_id] = Mirrored(num_known, num_known, 0, self._max_drafts)
        for req_id, limit in step.draft_limits.items():
            self._mirror[req_id].draft_limit = limit
        counts, drafts = [], []
        for req_id, request in self._mirror.items():
            num_tokens = step.num_scheduled_tokens.get(req_id, 1)
            num_verified = request.num_computed + num_tokens - request.num_known
            if num_tokens == 0:
                continue
            assert 0 <= num_verified <= self._max_drafts
            position = request.num_known - request.num_prompt_tokens
            num_right = 0
            while num_right < num_verified and self._right(req_id, position + num_right):
                num_right += 1
            request.num_known += num_right + 1
            request.num_computed = request.num_known - 1
            counts.append(num_right + 1)
            drafts.append(request.draft_limit)
        rows_ms = 10 + self._row_ms * step.total_num_scheduled_tokens
        draft_ms = self._pass_ms * max(drafts, default=0)
        wait_ms = 0.1 if draft_ms == 0 else 0.5
        self.now_ms += rows_ms + draft_ms + wait_ms
        self.num_drafts += sum(drafts)
        return ModelRunnerOutput(
            step.step_id,
            [TOKEN] * sum(counts),
            counts,
            drafts,
            forward_ns=int((rows_ms + draft_ms) * MS),
            draft_ns=int(draft_ms * MS),
            wait_ns=int(wait_ms * MS),
        )


def run(
    worker: TimedWorker, *, num_requests: int = 1, max_tokens: int = 400, **options: Any
) -> float:
    """Run requests to their ends; returns the time of a token of each, in milliseconds."""
    settings = {
        "num_blocks": 4096,
        "max_num_seqs": 64,
        "max_steps_in_flight": 2,
        "num_speculative_tokens": MAX_DRAFTS,
        "adaptive_speculation": True,
        "has_draft_model": True,
    }
    scheduler = Scheduler(SchedulerOptions(**(settings | options)))
    for req_id in range(num_requests):
        params = SamplingParams(max_tokens=max_tokens)
        scheduler.add_request(Request(req_id, [req_id + 1] * 20, params))
    pipe: deque[SchedulerOutput] = deque()
    num_tokens = 0
    while scheduler.has_unfinished or pipe:
        while (step := scheduler.schedule()) is not None:
            pipe.append(step)
        if scheduler.next_step_id % 50 == 0:
            check_invariants(scheduler)
        results = scheduler.update_from_output(worker.execute(pipe.popleft()))
        num_tokens += sum(len(result.new_token_ids) for result in results)
    assert num_tokens == num_requests * max_tokens
    return worker.now_ms * num_requests / num_tokens


PLAIN_MS = 10.3
"""The time of a step with one request and no drafts."""


def without_drafts(row_ms: float = 0.2) -> TimedWorker:
    return TimedWorker(every(1), row_ms=row_ms, most=0)


def every(period: int) -> Right:
    return lambda req_id, position: position % period != 0


def test_right_drafts_are_used_to_the_full() -> None:
    """A step of 10 + 1.4 ms and 6 passes of 2 ms brings 7 tokens."""
    token_ms = run(TimedWorker(lambda req_id, position: True), max_tokens=1000)
    assert token_ms < 1.1 * (10 + 0.2 * 7 + 6 * 2 + 0.5) / 7


@pytest.mark.parametrize("num_requests", [1, 8, 64])
def test_wrong_drafts_cost_little(num_requests: int) -> None:
    """They cost at most 3 % of the time, however many requests run."""
    without = run(without_drafts(), num_requests=num_requests, num_speculative_tokens=0)
    worker = TimedWorker(every(1))
    assert run(worker, num_requests=num_requests) <= 1.03 * without
    assert worker.num_drafts > 0, "they were tried"


def test_fixed_speculation_pays_for_every_wrong_draft() -> None:
    """The comparison shows what the switch is for."""
    assert run(TimedWorker(every(1)), adaptive_speculation=False) > 2 * PLAIN_MS


def test_the_number_of_drafts_fits_their_acceptance() -> None:
    """Three of five are right, at random: two or three are worth their time, six are not."""

    def right(req_id: int, position: int) -> bool:
        return crc32(position.to_bytes(4, "little")) % 5 < 3

    fixed = {
        most: run(
            TimedWorker(right, most=most),
            num_speculative_tokens=most,
            adaptive_speculation=False,
        )
        for most in (1, 2, 3, MAX_DRAFTS)
    }
    adaptive = run(TimedWorker(right), max_tokens=1000)
    assert adaptive < 1.1 * min(fixed.values())
    assert adaptive < 0.85 * fixed[MAX_DRAFTS]


def test_drafts_end_when_they_turn_wrong_and_return_when_they_turn_right() -> None:
    worker = TimedWorker(lambda req_id, position: not 500 <= position < 1500)
    token_ms = run(worker, max_tokens=4000)
    right_ms = (10 + 0.2 * 7 + 6 * 2 + 0.5) / 7
    assert token_ms < (3000 * 1.3 * right_ms + 1000 * 1.06 * PLAIN_MS) / 4000


def test_a_large_batch_goes_without_drafts_where_rows_are_dear() -> None:
    """If a row costs as much as a token, a right draft gains nothing."""
    settings = {"num_requests": 64, "max_tokens": 300}
    without = run(without_drafts(row_ms=2), num_speculative_tokens=0, **settings)
    assert run(TimedWorker(every(2), row_ms=2), **settings) < 1.03 * without


def test_each_request_has_its_own_acceptance() -> None:
    """Requests whose drafts are wrong get few; the others keep theirs."""
    worker = TimedWorker(lambda req_id, position: req_id % 2 == 0, row_ms=1, pass_ms=0)
    run(worker, has_draft_model=False, num_requests=4, max_tokens=400)
    num_right = 2 * 400 * MAX_DRAFTS / (MAX_DRAFTS + 1)
    assert worker.num_drafts < 1.3 * num_right


def test_decisions_are_the_same_for_the_same_times() -> None:
    """No clock is read: a core that gets the same results takes the same steps."""
    runs = [TimedWorker(every(4)) for _ in range(2)]
    assert run(runs[0], num_requests=5) == run(runs[1], num_requests=5)
    assert runs[0].num_drafts == runs[1].num_drafts

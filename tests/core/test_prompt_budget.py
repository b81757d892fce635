"""Prompts are cut so that steps beside decoding requests end in time, by measured durations."""

from collections import deque
from collections.abc import Callable

import pytest

from core_proc.invariants import check_invariants
from core_proc.options import SchedulerOptions
from core_proc.request import Request
from core_proc.scheduler import Scheduler
from core_proc.scheduling.prompt_budget import MIN_TOKENS
from protocol.core_worker import SchedulerOutput
from protocol.sampling import Pooling, SamplingParams, pooling_params
from tests.core.fake_worker import FakeWorker

PROMPT = 3000
BASE_MS, ROW_MS, TOKEN_MS = 10.0, 0.5, 0.2


def flat(num_prompt_tokens: int, position: int) -> float:
    return TOKEN_MS * num_prompt_tokens


def rising(num_prompt_tokens: int, position: int) -> float:
    """The time of a token grows with what it attends to: fivefold until the end."""
    return TOKEN_MS * num_prompt_tokens * (1 + 4 * position / PROMPT)


class Run:
    """Four requests decode, and a long prompt arrives after 40 steps."""

    def __init__(self, target_itl_ms: float, cost: Callable[[int, int], float] = flat) -> None:
        self.gaps_ms: list[float] = []
        """Durations of the steps that computed a part of the prompt beside the others."""
        self.chunks: list[int] = []
        options = SchedulerOptions(
            num_blocks=4096, max_steps_in_flight=2, target_itl_ms=target_itl_ms
        )
        self._scheduler = Scheduler(options)
        self._worker = FakeWorker(16, 4096, lambda req_id, position: 7)
        self._cost = cost
        for req_id in range(4):
            self._add(req_id, 20, 400)
        self._pipe: deque[SchedulerOutput] = deque()
        for number in range(1000):
            if number == 40:
                self._add(9, PROMPT, 5)
            while (step := self._scheduler.schedule()) is not None:
                self._pipe.append(step)
            if number % 50 == 0:
                check_invariants(self._scheduler)
            if not self._pipe:
                break
            self._step(self._pipe.popleft())
        assert not self._scheduler.has_unfinished

    def _add(self, req_id: int, length: int, max_tokens: int) -> None:
        params = SamplingParams(max_tokens=max_tokens)
        self._scheduler.add_request(Request(req_id, [req_id + 1] * length, params))

    def _step(self, step: SchedulerOutput) -> None:
        num_prompt = step.num_scheduled_tokens.get(9, 0)
        num_rows = step.total_num_scheduled_tokens - num_prompt
        duration_ms = BASE_MS + ROW_MS * num_rows + self._cost(num_prompt, sum(self.chunks))
        self._worker.times_ns = (int(duration_ms * 1e6), 0, 100_000)
        if num_prompt > 1 and num_rows:
            self.gaps_ms.append(duration_ms)
            self.chunks.append(num_prompt)
        self._scheduler.update_from_output(self._worker.execute(step))


@pytest.mark.parametrize("cost", [flat, rising])
def test_gaps_stay_below_the_target(cost: Callable[[int, int], float]) -> None:
    """The prompt takes hardly more steps than it must."""
    run = Run(40.0, cost)
    assert sum(run.chunks) == PROMPT
    assert max(run.gaps_ms) <= 40.0
    assert sum(run.gaps_ms[2:-1]) / len(run.gaps_ms[2:-1]) > 0.7 * 40.0


def test_without_a_target_a_prompt_takes_the_whole_step() -> None:
    run = Run(0.0)
    assert max(run.gaps_ms) > 400
    assert len(run.chunks) == 2


def test_prompts_continue_if_decoding_alone_takes_longer_than_the_target() -> None:
    run = Run(5.0)
    assert set(run.chunks[2:-1]) == {MIN_TOKENS}


def test_a_prompt_alone_is_not_cut() -> None:
    scheduler = Scheduler(SchedulerOptions(num_blocks=4096, target_itl_ms=1.0))
    scheduler.add_request(Request(0, [1] * 2000, SamplingParams(max_tokens=5)))
    step = scheduler.schedule()
    assert step is not None
    assert step.total_num_scheduled_tokens == 2000


def test_requests_for_vectors_limit_no_prompts() -> None:
    """They never decode, so every step is filled, also while one of them is in flight."""
    options = SchedulerOptions(num_blocks=4096, max_steps_in_flight=2, target_itl_ms=50)
    scheduler = Scheduler(options)
    for req_id in range(60):
        params = pooling_params(Pooling())
        scheduler.add_request(Request(req_id, [req_id + 1] * 200, params))
    steps = [scheduler.schedule(), scheduler.schedule()]
    assert all(step and step.total_num_scheduled_tokens > 1000 for step in steps)

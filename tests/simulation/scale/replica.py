"""A replica in virtual time: the real scheduler, and steps whose times are modelled.

Only the ends of requests affect other replicas. So a replica computes several steps at a time, as
late as possible: when a request may end, when it gets another one, and when its load is asked for
and may have changed. The result is the same as if each step were computed at its own time.
"""

import time
from array import array
from collections.abc import Callable
from typing import NamedTuple

from core_proc.options import SchedulerOptions
from core_proc.request import Request, RequestStatus
from core_proc.scheduler import Scheduler
from protocol.client.routing import Load
from protocol.core_worker import ModelRunnerOutput, SchedulerOutput
from protocol.sampling import SamplingParams
from tests.simulation.scale.costs import StepCosts
from tests.simulation.scale.workload import Turn

BLOCK_TOKENS = 64
_TOKEN = 7
_OPTIONS = SchedulerOptions(
    block_size=BLOCK_TOKENS,
    max_num_seqs=64,
    max_num_batched_tokens=2048,
    max_model_len=8192,
)


class Asked(NamedTuple):
    """A turn that was sent to a replica."""

    turn: Turn
    sent_at: float
    """When its client sent it first, to whichever replica."""
    num_expected: int
    """Tokens that the router expected to be cached."""


class Answered(NamedTuple):
    """What has become of a turn in a step."""

    time: float
    """The time at which the step ended."""
    asked: Asked
    request: Request
    is_first: bool
    """Whether this was its first token."""
    is_finished: bool


class SimulatedReplica:
    """One engine, and what the router's client knows of it."""

    def __init__(
        self,
        number: int,
        costs: StepCosts,
        num_blocks: int,
        now: Callable[[], float],
        on_computed: Callable[[int], None] = lambda _: None,
    ) -> None:
        """`on_computed` gets the nanoseconds that steps took to simulate while `load` was called.

        They are excluded from the router's time: an engine computes them in another process.
        """
        self.number = number
        self._on_computed = on_computed
        self._now = now
        self._costs = costs
        self._num_blocks = num_blocks
        self.serves = True
        self.incarnation = 0
        self.num_steps = 0
        self.busy_s = 0.0
        self.num_computed = 0
        """The number of tokens that were computed."""
        self.wakes_at: float | None = None
        """When the world wakes it next."""
        self._begin()

    def _begin(self) -> None:
        options = SchedulerOptions(
            **{name: getattr(_OPTIONS, name) for name in _OPTIONS.__struct_fields__}
            | {"num_blocks": self._num_blocks}
        )
        self._scheduler = Scheduler(options)
        self._asked: dict[int, Asked] = {}
        self._unstarted: dict[int, int] = {}
        """Requests without an output, and the tokens of each that are expected to be computed."""
        self._step: SchedulerOutput | None = None
        self._ends_at = 0.0
        """When the step ends."""
        self._num_context = 0
        """Computed tokens of the running requests once the step has ended."""
        self._num_left = 0
        """Steps after which a request may end, at the earliest."""
        self._answered: list[Answered] = []

    def load(self) -> Load:
        if self._unstarted:
            began = time.perf_counter_ns()
            self._advance()
            self._on_computed(time.perf_counter_ns() - began)
        return Load(len(self._asked), sum(self._unstarted.values()), 0)

    # Requests -----------------------------------------------------------------------------------

    def add(self, req_id: int, asked: Asked, outputs: "array[int]") -> None:
        """Accept a turn, which may have got some outputs elsewhere."""
        self._advance()
        params = SamplingParams(max_tokens=asked.turn.num_outputs, ignore_eos=True)
        request = Request(
            req_id,
            asked.turn.prompt.tobytes(),
            params,
            outputs=outputs,
            arrival_time=asked.sent_at,
        )
        self._scheduler.add_request(request)
        self._asked[req_id] = asked
        if not outputs:
            self._unstarted[req_id] = max(0, len(asked.turn.prompt) - asked.num_expected)
        num_left = asked.turn.num_outputs - len(outputs)
        self._num_left = min(self._num_left, num_left) if len(self._asked) > 1 else num_left
        if self._step is None:
            self._begin_step(self._now())

    @property
    def next_end(self) -> float | None:
        """A time before or at the next end of a request; None: there is none."""
        if not self._asked:
            return None
        return self._ends_at + (self._num_left - 1) * self._min_step_s()

    def _min_step_s(self) -> float:
        """Return the least time of each further step before `next_end`.

        Each running request decodes at least, unless blocks may run out: then any may be preempted.
        """
        scheduler, num_left = self._scheduler, self._num_left
        requests, running = scheduler.requests.values(), scheduler.running
        num_wanted = sum([_num_blocks(len(each.token_ids) + num_left) for each in requests])
        num_held = sum([len(each.block_tables[0]) for each in running])
        if num_wanted - num_held > scheduler.kv.num_free_blocks:
            return self._costs.seconds(1, 0, 0)
        num_context = sum([each.num_computed_tokens for each in running])
        return self._costs.seconds(len(running), 0, num_context)

    def take_answers(self) -> list[Answered]:
        """Compute until now; return what has become of the turns."""
        self._advance()
        answered, self._answered = self._answered, []
        return answered

    def _advance(self) -> None:
        """Compute the steps that have ended by now."""
        now = self._now()
        while self._step is not None and self._ends_at <= now:
            self._end_step()
            self._begin_step(self._ends_at)

    def _begin_step(self, now: float) -> None:
        """Decide a step, if there is something to compute."""
        step = self._step = self._scheduler.schedule()
        if step is None:
            return
        num_prompt = sum(step.num_scheduled_tokens.values())  # requests with one token are omitted
        num_tokens = step.total_num_scheduled_tokens
        if step.scheduled_new_reqs or step.preempted_req_ids or step.finished_req_ids:
            running = self._scheduler.running
            self._num_context = sum([request.num_computed_tokens for request in running])
        else:
            self._num_context += num_tokens
        self.num_steps += 1
        self.num_computed += num_tokens
        seconds = self._costs.seconds(num_tokens - num_prompt, num_prompt, self._num_context)
        self.busy_s += seconds
        self._ends_at = now + seconds

    def _end_step(self) -> None:
        """Take in the tokens of the step."""
        step, now = self._step, self._ends_at
        assert step is not None
        _, sampling = self._scheduler.in_flight[0]
        output = ModelRunnerOutput(step.step_id, [_TOKEN] * len(sampling))
        self._num_left -= 1
        results = self._scheduler.update_from_output(output)
        if self._num_left > 0 and not self._unstarted:
            assert len(self._scheduler.requests) == len(self._asked)
            return
        for result in results:
            request, is_finished = result.request, result.finish_reason is not None
            is_first = self._unstarted.pop(request.req_id, None) is not None
            if not (is_first or is_finished):
                continue
            asked = self._asked[request.req_id]
            if is_finished:
                del self._asked[request.req_id]
                assert now == self._now(), "a request has ended before its replica was woken"
            self._answered.append(Answered(now, asked, request, is_first, is_finished))
        if self._num_left <= 0:
            requests = self._scheduler.requests.values()
            left = (request.max_num_tokens - request.num_tokens for request in requests)
            self._num_left = min(left, default=0)

    # The end ------------------------------------------------------------------------------------

    def die(self) -> list[tuple[int, Asked, "array[int]"]]:
        """Lose everything; returns the open requests, oldest first, with their outputs."""
        assert not self._answered
        requests = self._scheduler.requests
        lost = []
        for req_id, asked in self._asked.items():
            request = requests[req_id]
            assert request.status is not RequestStatus.FINISHED_STOPPED
            lost.append((req_id, asked, request.token_ids[request.num_prompt_tokens :]))
        self.serves = False
        self.wakes_at = None
        self.incarnation += 1
        self._begin()
        return lost


def _num_blocks(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_TOKENS)

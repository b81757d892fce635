"""A replica in virtual time: the real scheduler, and steps whose times are modelled."""

from array import array
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

    asked: Asked
    request: Request
    is_first: bool
    """Whether this was its first token."""
    is_finished: bool


class SimulatedReplica:
    """One engine, and what the router's client knows of it."""

    def __init__(self, number: int, costs: StepCosts, num_blocks: int) -> None:
        self.number = number
        self._costs = costs
        self._num_blocks = num_blocks
        self.serves = True
        self.incarnation = 0
        self.num_steps = 0
        self.busy_s = 0.0
        self.num_computed = 0
        """Tokens."""
        self._begin()

    def _begin(self) -> None:
        options = SchedulerOptions(
            **{name: getattr(_OPTIONS, name) for name in _OPTIONS.__struct_fields__}
            | {"num_blocks": self._num_blocks}
        )
        self._scheduler = Scheduler(options)
        self._asked: dict[int, Asked] = {}
        self._num_unstarted = 0
        self._step: SchedulerOutput | None = None

    def load(self) -> Load:
        return Load(len(self._asked), self._num_unstarted, 0)

    # Requests -----------------------------------------------------------------------------------

    def add(self, req_id: int, asked: Asked, outputs: "array[int]") -> None:
        """Accept a turn, which may have got some outputs elsewhere."""
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
            self._num_unstarted += _num_uncached(asked)

    def begin_step(self) -> float | None:
        """Decide a step; returns its seconds, or None if there is nothing to compute."""
        if self._step is not None:
            return None
        step = self._step = self._scheduler.schedule()
        if step is None:
            return None
        num_prompt = sum(count for count in step.num_scheduled_tokens.values() if count > 1)
        num_tokens = step.total_num_scheduled_tokens
        num_context = sum(request.num_computed_tokens for request in self._scheduler.running)
        self.num_steps += 1
        self.num_computed += num_tokens
        seconds = self._costs.seconds(num_tokens - num_prompt, num_prompt, num_context)
        self.busy_s += seconds
        return seconds

    def end_step(self) -> list[Answered]:
        """Take in the tokens of the step that was begun."""
        step, self._step = self._step, None
        assert step is not None
        _, sampling = self._scheduler.in_flight[0]
        output = ModelRunnerOutput(step.step_id, [_TOKEN] * len(sampling))
        answered = []
        for result in self._scheduler.update_from_output(output):
            request, is_finished = result.request, result.finish_reason is not None
            is_first = request.num_output_tokens == 1
            if not (is_first or is_finished):
                continue
            asked = self._asked[request.req_id]
            if is_first:
                self._num_unstarted -= _num_uncached(asked)
            if is_finished:
                del self._asked[request.req_id]
            answered.append(Answered(asked, request, is_first, is_finished))
        return answered

    # The end ------------------------------------------------------------------------------------

    def die(self) -> list[tuple[int, Asked, "array[int]"]]:
        """Lose everything; returns the open requests, oldest first, with their outputs."""
        requests = self._scheduler.requests
        lost = []
        for req_id, asked in self._asked.items():
            request = requests[req_id]
            assert request.status is not RequestStatus.FINISHED_STOPPED
            lost.append((req_id, asked, request.token_ids[request.num_prompt_tokens :]))
        self.serves = False
        self.incarnation += 1
        self._begin()
        return lost


def _num_uncached(asked: Asked) -> int:
    return max(0, len(asked.turn.prompt) - asked.num_expected)

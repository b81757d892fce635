"""Gives running requests tokens and blocks in the step that is being built, or preempts them."""

from core_proc.kv.kv_cache import KVCacheManager
from core_proc.request import Request
from core_proc.scheduling.departures import Departures
from core_proc.scheduling.loads import Loads
from core_proc.scheduling.partial_prefills import PartialPrefills
from core_proc.scheduling.request_queues import RequestQueues
from core_proc.scheduling.speculation import Speculation
from core_proc.scheduling.stages import Stages
from core_proc.scheduling.step import ScheduledStep
from core_proc.scheduling.victims import VictimChoice


class Grants:
    """Decides how many tokens a running request gets; the scheduler decides which one is next."""

    def __init__(
        self,
        *,
        kv: KVCacheManager,
        queues: RequestQueues,
        loads: Loads,
        victims: VictimChoice,
        speculation: Speculation,
        stages: Stages,
        partial_prefills: PartialPrefills,
        departures: Departures,
    ) -> None:
        self._kv = kv
        self._queues = queues
        self._loads = loads
        self._victims = victims
        self._speculation = speculation
        self._stages = stages
        self._partial_prefills = partial_prefills
        self._departures = departures

    def visit(self, request: Request, step: ScheduledStep) -> None:
        """Grant a running request its next tokens, preempting others if blocks are lacking."""
        num_new = self._num_wanted(request, step)
        if num_new is None:
            self.skip(request, step)
            return
        while not self.grow(request, num_new, step):
            step.ran_out_of_blocks = True
            victim = self._victims.choose(self._queues.running)
            if victim is request and self._loads:
                # The loads of less important requests end soon, and cannot be taken back.
                self.skip(request, step)
                return
            self.preempt(victim, step)
            if victim is request:
                return
        self.grant(request, num_new, step)

    def _num_wanted(self, request: Request, step: ScheduledStep) -> int | None:
        """Return how many tokens to grant if there are blocks; None: it waits for another step."""
        num_left = request.num_tokens - request.num_computed_tokens
        if num_left <= 0 and self._speculation.must_wait(request):
            return None
        if self._stages.is_on and num_left <= 1:
            num_running = len(self._queues.running)
            if self._stages.must_wait(request, len(step.sampling), num_running):
                return None
        if request.num_computed_tokens + 1 >= request.max_num_tokens:
            return None  # its pending token is its last
        num_new = num_left
        if num_left == 1 and request.num_draft_tokens:
            room = step.budget - 1 - step.num_behind
            room = step.limit_drafts(request, room)
            num_new += self._speculation.num_drafts(request, self._kv, room)
        if num_new <= 1 and request.sampling_params.pooling is None:
            return 1
        num_new = min(step.limit(request, num_new), step.budget)
        return step.limit_prompt(num_new) if num_left > 1 else num_new

    def skip(self, request: Request, step: ScheduledStep) -> None:
        """Grant a running request nothing in this step; it is due in the next one."""
        step.granted[request.req_id] = 0
        self._queues.due_index.enter(request)

    def grow(
        self, request: Request, num_new: int, step: ScheduledStep, *, again: bool = False
    ) -> bool:
        """Allocate blocks for further tokens; return False, with no change, if they do not fit.

        `again`: the step has granted the request tokens already.
        """
        new_blocks = self._kv.grow(request, request.num_computed_tokens + num_new, again=again)
        if new_blocks:
            step.add_blocks(request, new_blocks)
        return new_blocks is not None

    def grant(self, request: Request, num_new: int, step: ScheduledStep) -> None:
        """Grant tokens that have blocks; at the end of its tokens the request samples."""
        step.grant(request, num_new)
        before = request.num_computed_tokens
        if request.num_tokens - before > 1:
            step.grant_prompt(num_new)
        computed = request.num_computed_tokens = before + num_new
        num_quiet, num_ahead = 0, computed - request.num_tokens
        if num_ahead >= 0:
            is_known = before < request.num_tokens  # else it is ahead by pending tokens
            num_drafts = num_ahead if is_known else 0
            step.add_sampling(request, num_drafts)
            if self._speculation.is_on:
                self._speculation.granted(request, num_drafts)
            if self._speculation.is_quiet(request) and not self._stages.is_on:
                num_quiet = min(self._kv.num_slots(request), request.max_num_tokens - 1) - computed
        self._queues.due_index.enter(request, num_quiet)
        if self._partial_prefills.is_counted:
            self._partial_prefills.follow(request)

    def preempt(self, victim: Request, step: ScheduledStep) -> None:
        """Preempt a running request, and withdraw what the step has granted to it."""
        withdrawn = step.withdraw(victim)
        if withdrawn:
            victim.num_drafts_in_flight = 0
            victim.num_computed_tokens -= withdrawn
            self._kv.forget_uncomputed(victim)
        self._departures.preempt(victim)

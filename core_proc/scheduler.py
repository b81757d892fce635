"""The scheduler: which requests compute how many tokens in the next step.

There is no prefill phase and no decode phase. Each request has tokens (`num_tokens`: prompt and
outputs) and has some of them computed (`num_computed_tokens`); every step hands out a budget of
tokens so that the latter number catches up with the former. Chunked prefill, prefix-cache hits,
resumption after a preemption and recovery of a lost worker are all this one case: computed tokens
that are behind. Requests that run are served first, then waiting ones are admitted.

Steps may overlap. `num_computed_tokens` moves when a step is scheduled, so the next step can be
scheduled before the first one's tokens are known: a request then computes on from tokens that are
still pending. Steps run on the worker strictly in order, which makes it safe to free blocks at
once: whoever gets them next writes after the steps in flight.
"""

import logging
import math
from bisect import bisect_right
from collections import deque
from itertools import islice
from operator import attrgetter

from core_proc.admission import Admission, Room
from core_proc.options import SchedulerOptions
from core_proc.request import Request, RequestStatus
from core_proc.results import StepResult
from core_proc.roster import Roster
from core_proc.speculation import Speculation
from core_proc.step import ScheduledStep
from protocol.api_core import PauseMode
from protocol.core_worker import ModelRunnerOutput, SchedulerOutput

log = logging.getLogger("troika.core")


class Scheduler(Roster):
    """Decides every step from integers alone: no sockets, no threads, no clock."""

    def __init__(self, options: SchedulerOptions) -> None:
        """Begin with an empty cache; errors as `Roster`."""
        super().__init__(options)
        self.options = options
        self.pause_mode = PauseMode.RUNNING
        self.next_step_id = 0
        self.is_preparing = False
        """The last `schedule` has left work on a long prompt to the next one."""
        self.in_flight: deque[tuple[int, list[Request]]] = deque()
        """Step id and who samples, for every step whose output is due, oldest first."""
        self.speculation = Speculation(options)
        self._admission = Admission(options, self.kv, self.partial_prefills)

    # A step -------------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput | None:
        """Put the next step together.

        Returns:
            The message for the worker, which must be sent; it has no tokens if only notices are
            due. None if there is nothing to send, or `max_steps_in_flight` steps are out.
        """
        options, mode = self.options, self.pause_mode
        self.is_preparing = False
        if len(self.in_flight) >= options.max_steps_in_flight:
            return None
        budget = 0 if mode is PauseMode.PAUSED_ALL else options.token_budget
        step = ScheduledStep(budget, self._threshold())
        self._schedule_running(step)
        if mode is not PauseMode.PAUSED_ALL and not step.ran_out_of_blocks:
            self._schedule_waiting(step)
        if options.elastic_token_budget and mode is not PauseMode.PAUSED_ALL:
            self._stretch(step)
        return self._send(step)

    def _threshold(self) -> int:
        threshold = self.options.long_prefill_token_threshold
        if self.options.long_prefill_token_threshold_adaptive and self.requests:
            share = self.options.max_num_batched_tokens // len(self.requests)
            return max(threshold, share)
        return threshold

    def _schedule_running(self, step: ScheduledStep) -> None:
        """Serve whoever runs, in order of admission.

        The clock counts one more token for all of them. Whoever is not due gets just that, in
        stretches between those who are; what is different is corrected.
        """
        if not self.running:
            self.calendar.clear()
        if not self.running or step.budget == 0:
            step.granted.update((request.req_id, 0) for request in self.running)
            return
        running, first = self.running, 0
        for request in self.calendar.tick():
            if request.status is not RequestStatus.RUNNING:
                continue  # preempted for somebody before it
            position = running.index(request, first)
            first += step.grant_one_each(running[first:position])
            if step.budget == 0:
                break
            step.reached, step.num_behind = request.admission_index, len(running) - position - 1
            request.num_computed_tokens -= 1
            try:
                self._continue(request, step)
            except Exception as error:
                self._fail(request, step, error)
            first = position + 1
            if running is not self.running:  # somebody has left
                running = self.running
                first = bisect_right(running, step.reached, key=attrgetter("admission_index"))
        first += step.grant_one_each(running[first:])
        for request in running[first:]:  # nothing of the step is left for them
            request.num_computed_tokens -= 1
            step.granted[request.req_id] = 0
            self.calendar.postpone(request)
        step.reached = math.inf

    def _continue(self, request: Request, step: ScheduledStep) -> None:
        """Grant a running request its next tokens, taking blocks from others if it must."""
        computed = request.num_computed_tokens
        num_new = request.num_tokens - computed
        if self.speculation.is_on and num_new == 1:
            room = step.budget - 1 - step.num_behind
            num_new += self.speculation.num_drafts(request, self.kv, room)
        must_wait = self.speculation.is_on and num_new <= 0
        if must_wait or computed + 1 >= request.max_num_tokens:  # the pending token is its last
            step.granted[request.req_id] = 0
            self.calendar.enter(request, 0)
            return
        num_new = 1 if num_new <= 1 else min(step.limit(request, num_new), step.budget)
        while not self._grow(request, num_new, step):
            step.ran_out_of_blocks = True
            victim = self.victims.choose(self.running)
            self._preempt(victim, step)
            if victim is request:
                return
        self._grant(request, num_new, step)

    def _grow(
        self, request: Request, num_new: int, step: ScheduledStep, *, again: bool = False
    ) -> bool:
        """Get the slots for more tokens of a running request, if there are any."""
        new_blocks = self.kv.grow(request, request.num_computed_tokens + num_new, again=again)
        if new_blocks:
            step.add_blocks(request, new_blocks)
        return new_blocks is not None

    def _grant(self, request: Request, num_new: int, step: ScheduledStep) -> None:
        """Move the computed tokens ahead; at the end of its tokens the request samples."""
        step.grant(request, num_new)
        computed = request.num_computed_tokens = request.num_computed_tokens + num_new
        num_quiet, num_ahead = 0, computed - request.num_tokens
        if num_ahead >= 0:
            step.sampling.append(request)
            if self.speculation.is_on:
                self.speculation.granted(request, num_ahead)
            else:
                num_quiet = min(self.kv.num_slots(request), request.max_num_tokens - 1) - computed
        self.calendar.enter(request, num_quiet)
        if self.partial_prefills.is_limited:
            self.partial_prefills.follow(request)

    def _preempt(self, victim: Request, step: ScheduledStep) -> None:
        """Take the blocks of a running request, and what this step had granted to it."""
        if victim.admission_index > step.reached:
            victim.num_computed_tokens -= 1
        withdrawn = step.withdraw(victim)
        if withdrawn:
            victim.num_drafts_in_flight = 0
            victim.num_computed_tokens -= withdrawn
            self.kv.forget_uncomputed(victim)
        self.preempt(victim)

    def _schedule_waiting(self, step: ScheduledStep) -> None:
        """Admit from the front of the queue until something is used up."""
        if self.waiting and self.options.enable_prefix_caching:
            for due in self.calendar.due_next():
                try:
                    self.kv.remember_full_blocks(due, due.num_computed_tokens)
                except Exception as error:
                    self._fail(due, step, error)
        while (request := self._front()) is not None:
            try:
                if not self.kv.prepare(request):
                    self.is_preparing = True
                    return
                has_slot = step.budget > 0 and len(self.running) < self.options.max_num_running
                is_admitted = has_slot and self._admit(request, step)
                if not is_admitted and not self._make_room(request, step):
                    return
            except Exception as error:
                self._fail(request, step, error)

    def _front(self) -> Request | None:
        """Return who would be admitted next.

        While it is owed late tokens, a preempted request does not know where it continues, and
        all others wait for it. While new ones are kept out, those that have run before are not.
        """
        with_long = self.partial_prefills.has_room_for_long
        if self.pause_mode is PauseMode.PAUSED_NEW:
            request = self.waiting.front_of(Request.has_begun, with_long=with_long)
        else:
            request = self.waiting.front(with_long=with_long)
        return None if request is None or request.num_late_tokens else request

    def _admit(self, request: Request, step: ScheduledStep) -> bool:
        """Let a waiting request run, if tokens and blocks suffice."""
        if self._admission.still_refuses(request):
            return False
        candidate = self._admission.candidate(request)
        num_new = self._admission.first_chunk(candidate, step, step.budget)
        if num_new == 0 or not self._admission.take_blocks(candidate, num_new, len(self.running)):
            return False
        request.num_computed_tokens = candidate.start
        if request.swapped_out is not None:
            self.swapper.bring_in(request, len(candidate.hits[0]))
        # Whatever could fail for this request alone has been done by the time that it runs.
        self.policy.admitted(request)
        step.introduce(request, candidate.start, candidate.num_cached)
        self.start(request, candidate.start)
        self._grant(request, num_new, step)
        return True

    def _make_room(self, request: Request, step: ScheduledStep) -> bool:
        """Preempt less important requests for the one that waits in front, if that lets it in.

        Whoever was admitted in this step counts on blocks that others fill in it, so nobody is
        preempted any more after an admission.

        Returns:
            Whether anybody was preempted.
        """
        if not self.options.preempt_for_priority or step.new_reqs:
            return False
        rank = self.policy.rank(request)
        lesser = [other for other in self.running if self.policy.rank(other) > rank]
        if not lesser:
            return False
        candidate = self._admission.candidate(request)
        without_them = Room(
            step.budget + step.num_granted_to(lesser),
            len(self.running) - len(lesser),
            self.kv.num_blocks_gained(lesser, candidate.hits),
        )
        if not self._admission.fits(candidate, step, without_them):
            return False
        before = self.num_preemptions
        while lesser:
            room = Room(step.budget, len(self.running))
            if self._admission.fits(candidate, step, room):
                break
            victim = self.victims.choose(lesser)
            lesser.remove(victim)
            self._preempt(victim, step)
        return self.num_preemptions > before

    def _stretch(self, step: ScheduledStep) -> None:
        """While nobody waits, give what the step has left to prompts that it has cut."""
        if self.waiting.front() is not None or step.ran_out_of_blocks:
            return
        step.extend(max(0, self.options.max_num_batched_tokens - self.options.token_budget))
        cut = [r for r in self.running if r.num_tokens > r.num_computed_tokens]
        for request in cut:
            if step.budget == 0:
                break
            num_left = request.num_tokens - request.num_computed_tokens
            num_new = min(step.limit(request, num_left), step.budget)
            had = step.granted.get(request.req_id, 0)
            try:
                if self._grow(request, num_new, step, again=had > 0):
                    self._grant(request, num_new, step)
            except Exception as error:
                self._fail(request, step, error)
        if cut:
            step.sampling.sort(key=lambda request: request.admission_index)

    def _fail(self, request: Request, step: ScheduledStep, error: Exception) -> None:
        """End a request that cannot be scheduled, and nothing else.

        Not so where an assertion failed: then the books are wrong, and only a core that starts anew
        has right ones.
        """
        if isinstance(error, AssertionError):
            raise error
        log.error("request %d cannot be scheduled", request.req_id, exc_info=error)
        request.num_computed_tokens -= step.withdraw(request)
        was_introduced = step.forget_newcomer(request)
        self.swapper.cancel(request)
        self.fail_request(request.req_id, f"{type(error).__name__}: {error}")
        if was_introduced:  # the worker never hears of it
            self._finished_req_ids.remove(request.req_id)

    def _send(self, step: ScheduledStep) -> SchedulerOutput | None:
        """Turn the grants into the message and remember who will sample."""
        if not (step.num_tokens or self.has_notices):
            return None
        preempted, finished = self.take_notices()
        copies = self.swapper.take_copies()
        message = step.message(self.next_step_id, preempted, finished, copies)
        self.in_flight.append((self.next_step_id, step.sampling))
        self.next_step_id += 1
        self.num_scheduled_tokens += step.num_tokens
        self.largest_step = max(self.largest_step, step.num_tokens)
        return message

    def update_from_output(self, output: ModelRunnerOutput) -> list[StepResult]:
        """Take in the oldest step's tokens; whoever they finish is gone from here on.

        Returns:
            One result for each request that got a token, in mirror order. Tokens for requests that
            have finished in the meantime are ignored.
        """
        assert self.in_flight, f"output of step {output.step_id}, none is due"
        step_id, sampling = self.in_flight[0]
        assert output.step_id == step_id, f"output of step {output.step_id}, due is {step_id}"
        num_tokens = len(output.sampled_token_ids)
        if self.speculation.is_on:
            return self._update_speculated(output)
        assert num_tokens == len(sampling), f"{num_tokens} tokens, {len(sampling)} requests sampled"
        self.in_flight.popleft()
        results: list[StepResult] = []
        any_finished = False
        running = RequestStatus.RUNNING
        for request, token_id in zip(sampling, output.sampled_token_ids, strict=True):
            if request.status is not running:
                if request.is_finished:
                    continue
                request.num_late_tokens -= 1
            token_ids = request.token_ids
            token_ids.append(token_id)
            result = StepResult(request, [token_id])
            results.append(result)
            if len(token_ids) >= request.max_num_tokens or token_id in request.stop_token_ids:
                any_finished |= self._check_stop(result, token_id)
        if any_finished:
            self.running = [r for r in self.running if r.status is running]
        self.num_generation_tokens += len(results)
        return results

    def _update_speculated(self, output: ModelRunnerOutput) -> list[StepResult]:
        """Do the same where a request may get several tokens; those after its end are cut."""
        _, sampling = self.in_flight.popleft()
        counts = output.num_sampled_tokens or [1] * len(sampling)
        drafts = output.num_draft_tokens or [0] * len(sampling)
        tokens = iter(output.sampled_token_ids)
        results = []
        for request, num_sampled, num_drafts in zip(sampling, counts, drafts, strict=True):
            token_ids = list(islice(tokens, num_sampled))
            if request.is_finished:
                continue
            if request.status is RequestStatus.RUNNING:
                self.speculation.verified(request, num_sampled, num_drafts)
            else:
                request.num_late_tokens -= 1
            result = StepResult(request, [])
            for token_id in token_ids:
                request.token_ids.append(token_id)
                result.new_token_ids.append(token_id)
                if self._check_stop(result, token_id):
                    break
            results.append(result)
            self.num_generation_tokens += len(result.new_token_ids)
        self.running = [r for r in self.running if r.status is RequestStatus.RUNNING]
        return results

    def _check_stop(self, result: StepResult, token_id: int) -> bool:
        """Finish the request if this token ends it."""
        reason = result.check_stop(token_id, self._eos_token_ids)
        if reason is None:
            return False
        self.finish(result.request, reason, result.stop_token_id)
        return True

    # All requests -------------------------------------------------------------------------------

    def pause(self, mode: PauseMode) -> None:
        """Stop admitting, or stop computing; steps in flight still bring their tokens."""
        self.pause_mode = mode

    def resume(self) -> None:
        """Go on after a pause or a sleep."""
        self.pause_mode = PauseMode.RUNNING

    def sleep(self) -> bool:
        """Give up all KV, so that its memory can be used otherwise, and pause until `resume`.

        Returns:
            Whether it was done: not while somebody else loads KV into the pool.
        """
        if not self.reset_prefix_cache(reset_running_requests=True):
            return False
        self.pause(PauseMode.PAUSED_ALL)
        return True

    def recompute_all(self) -> None:
        """Start from nothing on a new worker: the old one and all its KV are lost.

        Running requests wait again, at their places in the order and with their outputs; the steps
        in flight will never be answered, so their tokens are sampled again.
        """
        self.in_flight.clear()
        self.forget_worker()

    @property
    def has_requests(self) -> bool:
        """Whether there is anything to compute: not where all of it is paused."""
        return self.has_unfinished and self.pause_mode is not PauseMode.PAUSED_ALL

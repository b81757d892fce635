"""The scheduler decides how many tokens of which requests the next step computes.

A request has tokens (`num_tokens`: prompt and outputs); `num_computed_tokens` of them are computed.
Each step hands out a budget of tokens so that the second number catches up with the first. There
is no prefill phase and no decode phase: chunked prefill, prefix-cache hits, resumption after a
preemption and recovery of a lost worker are all the same case, computed tokens that are behind.

Theory of operation:

* States. A request waits (WAITING, PREEMPTED or blocked), runs, or has finished;
  `request.TRANSITIONS` lists the moves. Running requests hold a slot and KV blocks. A waiting
  request holds no blocks, unless another process loads KV for it.
* A step. `schedule` serves the running requests in order of admission, then admits from the front
  of the waiting queue. Every message that it returns must be sent, in order.
  `update_from_output` must be called once for each message, in the same order. Up to
  `max_steps_in_flight` calls of `schedule` may precede it. All other methods may be called
  between any two of these calls.
* `num_computed_tokens` moves when a step is scheduled, not when its output arrives. So a request
  may continue from sampled tokens that are still pending; it has `num_pending_tokens` of them.
* The worker runs steps strictly in order. So blocks can be freed at once, although a step in flight
  may still use them: the next holder of a block writes to it in a later step.
* A request that is preempted with steps in flight is owed late tokens. It is not admitted again
  before they have arrived, because they decide where it continues.
* Blocks enter the prefix cache when the step that fills them is scheduled: in a step, the worker
  writes all KV before it reads any. So no request is preempted after the first admission of a
  step: the admitted request may rely on blocks that the victim was about to fill.
* A running request that is not due decodes into a block that it holds. `DueIndex` returns the due
  requests, which are visited; `step.advance` grants one token to each request between two of them.
"""

import logging
from bisect import bisect_right
from collections import deque
from operator import attrgetter

from core_proc.kv.kv_cache import KVCacheManager
from core_proc.kv.offload import Offload
from core_proc.kv.swap import Swapper
from core_proc.options import SchedulerOptions
from core_proc.policy import make_policy
from core_proc.request import BLOCKED, FOR_WORKER, Request, RequestStatus
from core_proc.scheduling.admission import Admission
from core_proc.scheduling.departures import Departures
from core_proc.scheduling.grants import Grants
from core_proc.scheduling.loads import Loads, Outcome
from core_proc.scheduling.outputs import OutputUpdate
from core_proc.scheduling.partial_prefills import PartialPrefills
from core_proc.scheduling.priority_preemption import PriorityPreemption
from core_proc.scheduling.prompt_budget import PromptBudget
from core_proc.scheduling.request_queues import RequestQueues
from core_proc.scheduling.results import Failure, StepResult
from core_proc.scheduling.speculation import Speculation
from core_proc.scheduling.stages import Stages
from core_proc.scheduling.step import ScheduledStep, longest_sequence
from core_proc.scheduling.victims import VictimChoice
from core_proc.scheduling.waiting import WaitingQueue
from protocol.api_core import ErrorCode, PauseMode
from protocol.core_worker import (
    BlocksFound,
    BlocksLoaded,
    FindBlocks,
    LoadBlocks,
    ModelRunnerOutput,
    SchedulerOutput,
    StoreBlocks,
)
from protocol.sampling import FinishReason

log = logging.getLogger("troika.core")

_admission_index = attrgetter("admission_index")


class Scheduler:
    """Decides every step from integers alone: no sockets, no threads, no clock."""

    def __init__(self, options: SchedulerOptions, offload: Offload | None = None) -> None:
        """`offload` manages the blocks that are stored outside the workers, if any are."""
        self.options = options
        # No request may outgrow what one step can introduce to the worker.
        longest = longest_sequence(options.block_size, len(options.kv_groups))
        self._max_model_len = min(options.max_model_len, longest)
        self._eos_token_ids = frozenset(options.eos_token_ids)
        self._token_budget = options.token_budget

        self.policy = make_policy(options)
        self.offload = offload
        self.kv = KVCacheManager(options, offload)
        self.swapper = Swapper(options)
        self.victims = VictimChoice(options, self.policy, self.kv, self.swapper)
        self.partial_prefills = PartialPrefills(options)
        self.speculation = Speculation(options)
        self.stages = Stages(options)
        self.prompt_budget = PromptBudget(options)
        self._admission = Admission(options, self.kv, self.partial_prefills)

        self.queues = RequestQueues(WaitingQueue(self.policy, self.partial_prefills.is_long))
        self.requests = self.queues.requests
        self.waiting = self.queues.waiting
        self.loads = Loads(self.kv, self.queues, self._admission, self.policy, offload)
        self._preemption = PriorityPreemption(
            self.kv, self.queues, self.loads, self._admission, self.victims
        )
        self._departures = Departures(
            kv=self.kv,
            queues=self.queues,
            loads=self.loads,
            swapper=self.swapper,
            victims=self.victims,
            speculation=self.speculation,
            partial_prefills=self.partial_prefills,
            policy=self.policy,
        )
        self._grants = Grants(
            kv=self.kv,
            queues=self.queues,
            loads=self.loads,
            victims=self.victims,
            speculation=self.speculation,
            stages=self.stages,
            partial_prefills=self.partial_prefills,
            departures=self._departures,
        )
        self._outputs = OutputUpdate(options, self.queues, self.speculation, self._departures)
        self.pause_mode = PauseMode.RUNNING
        self.next_step_id = 0
        self.is_preparing = False
        """True if the last `schedule` left part of a long prompt for the next step."""
        self.in_flight: deque[tuple[int, list[Request]]] = deque()
        """Id and sampling requests of every step that awaits its output, oldest first."""

        self.num_accepted = 0
        self.num_scheduled_tokens = 0
        """This number is also the clock by which waiting requests age."""
        self.largest_step = 0
        self.num_prompt_tokens = 0
        self.num_prefix_queries = 0
        """Tokens looked up in the prefix cache by requests when they were first admitted."""
        self.num_prefix_hits = 0

    @property
    def running(self) -> list[Request]:
        return self.queues.running

    # A step -------------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput | None:
        """Decide the next step; None if nothing is to be sent, or enough steps are in flight."""
        self.is_preparing = False
        if len(self.in_flight) >= self.options.max_steps_in_flight:
            return None
        self.kv.begin_step()
        if self.pause_mode is PauseMode.PAUSED_ALL:
            step = ScheduledStep(0, 0)
            step.granted.update((request.req_id, 0) for request in self.running)
            return self._send(step)
        if self.speculation.is_on:
            may_hold_back = self.in_flight and not self.stages.is_on
            if may_hold_back and self.speculation.holds_back(len(self.running)):
                return None
            self.speculation.limits.review(self.running)
        num_row_bytes = self.queues.num_row_bytes
        step = ScheduledStep(self._token_budget, self._threshold(), num_row_bytes)
        if self.prompt_budget.is_on:
            num_decoding = sum(map(self._decodes, self.running))
            step.prompt_left = self.prompt_budget.num_tokens(num_decoding)
        self._schedule_running(step)
        if not step.ran_out_of_blocks:
            self._schedule_waiting(step)
        if self.options.elastic_token_budget:
            self._stretch(step)
        if self.kv.states is not None:
            step.put_states(self.kv.states.keep_snapshots())
        return self._send(step)

    def _decodes(self, request: Request) -> bool:
        is_pooled = request.sampling_params.pooling is not None
        return not is_pooled and request not in self.partial_prefills

    def _threshold(self) -> int:
        """Return the maximum number of tokens that the step grants to one request; 0: no limit.

        An adaptive limit is at least an equal share of the budget that decoding requests leave. The
        share is computed over prompts that are partially computed and waiting requests that may be
        admitted in this step; all other waiting requests get nothing.
        """
        options = self.options
        threshold = options.long_prefill_token_threshold
        if not options.long_prefill_token_threshold_adaptive:
            return threshold
        num_running, num_partial = len(self.running), len(self.partial_prefills)
        num_sharing = num_partial
        front = self._front()
        if front is not None and not self._admission.still_refuses(front):
            num_free_slots = max(0, self._admission.num_slots - self.loads.num_in_slots)
            num_sharing += min(num_free_slots, self.waiting.num_admissible)
        num_left = options.token_budget - (num_running - num_partial)
        return max(threshold, num_left // max(num_sharing, 1), 1)

    def _schedule_running(self, step: ScheduledStep) -> None:
        """Serve the running requests in order of admission: visit due ones, advance others."""
        queues = self.queues
        running, due_index, first = queues.running, queues.due_index, 0
        if not running:
            due_index.clear()
        for request in due_index.begin_step():
            if request.status is not RequestStatus.RUNNING:
                continue  # preempted for one before it, or gone since it was entered
            # Exact while no request between them has left; otherwise an upper bound.
            position = first + request.admission_index - running[first].admission_index
            if position >= len(running) or running[position] is not request:
                position = running.index(request, first, position)
            first += step.advance(running[first:position])
            if step.budget == 0:
                break
            step.num_behind = len(running) - position - 1
            try:
                self._grants.visit(request, step)
            except Exception as error:
                self._fail(request, step, error)
            first = position + 1
            if running is not queues.running:  # requests have left it
                running = queues.running
                first = bisect_right(running, request.admission_index, key=_admission_index)
        first += step.advance(running[first:] if first else running)
        for request in running[first:]:  # the budget has ended before them
            self._grants.skip(request, step)

    def _schedule_waiting(self, step: ScheduledStep) -> None:
        """Admit from the front of the queue until a request does not fit."""
        if not self.waiting:
            return
        if self.options.enable_prefix_caching:
            # The blocks that this step fills without a visit: new requests may hit them.
            for due in self.queues.due_index.due_next():
                try:
                    self.kv.remember_full_blocks(due, due.num_computed_tokens)
                except Exception as error:
                    self._fail(due, step, error)
        self.loads.begin_step()
        while (request := self._front()) is not None:
            try:
                if not self.kv.prepare(request):
                    self.is_preparing = True
                    return
                outcome = self.loads.begin(request)
                if outcome is Outcome.WAIT:
                    continue
                if outcome is Outcome.LATER:
                    self.is_preparing = True
                    return
                has_slot = step.budget > 0 and self._admission.has_slot(self.loads.num_in_slots)
                is_admitted = has_slot and self._admit(request, step)
                if not is_admitted and not self._make_room(request, step):
                    return
            except Exception as error:
                self._fail(request, step, error)

    def _front(self) -> Request | None:
        """Return the request that would be admitted next, if one may be admitted.

        If the request in front was preempted and is owed late tokens, all others wait for it.
        During a pause of new requests, requests that have run before may still be admitted.
        """
        request = self.waiting.front(
            with_long=self.partial_prefills.has_room_for_long,
            with_new=self.pause_mode is not PauseMode.PAUSED_NEW,
        )
        return None if request is None or request.num_late_tokens else request

    def _admit(self, request: Request, step: ScheduledStep) -> bool:
        """Start a waiting request, if tokens and blocks suffice; returns whether it was started."""
        if self._admission.still_refuses(request):
            return False
        candidate = self._admission.candidate(request)
        num_new = self._admission.first_chunk(candidate, step, step.budget)
        if num_new == 0 or not self._admission.take_blocks(candidate, num_new, len(self.running)):
            self._admission.refuse(candidate)
            return False
        request.num_computed_tokens = candidate.start
        # All that could fail for this request alone comes before it runs.
        step.introduce(request, candidate.start, candidate.num_cached)
        if request.swapped_out is not None:
            self.swapper.bring_in(request, len(candidate.hits[0]))
        self.policy.admitted(request)
        self.queues.start(request)
        if self.speculation.is_on:
            self.speculation.limits.admitted(request, len(self.running))
        if request.num_cached_tokens is None:
            self._count_prompt(request)
        self._grants.grant(request, num_new, step)
        return True

    def _count_prompt(self, request: Request) -> None:
        num_computed = request.num_computed_tokens
        request.num_cached_tokens = min(num_computed, request.num_prompt_tokens)
        self.num_prompt_tokens += request.num_prompt_tokens
        if self.kv.may_read_cache(request):
            self.num_prefix_queries += request.num_tokens
            self.num_prefix_hits += num_computed

    def _make_room(self, request: Request, step: ScheduledStep) -> bool:
        """Preempt less important requests if that lets the front in; returns whether any was."""
        if not self.options.preempt_for_priority:
            return False
        before = self._departures.num_preemptions
        for victim in self._preemption.choose_victims(request, step):
            self._grants.preempt(victim, step)
        return self._departures.num_preemptions > before

    def _stretch(self, step: ScheduledStep) -> None:
        """While no request waits, grant the rest of the budget to prompts that the step has cut."""
        if self.waiting.front() is not None or step.ran_out_of_blocks:
            return
        step.extend(max(0, self.options.max_num_batched_tokens - self.options.token_budget))
        max_left = 1 if self.stages.is_on else 0  # one with a token left waits for another step
        cut = [r for r in self.running if r.num_tokens - r.num_computed_tokens > max_left]
        for request in cut:
            if step.budget == 0:
                break
            num_left = request.num_tokens - request.num_computed_tokens
            num_new = min(step.limit(request, num_left), step.budget)
            had = step.granted.get(request.req_id, 0)
            try:
                if self._grants.grow(request, num_new, step, again=had > 0):
                    self._grants.grant(request, num_new, step)
            except Exception as error:
                self._fail(request, step, error)
        if cut:
            step.sampling.sort(key=_admission_index)

    def _fail(self, request: Request, step: ScheduledStep, error: Exception) -> None:
        """End a request that cannot be scheduled; a failed assertion ends the core instead."""
        if isinstance(error, AssertionError):
            raise error
        log.error("request %d cannot be scheduled", request.req_id, exc_info=error)
        request.num_computed_tokens -= step.withdraw(request)
        was_running = request.status is RequestStatus.RUNNING
        was_introduced = step.undo_introduce(request)
        self.swapper.cancel(request)
        self.fail_request(request.req_id, f"{type(error).__name__}: {error}")
        if was_running and was_introduced:  # the worker does not know it
            self._departures.finished_req_ids.remove(request.req_id)

    def _send(self, step: ScheduledStep) -> SchedulerOutput | None:
        left, num_tokens = self._departures, step.num_tokens
        if not (num_tokens or left.preempted_req_ids or left.finished_req_ids):
            return None
        message = step.message(
            self.next_step_id,
            left.preempted_req_ids,
            left.finished_req_ids,
            self.swapper.take_copies(),
            self.speculation.sent(num_tokens, step.sampling),
        )
        left.forget_named()
        self.in_flight.append((self.next_step_id, step.sampling))
        self.prompt_budget.sent(num_tokens, step.num_prompt_tokens)
        if self.offload is not None:
            self.offload.costs.sent(num_tokens, step.num_prompt_tokens)
        self.next_step_id += 1
        self.num_scheduled_tokens += num_tokens
        self.largest_step = max(self.largest_step, num_tokens)
        return message

    def update_from_output(self, output: ModelRunnerOutput) -> list[StepResult]:
        """Append the tokens of the oldest step in flight, and end the requests that they finish.

        The results are in mirror order. Tokens of requests that have ended meanwhile are dropped.
        """
        assert self.in_flight, f"output of step {output.step_id}, but none is in flight"
        step_id, sampling = self.in_flight[0]
        assert output.step_id == step_id, f"output of step {output.step_id}, not of {step_id}"
        self.prompt_budget.step_ended(output)
        if self.offload is not None:
            self.offload.costs.step_ended(output)
        if self.speculation.is_on:
            results = self._outputs.append_verified(sampling, output)
            self.speculation.step_ended(output)
        else:
            results = self._outputs.append(sampling, output)
        self.in_flight.popleft()
        return results

    # Requests -----------------------------------------------------------------------------------

    def add_request(self, request: Request, blocked: RequestStatus | None = None) -> None:
        """Queue a request; if it has outputs, it continues after them.

        `blocked`: WAITING_FOR_GRAMMAR keeps it from being admitted until `unblock`.
        A ValueError begins with the name of the field: the request could never be scheduled, or
        its id is taken.
        """
        if request.req_id in self.requests:
            raise ValueError(f"req_id {request.req_id} is in use")
        request.set_limits(self._max_model_len, self._eos_token_ids)
        # The last token is delivered and never computed, so it needs no slot.
        if not self.kv.can_ever_fit(request.max_num_tokens - 1):
            raise ValueError(f"max_tokens lets request {request.req_id} outgrow the whole KV cache")
        if blocked is not None:
            assert blocked is RequestStatus.WAITING_FOR_GRAMMAR
            request.status = blocked
        request.arrival_clock = self.num_scheduled_tokens
        self.policy.arrived(request)
        self.queues.add(request)
        self.num_accepted += 1

    def hold(
        self, request: Request, blocked: RequestStatus = RequestStatus.WAITING_FOR_TRIAL
    ) -> bool:
        """Keep a waiting request from being admitted until `unblock`; False if it does not wait.

        A request that waits for its trial may wait for a new worker's grammar or adapter instead.
        """
        if request.status is RequestStatus.WAITING_FOR_TRIAL:
            if blocked not in FOR_WORKER:
                return False
        elif request.status not in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
            return False
        self.queues.change_waiting(request, blocked)
        return True

    def unblock(self, req_id: int, blocked: RequestStatus | None = None) -> None:
        """Return a blocked request to its old place in the queue; ignore all other ids.

        With `blocked`, requests that wait for something else are ignored, too.
        """
        request = self.requests.get(req_id)
        if request is not None and request.status in ({blocked} if blocked else BLOCKED):
            self.queues.unblock(request)

    def preempt(self, victim: Request) -> None:
        """Preempt a running request: its blocks are freed, and it waits again with its outputs."""
        self._departures.preempt(victim)

    def abort_request(self, req_id: int) -> Request | None:
        """End a request in any state; its blocks are free at once, late tokens are dropped."""
        request = self.requests.get(req_id)
        if request is not None:
            self._departures.finish(request, FinishReason.ABORT)
        return request

    def fail_request(
        self,
        req_id: int,
        error: str,
        code: ErrorCode = ErrorCode.INTERNAL,
        param: str | None = None,
    ) -> None:
        """End a request because of a failure that concerns only this request."""
        request = self.requests.get(req_id)
        if request is not None:
            self._departures.fail(Failure(request, error, code, param))

    def take_failures(self) -> list[Failure]:
        return self._departures.take_failures()

    def blocks_loaded(self, answer: BlocksLoaded) -> None:
        """Process the end of a load from the stores; ignore it if the load was forgotten."""
        self.loads.answered(answer)

    def blocks_found(self, answer: BlocksFound) -> None:
        """Process another machine's answer about blocks; ignore it if the request has ended."""
        self.loads.found(answer)

    def take_transfers(self) -> list[StoreBlocks | LoadBlocks | FindBlocks]:
        """Return the messages to send to the workers after the steps that were decided so far."""
        if self.offload is None:
            return []
        states = self.kv.states
        if states is None:
            return self.offload.take_messages(self.kv.pool)
        self.kv.cache_states()  # now: the next step may write to their blocks
        return self.offload.take_messages(self.kv.pool, states.pool)

    # All requests -------------------------------------------------------------------------------

    def pause(self, mode: PauseMode) -> None:
        """Stop admitting, or stop computing; steps in flight still bring their tokens."""
        self.pause_mode = mode

    def resume(self) -> None:
        self.pause_mode = PauseMode.RUNNING

    def sleep(self) -> bool:
        """Release all KV, and pause until `resume`; False while a remote load is under way."""
        if not self.reset_prefix_cache(reset_running_requests=True):
            return False
        self.pause(PauseMode.PAUSED_ALL)
        return True

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all cached contents; refused (False) while blocks are held or loaded."""
        if self.loads:
            return False
        if reset_running_requests:
            for victim in self.running:
                self._departures.preempt(victim, may_swap=False)
        if self.running:
            return False
        self._lose_kv()
        return True

    def recompute_all(self) -> None:
        """Start from nothing on a new worker: the old one and all its KV are lost.

        Running requests wait again, at their places in the order and with their outputs. The steps
        in flight will never be answered, so their tokens are sampled again.
        """
        self.in_flight.clear()
        self.speculation.workers_lost()
        self.prompt_budget.workers_lost()
        for request in self.running:
            self._departures.lose(request)
        for request in self.requests.values():
            request.num_late_tokens = 0
        self.loads.workers_lost()
        self._departures.forget_named()
        self._lose_kv()

    def _lose_kv(self) -> None:
        self.swapper.forget()
        for request in self.requests.values():
            request.swapped_out = None
        emptied = self.kv.reset_prefix_cache()
        assert emptied, "no request runs, yet blocks are held"

    # Reports ------------------------------------------------------------------------------------

    @property
    def has_unfinished(self) -> bool:
        return bool(self.requests)

    @property
    def num_ended(self) -> int:
        """Number of requests that have ended, for any reason."""
        return self._departures.num_ended

    @property
    def num_preemptions(self) -> int:
        return self._departures.num_preemptions

    @property
    def num_generation_tokens(self) -> int:
        """Number of tokens that were sampled for clients."""
        return self._outputs.num_generation_tokens

    @property
    def num_waiting(self) -> int:
        """Number of waiting requests, including blocked and preempted ones."""
        return len(self.waiting)

    def holders(self) -> list[Request]:
        return [*self.running, *self.loads.requests]

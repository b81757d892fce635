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

from collections import deque
from collections.abc import Sequence
from itertools import count

import msgspec

from core_proc.kv_cache import KVCacheManager
from core_proc.policy import POLICIES, WaitingQueue
from core_proc.request import Request, RequestStatus
from core_proc.step import ScheduledStep, longest_sequence
from protocol.core_worker import ModelRunnerOutput, SchedulerOutput
from protocol.sampling import FinishReason


class StepResult(msgspec.Struct, gc=False):
    """What one step brought to one request."""

    request: Request
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The request's own stop token that ended it; None for EOS and all other reasons."""


class Scheduler:
    """Decides every step from integers alone: no sockets, no threads, no clock."""

    def __init__(
        self,
        *,
        max_num_seqs: int = 16,
        max_num_batched_tokens: int = 2048,
        num_blocks: int = 1024,
        block_size: int = 16,
        max_model_len: int = 4096,
        policy: str = "fcfs",
        enable_prefix_caching: bool = True,
        long_prefill_token_threshold: int = 0,
        long_prefill_token_threshold_adaptive: bool = False,
        watermark: float = 0.0,
        scheduler_reserve_full_isl: bool = True,
        enable_chunked_prefill: bool = True,
        max_num_scheduled_tokens: int | None = None,
        max_num_active_seqs: int | None = None,
        eos_token_ids: Sequence[int] = (),
        max_steps_in_flight: int = 1,
    ) -> None:
        """Settings have the names that they have in `protocol.config`, facts those of `ModelFacts`.

        `num_blocks` counts the null block. `max_num_active_seqs` replaces `max_num_seqs`, and an
        adaptive threshold is at least a fair share of the step's tokens. Whatever
        `max_model_len` says, no request outgrows what one step can introduce.

        Raises:
            ValueError: a value is out of bounds; the text names the field and the bound.
        """
        self._max_batched = max_num_batched_tokens
        budget = max_num_scheduled_tokens
        self._budget = max_num_batched_tokens if budget is None else budget
        self.max_num_running = max_num_seqs if max_num_active_seqs is None else max_num_active_seqs
        _require("policy", policy in POLICIES, f"must be one of {', '.join(POLICIES)}")
        for name, value in (("num_blocks", num_blocks), ("max_model_len", max_model_len)):
            _require(name, value >= 2, "must be at least 2")
        _require("block_size", block_size >= 1, "must be at least 1")
        _require("max_num_seqs", self.max_num_running >= 1, "must be at least 1")
        _require("max_num_batched_tokens", self._budget >= 1, "must be at least 1")
        _require("long_prefill_token_threshold", long_prefill_token_threshold >= 0, "is negative")
        _require("watermark", 0.0 <= watermark < 1.0, "must be in [0, 1)")
        _require("max_steps_in_flight", max_steps_in_flight >= 1, "must be at least 1")
        self._max_model_len = min(max_model_len, longest_sequence(block_size))
        self._threshold = long_prefill_token_threshold
        self._adaptive_threshold = long_prefill_token_threshold_adaptive
        self._chunked = enable_chunked_prefill
        self._reserve_full = scheduler_reserve_full_isl
        self._watermark_blocks = int(watermark * num_blocks)
        self._eos_token_ids = frozenset(eos_token_ids)
        self.max_steps_in_flight = max_steps_in_flight
        self.next_step_id = 0

        self._policy = POLICIES[policy]()
        self.kv = KVCacheManager(num_blocks, block_size, enable_prefix_caching)
        self.requests: dict[int, Request] = {}
        """Every unfinished request by id."""
        self.waiting = WaitingQueue(self._policy)
        self.running: list[Request] = []
        """In admission order; after each `schedule` that gave a step, the worker's mirror."""
        self.in_flight: deque[tuple[int, list[Request]]] = deque()
        """Step id and who samples, for every step whose output is due, oldest first."""
        self._finished_req_ids: list[int] = []
        """Left `running` for good, and the worker has not been told yet."""
        self._arrivals = count()
        self.num_preemptions = 0
        self.num_prompt_tokens = 0
        """Of all requests admitted so far."""
        self.num_generation_tokens = 0
        self.num_prefix_queries = 0
        """Tokens looked up in the prefix cache by requests when they were first admitted."""
        self.num_prefix_hits = 0
        """Tokens found there."""

    def add_request(self, request: Request) -> None:
        """Queue a request; with outputs (of an earlier life) it continues after them.

        Raises:
            ValueError: it could never be scheduled, or its id is taken. The text names the field.
        """
        _require("req_id", request.req_id not in self.requests, f"{request.req_id} is in use")
        request.set_limits(self._max_model_len, self._eos_token_ids)
        # The last token is delivered and never computed, so it needs no slot.
        fits = self.kv.can_ever_fit(request.max_num_tokens - 1)
        _require("max_tokens", fits, f"lets request {request.req_id} outgrow the whole KV cache")
        request.arrival_index = next(self._arrivals)
        self.requests[request.req_id] = request
        self.waiting.push(request)

    def abort_request(self, req_id: int) -> Request | None:
        """End a request in whatever state; its blocks are free at once, late tokens are ignored.

        Returns:
            The request; None if the id is unknown, which includes finished requests.
        """
        request = self.requests.get(req_id)
        if request is None:
            return None
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        self._finish(request, FinishReason.ABORT)
        return request

    def _finish(self, request: Request, reason: FinishReason, stop: int | None = None) -> None:
        """End a request; the caller takes it out of `running`."""
        if request.status is RequestStatus.RUNNING:
            self.kv.free(request)
            self._finished_req_ids.append(request.req_id)
        else:
            self.waiting.remove(request)
        request.finish(reason, stop)
        del self.requests[request.req_id]

    def schedule(self) -> SchedulerOutput | None:
        """Put the next step together.

        Returns:
            The message for the worker, which must be sent; it has no tokens if only notices are
            due. None if there is nothing to send, or `max_steps_in_flight` steps are out.
        """
        if len(self.in_flight) >= self.max_steps_in_flight:
            return None
        step = ScheduledStep(self._budget, self._effective_threshold())
        self._schedule_running(step)
        if not step.preempted:
            self._schedule_waiting(step)
        return self._send(step)

    def _effective_threshold(self) -> int:
        if self._adaptive_threshold and self.requests:
            return max(self._threshold, self._max_batched // len(self.requests))
        return self._threshold

    def _schedule_running(self, step: ScheduledStep) -> None:
        """Serve whoever runs, in order of admission.

        The inner loop runs once per request and step: in a steady decode it only moves a counter.
        A preemption replaces `self.running`, and this loop goes on over the list it began with.
        """
        visits = iter(self.running)
        sampling = step.sampling
        budget = step.budget
        for request in visits:
            computed = request.num_computed_tokens
            if computed < request.quiet_until:
                request.num_computed_tokens = computed + 1
                sampling.append(request)
                budget -= 1
            elif request.status is RequestStatus.RUNNING:
                step.budget = budget
                self._continue(request, step)
                budget = step.budget
            if budget == 0:
                break
        step.budget = budget
        for request in visits:
            if request.status is RequestStatus.RUNNING:
                step.granted[request.req_id] = 0

    def _continue(self, request: Request, step: ScheduledStep) -> None:
        """Grant a running request its next tokens, taking blocks from others if it must."""
        computed = request.num_computed_tokens
        if computed + 1 >= request.max_num_tokens:
            # The pending token is its last.
            step.granted[request.req_id] = 0
            return
        num_new = min(step.limit(request, max(request.num_tokens - computed, 1)), step.budget)
        while (new_block_ids := self.kv.grow(request, computed + num_new)) is None:
            victim = self._policy.victim(self.running)
            self._preempt(victim, step)
            if victim is request:
                return
        if new_block_ids:
            step.grown[request.req_id] = new_block_ids
        self._grant(request, num_new, step)

    def _grant(self, request: Request, num_new: int, step: ScheduledStep) -> None:
        """Move the computed tokens ahead; at the end of its tokens the request samples."""
        step.budget -= num_new
        step.granted[request.req_id] = num_new
        computed = request.num_computed_tokens = request.num_computed_tokens + num_new
        if computed >= request.num_tokens:
            step.sampling.append(request)
            request.quiet_until = min(self.kv.quiet_until(request), request.max_num_tokens - 1)

    def _preempt(self, victim: Request, step: ScheduledStep) -> None:
        """Take the blocks of a running request, and what this step had granted to it."""
        withdrawn = step.withdraw(victim)
        if withdrawn:
            victim.num_computed_tokens -= withdrawn
            self.kv.forget_uncomputed(victim)
        victim.num_late_tokens = victim.num_pending_tokens
        self.running = [request for request in self.running if request is not victim]
        self._requeue(victim)
        victim.num_preemptions += 1
        self.num_preemptions += 1
        step.preempted.append(victim)

    def _requeue(self, request: Request) -> None:
        """Send a running request back to wait; all its tokens will be computed again."""
        self.kv.free(request)
        request.become(RequestStatus.PREEMPTED)
        request.num_computed_tokens = 0
        request.quiet_until = 0
        self.waiting.push(request)

    def _schedule_waiting(self, step: ScheduledStep) -> None:
        """Admit from the front of the queue until something is used up."""
        while step.budget > 0 and len(self.running) < self.max_num_running:
            request = self.waiting.front()
            # While it is owed late tokens, a preempted request does not know where it continues.
            if request is None or request.num_late_tokens or not self._admit(request, step):
                return

    def _admit(self, request: Request, step: ScheduledStep) -> bool:
        """Let a waiting request run, if tokens and blocks suffice."""
        num_blocks = self.kv.num_blocks_for(request.num_tokens)
        is_refused = self._reserve_full and self.kv.still_refuses(request)
        if is_refused or not step.can_introduce(request, num_blocks):
            return False
        hits = self.kv.find_cached_prefix(request)
        num_cached = len(hits) * self.kv.block_size
        # At least one token is computed, for the logits; if the cache has it too, its KV stays.
        computed = min(num_cached, request.num_tokens - 1)
        num_new = step.limit(request, request.num_tokens - computed)
        if num_new > step.budget:
            # Without chunking it waits for a step that holds all of it; if none can, it is cut.
            if not self._chunked and step.budget < self._budget:
                return False
            num_new = step.budget
        num_tokens = computed + num_new
        num_reserved = request.num_tokens if self._reserve_full else num_tokens
        headroom = self._watermark_blocks if self.running else 0
        if not self.kv.admit(request, hits, num_tokens, num_reserved, headroom):
            assert self.running, f"request {request.req_id} does not fit into an empty cache"
            return False
        self._start(request, computed)
        step.introduce(request, num_cached)
        self._grant(request, num_new, step)
        return True

    def _start(self, request: Request, num_computed: int) -> None:
        """Move a request from `waiting` to `running`."""
        self.waiting.remove(request)
        request.become(RequestStatus.RUNNING)
        self.running.append(request)
        request.num_computed_tokens = num_computed
        if request.num_cached_tokens is None:
            request.num_cached_tokens = min(num_computed, request.num_prompt_tokens)
            self.num_prompt_tokens += request.num_prompt_tokens
            if self.kv.may_read_cache(request):
                self.num_prefix_queries += request.num_tokens
                self.num_prefix_hits += num_computed

    def _send(self, step: ScheduledStep) -> SchedulerOutput | None:
        """Turn the grants into the message and remember who will sample."""
        num_tokens = self._budget - step.budget
        if not (num_tokens or step.preempted or self._finished_req_ids):
            return None
        message = step.message(self.next_step_id, self._finished_req_ids, num_tokens)
        self._finished_req_ids = []
        self.in_flight.append((self.next_step_id, step.sampling))
        self.next_step_id += 1
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
            self.running = [request for request in self.running if request.status is running]
        self.num_generation_tokens += len(results)
        return results

    def _check_stop(self, result: StepResult, token_id: int) -> bool:
        """Finish the request if this token ends it. Stop tokens are tested before the length."""
        request = result.request
        params = request.sampling_params
        may_stop = request.num_output_tokens >= params.min_tokens
        if may_stop and token_id in request.stop_token_ids:
            result.finish_reason = FinishReason.STOP
            if params.ignore_eos or token_id not in self._eos_token_ids:
                result.stop_token_id = token_id
        elif request.num_tokens >= request.max_num_tokens:
            result.finish_reason = FinishReason.LENGTH
        else:
            return False
        self._finish(request, result.finish_reason, result.stop_token_id)
        return True

    def recompute_all(self) -> None:
        """Start from nothing on a new worker: the old one and all its KV are lost.

        Running requests wait again, at their places in the order and with their outputs; the steps
        in flight will never be answered, so their tokens are sampled again.
        """
        self.in_flight.clear()
        self._finished_req_ids = []
        for request in self.running:
            self._requeue(request)
        self.running = []
        for request in self.requests.values():
            request.num_late_tokens = 0
        emptied = self.kv.reset_prefix_cache()
        assert emptied, "nobody runs, yet blocks are held"

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self.requests)

    @property
    def num_running(self) -> int:
        """Requests that hold a sequence slot."""
        return len(self.running)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue, preempted ones included."""
        return len(self.waiting)

    @property
    def kv_cache_usage(self) -> float:
        """Held share of the KV blocks, 0 to 1."""
        return self.kv.usage


def _require(field: str, holds: bool, bound: str) -> None:
    if not holds:
        raise ValueError(f"{field} {bound}")

"""EngineCore: requests and results in, steps and outputs out. No sockets, no clock.

It joins the scheduler to the two links: names the requests of many clients by numbers of its own,
checks and refuses, follows the workers' comings and goings, and turns a step's results into each
client's outputs.
"""

from collections.abc import Iterable

from core_proc.request import Request
from core_proc.scheduler import Scheduler, StepResult
from core_proc.stats import LoopHistogram
from protocol.api_core import (
    AddRequest,
    EngineState,
    EngineStats,
    ErrorCode,
    Refused,
    RequestError,
    RequestOutput,
    Status,
    StepOutputs,
    validate_request,
)
from protocol.config import EngineConfig
from protocol.core_worker import (
    ModelFacts,
    ModelRunnerOutput,
    PromptLogprobs,
    SchedulerOutput,
)

Client = bytes
"""Identity of a client's connection."""


_MAX_ENTRIES = 4096
"""Prompt logprobs in one output: a prompt has any number of them, and a frame a largest size."""


class WorkerMisbehaved(Exception):
    """A worker's message contradicts what it was told; nothing of it was taken over."""


class FactsChanged(Exception):
    """A successor of the workers brings another model or another number of blocks."""


class _Owner:
    """What the engine keeps beside each request: whose it is and what was told already."""

    __slots__ = ("client", "next_prompt_position", "request_id", "told_cached")

    def __init__(self, client: Client, request_id: int) -> None:
        self.client = client
        self.request_id = request_id
        self.told_cached = False
        self.next_prompt_position = 0
        """Of the first prompt logprob that was not told yet."""


class EngineCore:
    """The state of one engine between its clients and its workers."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._scheduler: Scheduler | None = None
        self._facts: ModelFacts | None = None
        self._has_workers = False
        self._draining = False
        self._ids: dict[Client, dict[int, int]] = {}
        self._next_req_id = 1
        self.loop_histogram = LoopHistogram()
        self.num_fenced_frames = 0
        self.num_worker_restarts = 0
        self._num_steps = 0

    # Workers ------------------------------------------------------------------------------------

    def adopt_workers(self, facts: ModelFacts) -> int:
        """Begin, or go on, with workers that know no request; returns their first step's id.

        Raises:
            FactsChanged: they do not fit to what was promised to clients.
        """
        if self._facts is None:
            self._facts = facts
            self._scheduler = self._new_scheduler(facts)
        elif facts != self._facts:
            raise FactsChanged(f"workers came back with {facts} instead of {self._facts}")
        else:
            self.num_worker_restarts += 1
        assert self._scheduler is not None
        self._has_workers = True
        return self._scheduler.next_step_id

    def lose_workers(self) -> None:
        """Take back everything dispatched: running requests wait, with their outputs kept."""
        if self._has_workers:
            assert self._scheduler is not None
            self._scheduler.recompute_all()
            self._has_workers = False

    def _new_scheduler(self, facts: ModelFacts) -> Scheduler:
        scheduler = self._config.scheduler
        return Scheduler(
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            num_blocks=facts.num_gpu_blocks,
            block_size=facts.block_size,
            max_model_len=facts.max_model_len,
            policy=scheduler.scheduling_policy,
            enable_prefix_caching=self._config.cache.enable_prefix_caching,
            long_prefill_token_threshold=scheduler.long_prefill_token_threshold,
            watermark=scheduler.watermark,
            scheduler_reserve_full_isl=scheduler.scheduler_reserve_full_isl,
            enable_chunked_prefill=scheduler.enable_chunked_prefill,
            max_num_scheduled_tokens=scheduler.max_num_scheduled_tokens,
            eos_token_ids=facts.eos_token_ids,
            max_steps_in_flight=scheduler.max_steps_in_flight,
        )

    # Clients ------------------------------------------------------------------------------------

    def add(self, client: Client, add: AddRequest) -> Refused | None:
        """Take a request, or say why not. An open one with the same id ends in either case."""
        ids = self._ids.setdefault(client, {})
        error = self._why_not(add, was_accepted=add.resent or add.request_id in ids)
        self._abort(ids, add.request_id)
        if error is not None:
            return Refused(add.request_id, error)
        assert self._scheduler is not None
        request = Request(
            self._next_req_id,
            add.prompt_token_ids,
            add.sampling_params,
            output_token_ids=add.output_token_ids,
            priority=add.priority,
            arrival_time=add.arrival_time,
            cache_salt=add.cache_salt,
            owner=_Owner(client, add.request_id),
        )
        try:
            self._scheduler.add_request(request)
        except ValueError as problem:
            return Refused(add.request_id, RequestError(ErrorCode.INVALID, str(problem)))
        ids[add.request_id] = self._next_req_id
        self._next_req_id += 1
        return None

    def _why_not(self, add: AddRequest, *, was_accepted: bool) -> RequestError | None:
        if self._facts is None or self._scheduler is None:
            return RequestError(ErrorCode.OVERLOADED, "the engine is starting")
        if self._draining and not was_accepted:
            return RequestError(ErrorCode.DRAINING, "the engine is shutting down")
        limit = self._config.scheduler.max_num_waiting
        if self._scheduler.num_waiting >= limit and not was_accepted:
            return RequestError(ErrorCode.OVERLOADED, f"{limit} requests are waiting already")
        return validate_request(add, self._facts)

    def abort(self, client: Client, request_ids: Iterable[int]) -> None:
        """Stop requests that nobody waits for; unknown ids are ignored."""
        ids = self._ids.get(client, {})
        for request_id in request_ids:
            self._abort(ids, request_id)

    def drop_client(self, client: Client) -> int:
        """Abort everything of a client that is gone; returns how many requests that were."""
        ids = self._ids.pop(client, {})
        num_open = len(ids)
        for request_id in list(ids):
            self._abort(ids, request_id)
        return num_open

    def _abort(self, ids: dict[int, int], request_id: int) -> None:
        req_id = ids.pop(request_id, None)
        if req_id is not None:
            assert self._scheduler is not None
            self._scheduler.abort_request(req_id)

    def drain(self) -> None:
        """Refuse new requests from here on; accepted ones are finished."""
        self._draining = True

    # Steps --------------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput | None:
        """Decide the next step; None where there is nothing to do or enough is under way."""
        if not self._has_workers:
            return None
        assert self._scheduler is not None
        step = self._scheduler.schedule()
        if step is not None:
            self._num_steps += 1
        return step

    def update(self, output: ModelRunnerOutput) -> dict[Client, StepOutputs]:
        """Take in a step's results; returns what each client is to be told.

        Raises:
            WorkerMisbehaved: they do not answer the oldest step; nothing has changed.
        """
        assert self._scheduler is not None
        self._check(output)
        outputs: dict[Client, list[RequestOutput]] = {}
        for part in output.prompt_logprobs:
            self._tell_prompt(part, outputs)
        for result in self._scheduler.update_from_output(output):
            owner = result.request.owner
            assert isinstance(owner, _Owner)
            outputs.setdefault(owner.client, []).append(self._to_output(result, owner, output))
            if result.finish_reason is not None:
                del self._ids[owner.client][owner.request_id]
        return {client: StepOutputs(rows) for client, rows in outputs.items()}

    def _check(self, output: ModelRunnerOutput) -> None:
        """Compare all of an output with what is due, before any of it is believed."""
        assert self._scheduler is not None
        assert self._facts is not None
        steps, token_ids = self._scheduler.in_flight, output.sampled_token_ids
        if not steps or steps[0][0] != output.step_id:
            due = f"step {steps[0][0]} is" if steps else "none is"
            raise WorkerMisbehaved(f"output of step {output.step_id} came, and {due} due")
        num_sampling = len(steps[0][1])
        if len(token_ids) != num_sampling:
            raise WorkerMisbehaved(f"{len(token_ids)} tokens for {num_sampling} that sampled")
        if token_ids and max(token_ids) >= self._facts.vocab_size:
            raise WorkerMisbehaved(
                f"token id {max(token_ids)} is outside the vocabulary of {self._facts.vocab_size}"
            )

    def _tell_prompt(
        self, part: PromptLogprobs, outputs: dict[Client, list[RequestOutput]]
    ) -> None:
        """Pass on prompt logprobs that are new: a prompt computed again brings them again.

        They go out before the first token, so a request with outputs has all of them.
        """
        assert self._scheduler is not None
        request = self._scheduler.requests.get(part.req_id)
        if request is None or request.num_output_tokens:
            return
        owner = request.owner
        assert isinstance(owner, _Owner)
        end = part.first_position + len(part.entries)
        for first in range(max(owner.next_prompt_position, part.first_position), end, _MAX_ENTRIES):
            index = first - part.first_position
            entries = part.entries[index : index + _MAX_ENTRIES]
            rows = outputs.setdefault(owner.client, [])
            piece = PromptLogprobs(part.req_id, first, entries)
            rows.append(RequestOutput(owner.request_id, 0, [], prompt_logprobs=[piece]))
        owner.next_prompt_position = max(owner.next_prompt_position, end)

    def _to_output(
        self, result: StepResult, owner: _Owner, output: ModelRunnerOutput
    ) -> RequestOutput:
        request, token_ids = result.request, result.new_token_ids
        first_index = len(request.token_ids) - request.num_prompt_tokens - len(token_ids)
        if owner.told_cached and not output.logprobs and result.finish_reason is None:
            return RequestOutput(owner.request_id, first_index, token_ids)
        num_cached = None if owner.told_cached else request.num_cached_tokens
        owner.told_cached = True
        logprobs = output.logprobs.get(request.req_id)
        return RequestOutput(
            owner.request_id,
            first_index,
            token_ids,
            result.finish_reason,
            result.stop_token_id,
            num_cached,
            None if logprobs is None else [logprobs],
        )

    # Reports ------------------------------------------------------------------------------------

    @property
    def state(self) -> EngineState:
        """Where the engine stands."""
        if self._facts is None:
            return EngineState.STARTING
        if self._draining:
            return EngineState.DRAINING
        return EngineState.READY if self._has_workers else EngineState.RECOVERING

    @property
    def is_drained(self) -> bool:
        """Whether all that was accepted before `drain` is finished."""
        return self._draining and not self.has_unfinished

    @property
    def has_unfinished(self) -> bool:
        """Whether any accepted request is open."""
        return self._scheduler is not None and self._scheduler.has_unfinished

    def stats(self) -> EngineStats:
        """Gauges and counters as of now."""
        scheduler = self._scheduler
        if scheduler is None:
            return EngineStats(fenced_frames=self.num_fenced_frames)
        return EngineStats(
            num_running_reqs=scheduler.num_running,
            num_waiting_reqs=scheduler.num_waiting,
            kv_cache_usage=scheduler.kv_cache_usage,
            num_steps=self._num_steps,
            num_preemptions=scheduler.num_preemptions,
            prompt_tokens=scheduler.num_prompt_tokens,
            generation_tokens=scheduler.num_generation_tokens,
            prefix_cache_queries=scheduler.num_prefix_queries,
            prefix_cache_hits=scheduler.num_prefix_hits,
            fenced_frames=self.num_fenced_frames,
            worker_restarts=self.num_worker_restarts,
            loop_seconds_buckets=list(self.loop_histogram.counts),
            loop_seconds_sum=self.loop_histogram.sum_s,
        )

    def status(self) -> Status:
        """What clients are told about once a second."""
        return Status(self.state, self._facts, self.stats())

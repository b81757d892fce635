"""EngineCore: requests and results in, steps and outputs out. No sockets, no clock.

It joins the scheduler to the two links: names the requests of many clients by numbers of its own,
checks and refuses, follows the workers' comings and goings, and turns a step's results into each
client's outputs.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from core_proc.invariants import check_invariants
from core_proc.options import SchedulerOptions
from core_proc.output_check import check_output
from core_proc.outputs import output_row, prompt_rows
from core_proc.owners import Client, Owner, Owners, owner_of
from core_proc.pausing import Pausing
from core_proc.quarantine import Quarantine
from core_proc.request import Request
from core_proc.scheduler import Scheduler
from core_proc.stats import LoopHistogram, scheduler_stats
from protocol.api_core import (
    AddRequest,
    Control,
    ControlDone,
    CoreToClient,
    EngineState,
    EngineStats,
    ErrorCode,
    PauseMode,
    Refused,
    RequestError,
    RequestOutput,
    Status,
    StepOutputs,
    validate_request,
)
from protocol.config import EngineConfig
from protocol.core_worker import ModelFacts, ModelRunnerOutput, SchedulerOutput
from protocol.kv_events import KVEvent
from protocol.message import MAX_TEXT

CANARY_ID = 2**53 - 1
"""Of a request of our own: far beyond what `_next_req_id` reaches."""

log = logging.getLogger("troika.core")


class FactsChanged(Exception):
    """A successor of the workers brings another model or another number of blocks."""


class EngineCore:
    """The state of one engine between its clients and its workers."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._scheduler: Scheduler | None = None
        self._pausing: Pausing | None = None
        self._quarantine: Quarantine | None = None
        self._inherited_marks: Sequence[int] = ()
        self.now = 0.0
        """Monotonic seconds, as the loop tells it."""
        self._facts: ModelFacts | None = None
        self._has_workers = False
        self._draining = False
        self._owners = Owners()
        self._next_req_id = 1
        self.loop_histogram = LoopHistogram()
        self.num_fenced_frames = 0
        self.num_worker_restarts = 0
        self._num_steps = 0

    # Workers ------------------------------------------------------------------------------------

    def adopt_workers(self, facts: ModelFacts, swap_cost_tokens: float = 0.0) -> int:
        """Begin, or go on, with workers that know no request; returns their first step's id.

        Args:
            facts: of the model and its memory.
            swap_cost_tokens: of `WorkerHello`; the first workers' holds for all.

        Raises:
            FactsChanged: they do not fit to what was promised to clients.
        """
        if self._facts is None:
            self._scheduler = Scheduler(
                SchedulerOptions.combine(self._config, facts, swap_cost_tokens)
            )
            self._pausing = Pausing(self._scheduler, self._owners.tell)
            self._quarantine = Quarantine(self._scheduler, CANARY_ID)
            self._quarantine.inherit(self._inherited_marks, self.now)
            if self._draining:
                self._pausing.drain()
        elif not facts.can_replace(self._facts):
            raise FactsChanged(f"workers came back with {facts} instead of {self._facts}")
        else:
            self.num_worker_restarts += 1
        self._facts = facts
        assert self._scheduler is not None
        self._has_workers = True
        return self._scheduler.next_step_id

    def lose_workers(self) -> None:
        """Take back everything dispatched: running requests wait, with their outputs kept."""
        if self._has_workers:
            assert self._scheduler is not None
            assert self._pausing is not None
            assert self._quarantine is not None
            self._quarantine.workers_lost()
            self._scheduler.recompute_all()
            self._pausing.workers_lost()
            self._has_workers = False

    def blame_requests(self) -> None:
        """The workers that were lost last died of what they computed, not of something outside."""
        if self._quarantine is None or self._scheduler is None:
            return
        guilty = self._quarantine.charge(self.now)
        if guilty is None:
            return
        for request in self._quarantine.convict(guilty, self.now):
            self._scheduler.abort_request(request.req_id)
            self._refuse(request, "the request has killed its worker twice", ErrorCode.QUARANTINED)

    def inherit_marks(self, marks: Sequence[int]) -> None:
        """A core has died of what it was doing; before it did, `take_marks` had said this."""
        self._inherited_marks = marks

    def take_marks(self) -> list[int] | None:
        """What a successor must know if this core dies of what is under way; None: nothing new."""
        return None if self._quarantine is None else self._quarantine.take_marks()

    # Clients ------------------------------------------------------------------------------------

    def add(self, client: Client, add: AddRequest) -> Refused | None:
        """Take a request, or say why not. An open one with the same id ends in either case."""
        was_accepted = add.resent or self._owners.has(client, add.request_id)
        error = self._why_not(add, was_accepted=was_accepted)
        self.abort(client, [add.request_id])
        if error is not None:
            return Refused(add.request_id, error)
        assert self._scheduler is not None
        request = Request(
            self._next_req_id,
            add.prompt_token_ids,
            add.sampling_params,
            output_token_ids=add.output_token_ids,
            priority=add.priority,
            arrival_time=self.now - add.age_s,
            cache_salt=add.cache_salt,
            tenant=add.tenant,
            owner=Owner(client, add.request_id),
        )
        try:
            self._scheduler.add_request(request)
        except ValueError as problem:
            return Refused(add.request_id, RequestError(ErrorCode.INVALID, str(problem)))
        assert self._quarantine is not None
        self._quarantine.added(request)
        self._owners.enter(client, add.request_id, self._next_req_id)
        self._next_req_id += 1
        return None

    def _why_not(self, add: AddRequest, *, was_accepted: bool) -> RequestError | None:
        if self._facts is None or self._scheduler is None:
            return RequestError(ErrorCode.OVERLOADED, "the engine is starting")
        if self._draining and not was_accepted:
            return RequestError(ErrorCode.DRAINING, "the engine is shutting down")
        if not was_accepted and (error := self._overload(len(add.prompt_token_ids))) is not None:
            return error
        assert self._quarantine is not None
        if self._quarantine.refuses(add.prompt_token_ids, add.sampling_params, self.now):
            text = "the same request has killed workers; it is refused for ten minutes"
            return RequestError(ErrorCode.QUARANTINED, text)
        return validate_request(add, self._facts)

    def _overload(self, num_prompt_tokens: int) -> RequestError | None:
        """Why the queue has no room for one more, if so."""
        assert self._scheduler is not None
        scheduler, limits = self._scheduler, self._config.scheduler
        num_waiting, num_tokens = scheduler.num_waiting, scheduler.waiting.num_prompt_tokens
        if num_waiting >= limits.max_num_waiting:
            text = f"{limits.max_num_waiting} requests are waiting already"
        elif num_waiting and num_tokens + num_prompt_tokens > limits.max_waiting_tokens:
            text = f"prompts of {num_tokens} tokens are waiting already"
        else:
            return None
        return RequestError(ErrorCode.OVERLOADED, text)

    def abort(self, client: Client, request_ids: Iterable[int]) -> None:
        """Stop requests that nobody waits for; unknown ids are ignored."""
        for request_id in request_ids:
            req_id = self._owners.remove(client, request_id)
            if req_id is not None:
                assert self._scheduler is not None
                self._scheduler.abort_request(req_id)

    def drop_client(self, client: Client) -> int:
        """Abort everything of a client that is gone; returns how many requests that were."""
        req_ids = self._owners.drop(client)
        for req_id in req_ids:
            assert self._scheduler is not None
            self._scheduler.abort_request(req_id)
        if self._pausing is not None:
            self._pausing.forget(client)
        return len(req_ids)

    def drain(self) -> None:
        """Refuse new requests from here on; accepted ones are finished, which ends any pause."""
        self._draining = True
        if self._pausing is not None:
            self._pausing.drain()

    def control(self, client: Client, control: Control) -> None:
        """Obey what concerns the whole engine; the answer comes with the mail."""
        if self._pausing is None:
            refusal = ControlDone(control.number, ok=False, pause_mode=self.pause_mode)
            self._owners.tell(client, refusal)
        else:
            self._pausing.obey(client, control)

    def take_mail(self) -> list[tuple[Client, CoreToClient]]:
        """What clients are to be told besides outputs; to be asked for in every turn."""
        return self._owners.take_mail()

    # Steps --------------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput | None:
        """Decide the next step; None where there is nothing to do or enough is under way."""
        if not self._has_workers:
            return None
        assert self._scheduler is not None
        assert self._quarantine is not None
        self._quarantine.settle()
        step = self._scheduler.schedule()
        if step is not None:
            self._num_steps += 1
        self._tell_failures()
        self._check_invariants()
        return step

    @property
    def is_sleep_due(self) -> bool:
        """Whether the workers are to be told to sleep; ask when there is no step to schedule."""
        return self._has_workers and self._pausing is not None and self._pausing.is_sleep_due

    def sleep_sent(self) -> None:
        """The workers were told to sleep."""
        assert self._pausing is not None
        self._pausing.sleep_sent()

    def update(self, output: ModelRunnerOutput) -> dict[Client, StepOutputs]:
        """Take in a step's results; returns what each client is to be told.

        Raises:
            WorkerMisbehaved: they do not answer the oldest step; nothing has changed.
        """
        assert self._scheduler is not None
        assert self._facts is not None
        in_flight = self._scheduler.in_flight
        check_output(
            output,
            in_flight[0] if in_flight else None,
            self._facts.vocab_size,
            self._config.scheduler.num_speculative_tokens,
        )
        assert self._quarantine is not None
        rows: dict[Client, list[RequestOutput]] = {}
        for part in output.prompt_logprobs:
            request = self._scheduler.requests.get(part.req_id)
            if request is None:
                continue
            try:
                news = prompt_rows(request, part)
            except Exception:
                self._give_up(request)
                continue
            if news:
                rows.setdefault(owner_of(request).client, []).extend(news)
        for req_id, error in output.request_errors.items():
            if req_id != CANARY_ID:
                self._scheduler.fail_request(req_id, error, ErrorCode.COMPUTATION_FAILED)
        results = self._scheduler.update_from_output(output)
        self._quarantine.computed(result.request for result in results)
        for result in results:
            if self._quarantine.is_canary(result.request):
                continue
            owner = owner_of(result.request)
            try:
                row = output_row(result, owner, output)
            except Exception:
                self._give_up(result.request)
                continue
            rows.setdefault(owner.client, []).append(row)
            if result.finish_reason is not None:
                self._owners.remove(owner.client, owner.request_id)
        self._tell_failures()
        self._check_invariants()
        return {client: StepOutputs(news) for client, news in rows.items()}

    def _check_invariants(self) -> None:
        if self._config.run.check_invariants:
            assert self._scheduler is not None
            check_invariants(self._scheduler)

    def _give_up(self, request: Request) -> None:
        """An error of ours in the outputs of one request ends that one, and nothing else."""
        log.exception("outputs of request %d failed", request.req_id)
        assert self._scheduler is not None
        self._scheduler.abort_request(request.req_id)
        self._refuse(request, "the request's output could not be built")

    def _tell_failures(self) -> None:
        assert self._scheduler is not None
        for failure in self._scheduler.take_failures():
            log.error("request %d failed: %s", failure.request.req_id, failure.error)
            self._refuse(failure.request, failure.error, failure.code)

    def _refuse(self, request: Request, why: str, code: ErrorCode = ErrorCode.INTERNAL) -> None:
        """Tell whoever still waits for a request that nothing more will come."""
        if request.owner is not None and self._owners.waits_for(request):  # a canary has none
            owner = owner_of(request)
            self._owners.remove(owner.client, owner.request_id)
            error = RequestError(code, why[:MAX_TEXT])
            self._owners.tell(owner.client, Refused(owner.request_id, error))

    # The prefix cache ---------------------------------------------------------------------------

    @property
    def has_kv_events(self) -> bool:
        """Whether it is recorded what happens to the prefix cache."""
        return self._config.cache.enable_kv_events

    def take_kv_events(self) -> list[KVEvent]:
        """What has happened to the prefix cache since the last call."""
        return [] if self._scheduler is None else self._scheduler.kv.take_events()

    def snapshot_kv_events(self) -> Iterator[KVEvent]:
        """Events that tell an empty cache what is cached now; made when they are asked for."""
        return iter(()) if self._scheduler is None else self._scheduler.kv.snapshot_events()

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
    def pause_mode(self) -> PauseMode:
        """How much stands still."""
        return PauseMode.RUNNING if self._pausing is None else self._pausing.mode

    @property
    def is_sleeping(self) -> bool:
        """Whether the engine was told to sleep."""
        return self._pausing is not None and self._pausing.is_sleeping

    @property
    def has_facts(self) -> bool:
        """Whether there were workers yet: only then do clients bring what they have open."""
        return self._facts is not None

    @property
    def is_drained(self) -> bool:
        """Whether all that was accepted before `drain` is finished."""
        return self._draining and not self.has_unfinished

    @property
    def is_computing(self) -> bool:
        """Whether a step is under way."""
        return self._scheduler is not None and bool(self._scheduler.in_flight)

    @property
    def has_unfinished(self) -> bool:
        """Whether any accepted request is open."""
        return self._scheduler is not None and self._scheduler.has_unfinished

    def stats(self) -> EngineStats:
        """Gauges and counters as of now."""
        stats = EngineStats() if self._scheduler is None else scheduler_stats(self._scheduler)
        return msgspec.structs.replace(
            stats,
            num_steps=self._num_steps,
            fenced_frames=self.num_fenced_frames,
            worker_restarts=self.num_worker_restarts,
            num_quarantined=0 if self._quarantine is None else self._quarantine.num_convicted,
            loop_seconds_buckets=list(self.loop_histogram.counts),
            loop_seconds_sum=self.loop_histogram.sum_s,
        )

    def status(self) -> Status:
        """What clients are told about once a second."""
        return Status(self.state, self._facts, self.stats(), self.pause_mode, self.is_sleeping)

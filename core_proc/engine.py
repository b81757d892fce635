"""EngineCore: requests and results in, steps and outputs out. No sockets, no clock.

Theory of operation. Only workers know the model and its memory. So the engine begins with a
scheduler that gets no requests, and refuses every request and control with "starting". At the first
adoption of workers it makes the scheduler of their model, with the objects that use it; these
survive the loss of workers.

The loop drives the engine in a fixed order. A turn handles messages (`add`, `abort`, `control`,
`update`), and then decides steps (`schedule`, until it returns None). Before it sends a step, it
writes the result of `take_marks` to the progress page. `take_outgoing` comes last. Between two
turns the following holds:

- A request is open for its client exactly as long as the scheduler knows it. Each request that
  ends does so once: with a final output, with `Refused`, or because its client aborted it or left.
- `update` accepts only the answer to the oldest step in flight. `lose_workers` withdraws all steps
  in flight; their requests wait again, with their outputs so far.
- A failure of one request (its hash, its row of outputs) ends that request. A failed assertion ends
  the core: its state is wrong, while the clients' ledgers are right, so that nothing is lost.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from core_proc.invariants import check_invariants
from core_proc.kv.offload import Offload
from core_proc.kv.stores import open_stores
from core_proc.options import SchedulerOptions
from core_proc.outputs.check import InvalidWorkerOutput, check_output
from core_proc.outputs.owners import Client, Owner, Owners, owner_of
from core_proc.outputs.prompt_progress import PromptProgress
from core_proc.outputs.refusals import Refusals
from core_proc.outputs.rows import output_row, prompt_rows
from core_proc.pausing import Pausing
from core_proc.preparation.adapters import Adapters
from core_proc.preparation.grammars import Grammars
from core_proc.recovery.adapter_trials import AdapterTrials
from core_proc.recovery.quarantine import Quarantine
from core_proc.request import Request
from core_proc.request_check import NO_LORA, RequestCheck
from core_proc.scheduler import Scheduler
from core_proc.stats import Histogram, scheduler_stats
from protocol.api_core import (
    LOOP_BUCKETS_S,
    STEP_TOKENS_BUCKETS,
    AddRequest,
    Control,
    ControlAction,
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
)
from protocol.config import EngineConfig
from protocol.core_worker import (
    AdapterLoaded,
    BlocksFound,
    BlocksLoaded,
    CompileGrammar,
    FindBlocks,
    GrammarCompiled,
    LoadAdapter,
    LoadBlocks,
    ModelRunnerOutput,
    RankAnswer,
    SchedulerOutput,
    StoreBlocks,
    UnloadAdapter,
)
from protocol.kv_events import KVEvent
from protocol.message import MAX_TEXT
from protocol.model_facts import ModelFacts
from protocol.process.machines import blocks_address
from protocol.process.progress_page import MarkEdits
from protocol.shared_params import SharedParams

CANARY_ID = 2**53 - 1
"""Id of the quarantine's own request; `_next_req_id` never reaches it."""

_MAX_CLIENT_BYTES = 16

log = logging.getLogger("troika.core")


class FactsChanged(Exception):
    """The new workers have a different model or number of blocks from the last ones."""


class EngineCore:
    """The state of one engine between its clients and its workers."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._owners = Owners()
        self._inherited_marks: Sequence[int] = ()
        self._trials = AdapterTrials()
        self._shared_params = SharedParams()
        self._has_workers = False
        self._is_loading_anew = False
        self._next_req_id = 1
        self._num_steps = 0
        self._num_worker_restarts = 0
        self.facts: ModelFacts | None = None
        """What the workers that were adopted last know; None: there were none yet."""
        self.now = 0.0
        """Monotonic seconds; the loop sets it at the beginning of each turn."""
        self.loop_histogram = Histogram(LOOP_BUCKETS_S)
        self._step_tokens = Histogram(STEP_TOKENS_BUCKETS)
        self.num_fenced_frames = 0
        self._begin(SchedulerOptions(), None)

    def _begin(self, options: SchedulerOptions, offload: Offload | None) -> None:
        """Make a scheduler without requests, and the objects that use it."""
        lora = self._config.lora
        self.scheduler = Scheduler(options, offload)
        self.grammars = Grammars(self.scheduler)
        self.adapters = Adapters(
            self.scheduler,
            self._trials,
            self._answer_load,
            max_loras=lora.max_loras,
            num_kept=lora.num_kept,
            num_taken=options.max_num_seqs,
        )
        self.progress = PromptProgress(self.scheduler.requests)
        self.pausing = Pausing(self.scheduler, self._owners.post)
        self.quarantine = Quarantine(self.scheduler, CANARY_ID, self.adapters.waits_for_others)
        self._refusals = Refusals(self.scheduler, self._owners)
        self._check = RequestCheck(
            self._config,
            self.scheduler,
            grammars=self.grammars,
            adapters=self.adapters,
            pausing=self.pausing,
            quarantine=self.quarantine,
        )

    # Workers ------------------------------------------------------------------------------------

    def adopt_workers(self, facts: ModelFacts, swap_cost_tokens: float = 0.0) -> int:
        """Start or continue with workers that know no request; return their first step's id."""
        if self.facts is None:
            options = SchedulerOptions.combine(self._config, facts, swap_cost_tokens)
            is_draining = self.pausing.is_draining
            self._begin(options, open_stores(self._config, facts))
            self.quarantine.inherit(self._inherited_marks, self.now)
            if is_draining:
                self.pausing.drain()
            num_states = facts.num_state_blocks - 1
            if 0 < num_states < options.max_num_seqs:
                log.info(
                    "max_num_seqs is %d, but there are state blocks for %d requests at a time",
                    options.max_num_seqs,
                    num_states,
                )
        elif facts.can_replace(self.facts):
            self._num_worker_restarts += 1
        else:
            raise FactsChanged(f"workers came back with {facts.changes(self.facts)}")
        self.facts = facts
        self._has_workers = True
        self._is_loading_anew = False
        return self.scheduler.next_step_id

    def lose_workers(self) -> None:
        """Take back all steps in flight: running requests wait again, with their outputs kept."""
        if self._has_workers:
            self.quarantine.workers_lost()
            self.scheduler.recompute_all()
            self.grammars.workers_lost()
            self.adapters.workers_lost()
            self.progress.workers_lost()
            self.pausing.workers_lost()
        self._has_workers = False

    def wait_for_load(self) -> None:
        """Note that the lost workers were killed from outside; their successors load the model."""
        self._is_loading_anew = not self._has_workers

    @property
    def is_loading_anew(self) -> bool:
        """Whether requests wait for workers to load the model, without having caused the loss."""
        return self._is_loading_anew and self.state is EngineState.RECOVERING

    def attribute_death(self, *, is_fault: bool = True, in_step: bool = True) -> None:
        """Search for the adapter or request that killed the workers, and reject it if found.

        `is_fault` is true if their own fault killed them, and `in_step` if they were computing.
        Workers of a dead core may be meant.
        """
        self.adapters.attribute_death(is_fault=is_fault)
        self._refusals.send_failures()
        if not (is_fault and in_step):
            return
        culprit = self.quarantine.attribute_crash(self.now)
        if culprit is not None:
            for request in self.quarantine.reject(culprit, self.now):
                text = "the request has killed its worker twice"
                self._refusals.end(request, text, ErrorCode.QUARANTINED)

    def inherit_marks(self, marks: Sequence[int]) -> None:
        """Take over the marks of a core that died because of its computation (see `take_marks`)."""
        self._inherited_marks = marks

    def take_marks(self) -> MarkEdits | None:
        """Return the changes in the marks of the steps in flight; None: no change."""
        return self.quarantine.take_marks()

    def inherit_loads(self, records: Iterable[int]) -> None:
        """Take over the load records of the preceding core (see `take_loads`)."""
        self._trials.inherit(records)

    def take_loads(self) -> list[int] | None:
        """Return records of adapters whose loads may have killed workers; None: no change."""
        return self._trials.take_records()

    # Requests and controls ----------------------------------------------------------------------

    def add(self, client: Client, add: AddRequest) -> Refused | None:
        """Queue a request or refuse it. An open request with the same id ends in either case."""
        if self.facts is None:
            error = RequestError(ErrorCode.STARTING, "the engine is starting")
            return Refused(add.request_id, error)
        origin = _origin(client, add)
        was_accepted = add.resent or self._owners.has(client, add.request_id)
        why_not = self._check.why_not(add, origin, self.facts, self.now, was_accepted=was_accepted)
        self.abort(client, [add.request_id])
        if why_not is not None:
            return Refused(add.request_id, why_not)
        req_id, self._next_req_id = self._next_req_id, self._next_req_id + 1
        request = Request(
            req_id,
            add.prompt,
            self._shared_params.shared(add.sampling_params),
            outputs=add.output_token_ids,
            priority=add.priority,
            arrival_time=self.now - add.age_s,
            cache_salt=add.cache_salt,
            adapter_id=0 if add.adapter is None else add.adapter.adapter_id,
            adapter_digest=b"" if add.adapter is None else add.adapter.digest,
            adapter_name="" if add.adapter is None else add.adapter.name,
            tenant=add.tenant,
            origin=origin,
            blocks_at=add.blocks_at,
            owner=Owner(client, add.request_id),
        )
        grammar = add.sampling_params.grammar
        try:
            if grammar is None:
                self.scheduler.add_request(request)
            else:
                self.grammars.add(request, grammar)
        except ValueError as problem:
            param = str(problem).partition(" ")[0]
            error = RequestError(ErrorCode.INVALID, str(problem), param)
            return Refused(add.request_id, error)
        self._owners.enter(client, add.request_id, req_id)  # first: if the next fails, it is ended
        if add.adapter is not None:
            self.adapters.add(request, add.adapter)
        self.progress.added(request)
        self.quarantine.added(request)
        return None

    def abort(self, client: Client, request_ids: Iterable[int]) -> None:
        """End requests whose outputs are no longer wanted; unknown ids are ignored."""
        for request_id in request_ids:
            req_id = self._owners.remove(client, request_id)
            if req_id is not None:
                self.scheduler.abort_request(req_id)

    def drop_client(self, client: Client) -> int:
        """Abort all requests of a client; returns their number."""
        req_ids = self._owners.drop(client)
        for req_id in req_ids:
            self.scheduler.abort_request(req_id)
        self.pausing.forget(client)
        self.adapters.forget(client)
        return len(req_ids)

    def drain(self) -> None:
        """Refuse new requests from now on, and finish the accepted ones, which ends any pause."""
        self.pausing.drain()

    def control(self, client: Client, control: Control) -> None:
        """Handle a request about the whole engine, or about an adapter.

        The answer is among the outgoing messages, now or later.
        """
        if self.facts is None:
            done = ControlDone(control.number, ok=False, pause_mode=PauseMode.RUNNING)
            self._owners.post(client, done)
        elif control.action not in (ControlAction.LOAD_ADAPTER, ControlAction.UNLOAD_ADAPTER):
            self.pausing.handle(client, control)
        elif control.adapter is None or not self._config.lora.enable_lora:
            self._answer_load(client, control.number, NO_LORA)
        elif control.action is ControlAction.LOAD_ADAPTER:
            self.adapters.load(client, control.number, control.adapter)
        else:
            self.adapters.unload(control.adapter)
            self._answer_load(client, control.number, "")

    def _answer_load(
        self, client: Client, number: int, error: str, code: ErrorCode = ErrorCode.INVALID
    ) -> None:
        done = ControlDone(number, not error, self.pausing.mode, error[:MAX_TEXT], code)
        self._owners.post(client, done)

    def take_outgoing(self) -> list[tuple[Client, CoreToClient]]:
        """Return all messages for clients except outputs; called once in every turn."""
        return self._owners.take_outgoing()

    # Steps --------------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput | None:
        """Decide the next step; None if there are no workers, or nothing is to be sent now."""
        if not self._has_workers:
            return None
        self.quarantine.advance()
        step = None if self.adapters.holds_steps else self.scheduler.schedule()
        if step is not None:
            self._num_steps += 1
            if step.total_num_scheduled_tokens:
                self._step_tokens.observe(step.total_num_scheduled_tokens)
            self.quarantine.dispatched(step)
            self.progress.dispatched(step)
            self._note_admissions(step)
        self._end_call()
        return step

    def _note_admissions(self, step: SchedulerOutput) -> None:
        """Note how long the requests that a step introduces have waited, if it is the first time.

        A preemption or a lost worker does not change it, as the request has begun.
        """
        for new in step.scheduled_new_reqs:
            request = self.scheduler.requests[new.req_id]
            owner = request.owner
            if isinstance(owner, Owner) and owner.queue_time_s is None and request.is_fresh:
                owner.queue_time_s = max(0.0, self.now - request.arrival_time)

    def _end_call(self) -> None:
        self._refusals.send_failures()
        if self._config.run.check_invariants:
            check_invariants(self.scheduler)

    def take_transfers(self) -> list[StoreBlocks | LoadBlocks | FindBlocks]:
        """Return the messages to send to the workers after the steps that were decided so far."""
        return self.scheduler.take_transfers() if self._has_workers else []

    def take_grammars(self) -> list[CompileGrammar]:
        """Return the grammars to send to the workers before the next step."""
        return self.grammars.take_messages() if self._has_workers else []

    def take_adapters(self) -> list[LoadAdapter | UnloadAdapter]:
        """Return the messages about adapters to send to the workers before the next step."""
        if not self._has_workers:
            return []
        is_searching = self.quarantine.is_searching
        messages, unblocked = self.adapters.take_messages(is_searching=is_searching)
        self._unblocked(unblocked)
        return messages

    def answered(self, answer: RankAnswer) -> None:
        """Handle the joined answer of all ranks about a grammar, an adapter or blocks.

        The requests that wait for it may be admitted, or are refused with its error.
        """
        match answer:
            case _ if self.facts is None:
                name = type(answer).__name__
                raise InvalidWorkerOutput(f"{name} came before anything was asked for")
            case GrammarCompiled():
                self._unblocked(self.grammars.compiled(answer))
            case AdapterLoaded():
                self._unblocked(self.adapters.loaded(answer))
            case _ if self.scheduler.offload is None:
                raise InvalidWorkerOutput(f"blocks of request {answer.req_id} were never asked for")
            case BlocksLoaded():
                self.scheduler.blocks_loaded(answer)
            case BlocksFound():
                self.scheduler.blocks_found(answer)
        self._end_call()

    def _unblocked(self, requests: Iterable[Request]) -> None:
        """Unblock requests that have what they waited for, unless they need something else."""
        for request in requests:
            if self.adapters.hold_if_unready(request) or self.grammars.hold_if_unready(request):
                continue
            self.quarantine.unblocked(request)

    @property
    def is_sleep_due(self) -> bool:
        """Whether `Sleep` must be sent to the workers if there is no step to schedule."""
        return self._has_workers and self.pausing.is_sleep_due

    def sleep_sent(self) -> None:
        """Note that the workers were sent `Sleep`, which answers the clients that wait for it."""
        self.pausing.sleep_sent()

    def update(self, output: ModelRunnerOutput) -> dict[Client, StepOutputs]:
        """Process the results of the oldest step in flight; return the outputs for each client."""
        if self.facts is None:
            raise InvalidWorkerOutput(
                f"output of step {output.step_id} came before any step was sent"
            )
        in_flight = self.scheduler.in_flight
        oldest = in_flight[0] if in_flight else None
        num_drafts = self._config.scheduler.num_speculative_tokens
        check_output(output, oldest, self.facts.vocab_size, num_drafts)
        rows: dict[Client, list[RequestOutput]] = {}
        for part in output.prompt_logprobs:
            request = self.scheduler.requests.get(part.req_id)
            if request is None:
                continue
            try:
                new_rows = prompt_rows(request, part)
            except Exception as problem:
                self._refusals.give_up(request, problem)
                continue
            if new_rows:
                rows.setdefault(owner_of(request).client, []).extend(new_rows)
        for request, row in self.progress.computed(output.step_id):
            rows.setdefault(owner_of(request).client, []).append(row)
        for req_id, error in output.request_errors.items():
            if req_id != CANARY_ID:
                self.scheduler.fail_request(req_id, error, ErrorCode.COMPUTATION_FAILED)
        results = self.scheduler.update_from_output(output)
        self.quarantine.computed(result.request for result in results)
        for result in results:
            if self.quarantine.is_canary(result.request):
                continue
            owner = owner_of(result.request)
            try:
                row = output_row(result, owner, output)
            except Exception as problem:
                self._refusals.give_up(result.request, problem)
                continue
            rows.setdefault(owner.client, []).append(row)
            if result.finish_reason is not None:
                self._owners.remove(owner.client, owner.request_id)
        self._end_call()
        return {client: StepOutputs(new_rows) for client, new_rows in rows.items()}

    # Reports ------------------------------------------------------------------------------------

    @property
    def has_kv_events(self) -> bool:
        return self._config.cache.enable_kv_events

    def take_kv_events(self) -> list[KVEvent]:
        return self.scheduler.kv.take_events()

    def snapshot_kv_events(self) -> Iterator[KVEvent]:
        """Return events that lead from an empty cache to the present contents, generated lazily."""
        return self.scheduler.kv.snapshot_events()

    @property
    def state(self) -> EngineState:
        if self.facts is None:
            return EngineState.STARTING
        if self.pausing.is_draining:
            return EngineState.DRAINING
        return EngineState.READY if self._has_workers else EngineState.RECOVERING

    @property
    def pause_mode(self) -> PauseMode:
        return self.pausing.mode

    @property
    def is_sleeping(self) -> bool:
        return self.pausing.is_sleeping

    @property
    def is_drained(self) -> bool:
        return self.pausing.is_draining and not self.has_unfinished

    @property
    def is_computing(self) -> bool:
        return bool(self.scheduler.in_flight)

    @property
    def is_preparing(self) -> bool:
        """Whether `schedule` has work left that waits for no message: call it again at once."""
        return self.scheduler.is_preparing

    @property
    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished

    def stats(self) -> EngineStats:
        running_adapters, waiting_adapters = self.adapters.in_use()
        return msgspec.structs.replace(
            scheduler_stats(self.scheduler),
            num_steps=self._num_steps,
            worker_restarts=self._num_worker_restarts,
            num_quarantined=self.quarantine.rejections.num_rejected,
            fenced_frames=self.num_fenced_frames,
            loop_seconds_buckets=list(self.loop_histogram.counts),
            loop_seconds_sum=self.loop_histogram.sum,
            step_tokens_buckets=list(self._step_tokens.counts),
            step_tokens_sum=int(self._step_tokens.sum),
            running_lora_adapters=running_adapters,
            waiting_lora_adapters=waiting_adapters,
        )

    def status(self) -> Status:
        """Return the report that clients get once a second and on each change of state."""
        return Status(
            self.state,
            self.facts,
            self.stats(),
            self.pause_mode,
            self.is_sleeping,
            blocks_address(self._config),
            self.is_loading_anew,
        )


def _origin(client: Client, add: AddRequest) -> str:
    """Return the origin of a request; without one, the client itself counts as the origin."""
    return add.origin or f"client {client[:_MAX_CLIENT_BYTES].hex()}"

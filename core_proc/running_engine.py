"""The engine with adopted workers: requests, steps, pauses, and the quarantine."""

import logging
from collections.abc import Iterable

import msgspec

from core_proc.invariants import check_invariants
from core_proc.kv.offload import Offload
from core_proc.options import SchedulerOptions
from core_proc.outputs.check import InvalidWorkerOutput, check_output
from core_proc.outputs.owners import Client, Owner, Owners, owner_of
from core_proc.outputs.prompt_progress import PromptProgress
from core_proc.outputs.rows import output_row, prompt_rows
from core_proc.pausing import Pausing
from core_proc.preparation.adapters import ADAPTER_PARAM, KILLS_WORKERS, SAME_ID, Adapters
from core_proc.preparation.grammars import MAX_COMPILING, Grammars
from core_proc.recovery.adapter_trials import AdapterTrials
from core_proc.recovery.quarantine import Quarantine
from core_proc.request import Request
from core_proc.scheduler import Scheduler
from core_proc.stats import scheduler_stats
from protocol.adapters import Adapter
from protocol.api_core import (
    AddRequest,
    Control,
    ControlAction,
    ControlDone,
    EngineStats,
    ErrorCode,
    Refused,
    RequestError,
    RequestOutput,
    StepOutputs,
)
from protocol.config import EngineConfig
from protocol.core_worker import (
    AdapterLoaded,
    BlocksFound,
    BlocksLoaded,
    GrammarCompiled,
    LoadAdapter,
    ModelFacts,
    ModelRunnerOutput,
    RankAnswer,
    SchedulerOutput,
    UnloadAdapter,
)
from protocol.message import MAX_TEXT
from protocol.process.turns import Account
from protocol.request_validation import validate_request

CANARY_ID = 2**53 - 1
"""Id of the quarantine's own request; `_next_req_id` never reaches it."""

_MAX_CLIENT_BYTES = 16

log = logging.getLogger("troika.core")


class RunningEngine:
    """Joins the scheduler to clients and workers. It survives the loss of workers."""

    def __init__(
        self,
        config: EngineConfig,
        facts: ModelFacts,
        swap_cost_tokens: float,
        owners: Owners,
        trials: AdapterTrials,
        *,
        offload: Offload | None = None,
    ) -> None:
        self._limits = config.scheduler
        self._takes_adapters = config.lora.enable_lora
        self._checks_invariants = config.run.check_invariants
        self._owners = owners
        self._next_req_id = 1
        self._num_steps = 0
        self._num_worker_restarts = 0
        self.facts = facts
        options = SchedulerOptions.combine(config, facts, swap_cost_tokens)
        self.scheduler = Scheduler(options, offload)
        num_states = facts.num_state_blocks - 1
        if 0 < num_states < config.scheduler.max_num_seqs:
            log.info(
                "max_num_seqs is %d, but there are state blocks for %d requests at a time",
                config.scheduler.max_num_seqs,
                num_states,
            )
        self.grammars = Grammars(self.scheduler)
        self.adapters = Adapters(
            self.scheduler,
            trials,
            self._answer_load,
            max_loras=config.lora.max_loras,
            num_kept=config.lora.num_kept,
            num_taken=config.scheduler.max_num_seqs,
        )
        self.progress = PromptProgress(self.scheduler.requests)
        self.pausing = Pausing(self.scheduler, owners.post)
        self.quarantine = Quarantine(self.scheduler, CANARY_ID, self.adapters.waits_for_others)

    def replace_workers(self, facts: ModelFacts) -> None:
        """Continue with the facts of the workers that replace the lost ones."""
        self.facts = facts
        self._num_worker_restarts += 1

    def lose_workers(self) -> None:
        """Take everything back from the lost workers, for their successors."""
        self.quarantine.workers_lost()
        self.scheduler.recompute_all()
        self.grammars.workers_lost()
        self.adapters.workers_lost()
        self.progress.workers_lost()
        self.pausing.workers_lost()

    def attribute_death(self, now: float, *, is_fault: bool, in_step: bool) -> None:
        """Search for the adapter or request that killed the workers, and reject it if found.

        `is_fault` is true if their own fault killed them, and `in_step` if they were
        computing.
        """
        self.adapters.attribute_death(is_fault=is_fault)
        self._refuse_failures()
        if not (is_fault and in_step):
            return
        culprit = self.quarantine.attribute_crash(now)
        if culprit is not None:
            for request in self.quarantine.reject(culprit, now):
                self.scheduler.abort_request(request.req_id)
                text = "the request has killed its worker twice"
                self._refuse(request, text, ErrorCode.QUARANTINED)

    def add(self, client: Client, add: AddRequest, now: float) -> Refused | None:
        """Queue a request in place of one with its id; returns the refusal, if it is refused."""
        was_accepted = add.resent or self._owners.has(client, add.request_id)
        error = self._why_not(client, add, now, was_accepted=was_accepted)
        self.abort(client, [add.request_id])
        if error is not None:
            return Refused(add.request_id, error)
        req_id, self._next_req_id = self._next_req_id, self._next_req_id + 1
        request = Request(
            req_id,
            add.prompt,
            add.sampling_params,
            outputs=add.output_token_ids,
            priority=add.priority,
            arrival_time=now - add.age_s,
            cache_salt=add.cache_salt,
            adapter_id=0 if add.adapter is None else add.adapter.adapter_id,
            adapter_digest=b"" if add.adapter is None else add.adapter.digest,
            adapter_name="" if add.adapter is None else add.adapter.name,
            tenant=add.tenant,
            origin=_origin(client, add),
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

    def _why_not(
        self, client: Client, add: AddRequest, now: float, *, was_accepted: bool
    ) -> RequestError | None:
        if not was_accepted:
            if self.pausing.is_draining:
                return RequestError(ErrorCode.DRAINING, "the engine is shutting down")
            if (error := self._overload(add.num_prompt_tokens)) is not None:
                return error
            grammar = add.sampling_params.grammar
            account = Account(_origin(client, add), add.tenant)
            if grammar is not None and self.grammars.is_full(grammar, account):
                text = f"its client's share of the {MAX_COMPILING} grammars at a time is used up"
                return RequestError(ErrorCode.OVERLOADED, text)
        adapter_id = 0 if add.adapter is None else add.adapter.adapter_id
        if self.quarantine.refuses(add.prompt, add.sampling_params, now, adapter_id):
            text = "the same request has killed workers; it is refused for ten minutes"
            return RequestError(ErrorCode.QUARANTINED, text)
        if add.adapter is not None and (error := self._why_not_adapter(add.adapter)) is not None:
            return error
        return validate_request(add, self.facts)

    def _why_not_adapter(self, adapter: Adapter) -> RequestError | None:
        if not self._takes_adapters:
            text = "the engine was started without enable_lora"
            return RequestError(ErrorCode.INVALID, text, ADAPTER_PARAM)
        name = f"adapter {adapter.name!r}"
        if self.adapters.refuses(adapter):
            return RequestError(ErrorCode.QUARANTINED, f"{name}: {KILLS_WORKERS}", ADAPTER_PARAM)
        if self.adapters.has_id_conflict(adapter):
            return RequestError(ErrorCode.INVALID, f"{name}: {SAME_ID}", ADAPTER_PARAM)
        return None

    def _overload(self, num_prompt_tokens: int) -> RequestError | None:
        scheduler, limits = self.scheduler, self._limits
        num_waiting, num_tokens = scheduler.num_waiting, scheduler.waiting.num_prompt_tokens
        if num_waiting >= limits.max_num_waiting:
            text = f"{limits.max_num_waiting} requests are waiting already"
        elif num_waiting and num_tokens + num_prompt_tokens > limits.max_waiting_tokens:
            text = f"prompts of {num_tokens} tokens are waiting already"
        else:
            return None
        return RequestError(ErrorCode.OVERLOADED, text)

    def abort(self, client: Client, request_ids: Iterable[int]) -> None:
        for request_id in request_ids:
            req_id = self._owners.remove(client, request_id)
            if req_id is not None:
                self.scheduler.abort_request(req_id)

    def drop_client(self, client: Client, req_ids: Iterable[int]) -> None:
        for req_id in req_ids:
            self.scheduler.abort_request(req_id)
        self.pausing.forget(client)
        self.adapters.forget(client)

    def control(self, client: Client, control: Control) -> None:
        """Handle a request about the whole engine, or about an adapter."""
        if control.action not in (ControlAction.LOAD_ADAPTER, ControlAction.UNLOAD_ADAPTER):
            self.pausing.handle(client, control)
        elif control.adapter is None or not self._takes_adapters:
            self._answer_load(client, control.number, "the engine was started without enable_lora")
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

    def take_adapters(self) -> list[LoadAdapter | UnloadAdapter]:
        """Return the messages about adapters to send to the workers before the next step."""
        is_searching = self.quarantine.is_searching
        messages, unblocked = self.adapters.take_messages(is_searching=is_searching)
        self._unblocked(unblocked)
        return messages

    def answered(self, answer: RankAnswer) -> None:
        """Let the requests that wait for an answer be admitted, or refuse them with its error."""
        match answer:
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
        self._refuse_failures()
        self._check_invariants()

    def _unblocked(self, requests: Iterable[Request]) -> None:
        """Unblock requests that have what they waited for, unless they need something else."""
        for request in requests:
            if not (self.adapters.holds(request) or self.grammars.holds(request)):
                self.quarantine.unblocked(request)

    def schedule(self) -> SchedulerOutput | None:
        self.quarantine.advance()
        step = None if self.adapters.holds_steps else self.scheduler.schedule()
        if step is not None:
            self._num_steps += 1
            self.quarantine.dispatched(step)
            self.progress.dispatched(step)
        self._refuse_failures()
        self._check_invariants()
        return step

    def update(self, output: ModelRunnerOutput) -> dict[Client, StepOutputs]:
        """Process the results of the oldest step in flight; return the outputs for each client."""
        in_flight = self.scheduler.in_flight
        oldest = in_flight[0] if in_flight else None
        num_drafts = self._limits.num_speculative_tokens
        check_output(output, oldest, self.facts.vocab_size, num_drafts)
        rows: dict[Client, list[RequestOutput]] = {}
        for part in output.prompt_logprobs:
            request = self.scheduler.requests.get(part.req_id)
            if request is None:
                continue
            try:
                new_rows = prompt_rows(request, part)
            except Exception as problem:
                self._give_up(request, problem)
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
            except Exception as error:
                self._give_up(result.request, error)
                continue
            rows.setdefault(owner.client, []).append(row)
            if result.finish_reason is not None:
                self._owners.remove(owner.client, owner.request_id)
        self._refuse_failures()
        self._check_invariants()
        return {client: StepOutputs(new_rows) for client, new_rows in rows.items()}

    def _check_invariants(self) -> None:
        if self._checks_invariants:
            check_invariants(self.scheduler)

    def _give_up(self, request: Request, error: Exception) -> None:
        """End a request whose outputs cannot be built; a failed assertion ends the core instead."""
        if isinstance(error, AssertionError):
            raise error
        log.error("outputs of request %d failed", request.req_id, exc_info=error)
        self.scheduler.abort_request(request.req_id)
        self._refuse(request, "the request's output could not be built")

    def _refuse_failures(self) -> None:
        for failure in self.scheduler.take_failures():
            level = logging.DEBUG if failure.code is ErrorCode.INVALID else logging.ERROR
            log.log(level, "request %d failed: %s", failure.request.req_id, failure.error)
            self._refuse(failure.request, failure.error, failure.code, failure.param)

    def _refuse(
        self,
        request: Request,
        why: str,
        code: ErrorCode = ErrorCode.INTERNAL,
        param: str | None = None,
    ) -> None:
        """Send `Refused` to the client of a request that has ended, if it still waits for it."""
        if request.owner is not None and self._owners.waits_for(request):  # a canary has none
            owner = owner_of(request)
            self._owners.remove(owner.client, owner.request_id)
            error = RequestError(code, why[:MAX_TEXT], param)
            self._owners.post(owner.client, Refused(owner.request_id, error))

    def stats(self) -> EngineStats:
        """Return gauges and counters of everything but the loop and the links."""
        return msgspec.structs.replace(
            scheduler_stats(self.scheduler),
            num_steps=self._num_steps,
            worker_restarts=self._num_worker_restarts,
            num_quarantined=self.quarantine.rejections.num_rejected,
        )


def _origin(client: Client, add: AddRequest) -> str:
    """Return where a request comes from: a program that states no origin is one itself."""
    return add.origin or f"client {client[:_MAX_CLIENT_BYTES].hex()}"

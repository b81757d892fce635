"""A real scheduler under any sequence of events; every invariant is checked after each.

The events are in `tests/core/events.py`. As tokens are a pure function of request and
position, a lost, repeated or misplaced one is found at once, whatever happened before.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from core_proc.invariants import check_invariants
from core_proc.kv.offload import Offload
from core_proc.options import SchedulerOptions
from core_proc.preparation.grammars import Grammars
from core_proc.request import Request, RequestStatus
from core_proc.scheduler import Scheduler
from protocol.api_core import PauseMode
from protocol.core_worker import (
    NULL_BLOCK,
    BlocksFound,
    BlocksLoaded,
    CompileGrammar,
    FindBlocks,
    GrammarCompiled,
    LoadBlocks,
    SchedulerOutput,
    StoreBlocks,
)
from protocol.kv_events import AllBlocksCleared, BlocksStored
from protocol.sampling import (
    FinishReason,
    Grammar,
    GrammarKind,
    Pooling,
    PoolingType,
    SamplingParams,
    pooling_params,
)
from tests.core.events import SHARED_HEAD, expected, num_blocks_for, sample
from tests.core.fake_store import FakeStore
from tests.core.harness import make_worker


@dataclass
class Load:
    """Remote KV to write, in the order of the steps."""

    request: Request
    num_tokens: int
    tables: list[list[int]]


class CacheReader:
    """Applies the KV events as a router does."""

    def __init__(self) -> None:
        self._known: set[tuple[bytes, int]] = set()

    def follow(self, scheduler: Scheduler) -> None:
        """Apply new events and compare the contents with the scheduler's snapshot."""
        for event in scheduler.kv.take_events():
            if isinstance(event, AllBlocksCleared):
                self._known.clear()
                continue
            keys = {(block_hash, event.group) for block_hash in event.block_hashes}
            assert len(keys) == len(event.block_hashes)
            if isinstance(event, BlocksStored):
                assert not keys & self._known
                assert len(event.token_ids) == len(keys) * event.block_size
                self._known |= keys
            else:
                assert keys <= self._known
                self._known -= keys
        stored = [e for e in scheduler.kv.snapshot_events() if isinstance(e, BlocksStored)]
        assert self._known == {(h, event.group) for event in stored for h in event.block_hashes}


class Machine:
    """Executes events by name and checks the scheduler's state after each."""

    def __init__(self, options: SchedulerOptions, *, has_store: bool = False) -> None:
        """`has_store`: blocks are also kept outside the worker, if the options allow it."""
        self.options = options
        self._store = FakeStore()
        is_kept = has_store and options.enable_prefix_caching
        self._other_machine = FakeStore()
        """It gets every block, and the store here only some."""
        self._num_writes = 0
        offload = None
        if is_kept:
            offload = Offload(
                [self._store.index], min_load_tokens=1, max_loads=2, reads_machines=True
            )
        self.scheduler = Scheduler(options, offload)
        self.grammars = Grammars(self.scheduler)
        self.num_steps = 0
        self.num_loads = 0
        self.num_remote_loads = 0
        """Of these, loads of what another machine has."""
        self.num_states_loaded = self.num_remote_states_loaded = 0
        self.num_constrained = 0
        """Requests with a grammar that were admitted."""
        self._compiling: list[CompileGrammar] = []
        self._compiled: set[Grammar] = set()
        """Those of the present worker."""
        self._worker = make_worker(options, sample)
        self._pipe: deque[SchedulerOutput | Load | StoreBlocks | LoadBlocks | FindBlocks] = deque()
        self._requests: list[Request] = []
        self._expected: list[tuple[list[int], FinishReason]] = []
        self._delivered: list[list[int]] = []
        self._ended: dict[int, FinishReason] = {}
        self._begun: set[int] = set()
        """Requests that were ever admitted."""
        self._loading: dict[int, Request] = {}
        """Requests, possibly ended, whose blocks a remote load may still write."""
        self._arrived: list[Load | LoadBlocks | FindBlocks] = []
        self._owes_copies = False
        """The next step may swap out the contents of free blocks: no load before it."""
        self._cache_reader = CacheReader()

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    def apply(self, event: str, **drawn: Any) -> None:
        """Execute one of `EVENTS` and check every invariant."""
        action: Callable[..., object] = getattr(self, f"_on_{event}")
        action(**drawn)
        self.check()

    # Requests -----------------------------------------------------------------------------------

    def _on_add(self, **drawn: Any) -> None:
        req_id = len(self._requests)
        prompt = self._prompt(drawn["length"], drawn["shared"], drawn["source"], req_id)
        grammar = drawn["grammar"]
        params = SamplingParams(
            max_tokens=drawn["max_tokens"],
            ignore_eos=drawn["ignore_eos"],
            stop_token_ids=list(drawn["stops"]),
            min_tokens=min(drawn["min_tokens"], drawn["max_tokens"]),
            prompt_logprobs=drawn["prompt_logprobs"],
            grammar=None if grammar is None else Grammar(GrammarKind.REGEX, grammar),
        )
        if drawn["pooling"] is not None:
            params = pooling_params(Pooling(PoolingType(drawn["pooling"])))
        most = min(params.max_tokens, self.options.max_model_len - len(prompt))
        ending = expected(params, req_id, max(most, 1))
        earlier = ending[0][: min(drawn["num_outputs"], len(ending[0]) - 1)]
        request = Request(
            req_id,
            prompt,
            params,
            outputs=earlier,
            priority=drawn["priority"],
            arrival_time=drawn["arrival_time"],
            tenant=drawn["tenant"],
            cache_salt=drawn["salt"],
            adapter_id=drawn["adapter_id"],
            blocks_at="tcp://other:1" if req_id % 3 else "",
        )
        if self._add(request, most, drawn["is_blocked"]):
            self._requests.append(request)
            self._expected.append(ending)
            self._delivered.append(list(earlier))

    def _prompt(self, length: int, shared: int, source: int, req_id: int) -> list[int]:
        """Return a prompt with the common prefix or that of an earlier request and its outputs."""
        head = SHARED_HEAD
        if 0 <= source < len(self._requests):
            head = self._requests[source].token_ids.tolist()
        head = head[: min(shared, length)]
        return head + [1000 * (req_id + 1) + i for i in range(length - len(head))]

    def _add(self, request: Request, most: int, is_blocked: bool) -> bool:
        """Add a request; return whether it was accepted, as it must be if it can ever run."""
        num_computed = request.num_prompt_tokens + most - 1
        size, groups = self.options.block_size, self.options.kv_groups
        num_blocks = num_blocks_for(num_computed, size, groups)
        can_run = most > 0 and num_blocks < self.options.num_blocks
        blocked = RequestStatus.WAITING_FOR_GRAMMAR if is_blocked else None
        grammar = request.sampling_params.grammar
        try:
            if grammar is None:
                self.scheduler.add_request(request, blocked)
            else:
                self.grammars.add(request, grammar)
        except ValueError:
            assert not can_run
            return False
        assert can_run
        return True

    def _pick(self, which: int, *statuses: RequestStatus) -> Request | None:
        requests = list(self.scheduler.requests.values())
        if statuses:
            requests = [request for request in requests if request.status in statuses]
        return requests[which % len(requests)] if requests else None

    def _on_abort(self, which: int) -> None:
        request = self._pick(which)
        if request is not None:
            assert self.scheduler.abort_request(request.req_id) is request
            self._ended[request.req_id] = FinishReason.ABORT
            assert self.scheduler.abort_request(request.req_id) is None

    def _on_fail(self, which: int) -> None:
        request = self._pick(which)
        if request is not None:
            self.scheduler.fail_request(request.req_id, "it failed")
            self._ended[request.req_id] = FinishReason.ERROR
            failures = self.scheduler.take_failures()
            assert [(f.request, f.error) for f in failures] == [(request, "it failed")]

    def _on_preempt(self, which: int) -> None:
        request = self._pick(which, RequestStatus.RUNNING)
        if request is not None:
            self.scheduler.preempt(request)
            self._owes_copies = True

    def _on_unblock(self, which: int) -> None:
        """End a trial, or what another request waits for; a grammar takes its own way."""
        blocked = RequestStatus.WAITING_FOR_GRAMMAR, RequestStatus.WAITING_FOR_TRIAL
        request = self._pick(which, *blocked)
        if request is None:
            return
        if request.sampling_params.grammar is not None:
            was_held = request.status is RequestStatus.WAITING_FOR_TRIAL
            self.scheduler.unblock(request.req_id, RequestStatus.WAITING_FOR_TRIAL)
            assert (request.status is RequestStatus.WAITING_FOR_GRAMMAR) != was_held
        else:
            self.scheduler.unblock(request.req_id)
            assert request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)

    def _on_compile(self, which: int, error: str) -> None:
        """Answer one of the grammars that the worker compiles, in any order."""
        self._compiling += self.grammars.take_messages()
        if not self._compiling:
            return
        message = self._compiling.pop(which % len(self._compiling))
        requests = self.scheduler.requests.values()
        of_it = [r for r in requests if r.sampling_params.grammar == message.grammar]
        if not error:
            self._compiled.add(message.grammar)
        unblocked = self.grammars.compiled(GrammarCompiled(message.grammar_id, error))
        failures = self.scheduler.take_failures()
        if error:
            assert {failure.request for failure in failures} == set(of_it)
            assert {failure.error for failure in failures} <= {error}
            self._ended |= dict.fromkeys((r.req_id for r in of_it), FinishReason.ERROR)
        else:
            assert failures == []
            assert set(unblocked) <= set(of_it)
        blocked = RequestStatus.WAITING_FOR_GRAMMAR
        assert not any(request.status is blocked for request in of_it)

    def _on_hold(self, which: int) -> None:
        request = self._pick(
            which, RequestStatus.RUNNING, RequestStatus.WAITING, RequestStatus.PREEMPTED
        )
        if request is None:
            return
        if request.status is RequestStatus.RUNNING:
            self.scheduler.preempt(request)
            self._owes_copies = True
        assert self.scheduler.hold(request)

    # Loads --------------------------------------------------------------------------------------

    def _on_begin_load(self, which: int, share: float) -> None:
        request = self._pick(which, RequestStatus.WAITING)
        kv = self.scheduler.kv
        if request is None or kv.states is not None or not kv.may_read_cache(request):
            return
        size = self.options.block_size
        num_tokens = int(share * (request.num_tokens // size)) * size
        if num_tokens == 0 or request.num_cached_tokens is not None or self._owes_copies:
            return
        if self.scheduler.loads.hold(request, [[] for _ in kv.groups], num_tokens):
            self.num_loads += 1
            self._loading[request.req_id] = request
            tables = [table.copy() for table in request.block_tables]
            self._pipe.append(Load(request, num_tokens, tables))

    def _on_end_load(self, which: int, share: float) -> None:
        self._bring_loads()
        if self._arrived:
            load = self._arrived.pop(which % len(self._arrived))
            if isinstance(load, FindBlocks):
                self._answer(load, share)
                return
            if isinstance(load, LoadBlocks):
                self._end_blocks(load, share)
                return
            size = self.options.block_size
            num_arrived = int(share * (load.num_tokens // size)) * size
            self._end_load(load, num_arrived)

    def _end_load(self, load: Load, num_arrived: int) -> None:
        del self._loading[load.request.req_id]
        self.scheduler.loads.end(load.request, num_arrived)
        assert load.request.status is not RequestStatus.WAITING_FOR_REMOTE_KV

    def _end_blocks(self, load: LoadBlocks, share: float) -> None:
        """Answer a load from the store, of which some blocks are gone."""
        request = self._loading.pop(load.req_id)
        is_there = load.state_key not in self._store.index
        has_state = share > 0 and self._store.read_state(self._worker, load, self._other_machine)
        most = int(share * len(load.keys)) if has_state or not load.state_key else 0
        num_blocks = self._store.read(self._worker, load, most, self._other_machine)
        self.num_states_loaded += has_state
        self.num_remote_states_loaded += has_state and is_there
        answer = BlocksLoaded(
            load.req_id,
            num_blocks,
            has_state=has_state,
            has_remote_state=has_state and is_there,
        )
        self.scheduler.blocks_loaded(answer)
        assert request.status is not RequestStatus.WAITING_FOR_REMOTE_KV

    def _answer(self, question: FindBlocks, share: float) -> None:
        """Answer with what the other machine has, wrongly, or not at all."""
        index = self._other_machine.index
        are_there = bytes(share < 1.0 or key in index for key in question.keys)
        self.scheduler.blocks_found(BlocksFound(question.req_id, are_there if share else b""))

    def _bring_loads(self) -> None:
        """Let the worker do what stands before the next step."""
        while self._pipe and not isinstance(load := self._pipe[0], SchedulerOutput):
            self._pipe.popleft()
            if isinstance(load, StoreBlocks):
                self._num_writes += 1
                self._other_machine.write(self._worker, load)
                if self._num_writes % 3 == 0:
                    self._store.write(self._worker, load)
                continue
            if isinstance(load, Load):
                token_ids = load.request.token_ids[: load.num_tokens].tolist()
                self._worker.write_from_outside(token_ids, load.tables)
            self._arrived.append(load)

    def _take_transfers(self) -> None:
        for transfer in self.scheduler.take_transfers():
            self._pipe.append(transfer)
            if isinstance(transfer, LoadBlocks):
                self._loading[transfer.req_id] = self.scheduler.requests[transfer.req_id]
                self.num_loads += 1
                self.num_remote_loads += bool(transfer.source)

    # Steps --------------------------------------------------------------------------------------

    def _on_schedule(self) -> bool:
        """Schedule a step; return whether there was one."""
        message = self.scheduler.schedule()
        assert self.scheduler.take_failures() == [], "the scheduler raised"
        if message is None:
            self._take_transfers()
            return False
        self.num_steps += 1
        self._owes_copies = False
        self._check_message(message)
        self._pipe.append(message)
        self._take_transfers()
        return True

    def _on_update(self) -> bool:
        """Process the output of a step; return whether one was in flight."""
        self._bring_loads()
        if not self._pipe:
            return False
        message = self._pipe.popleft()
        assert isinstance(message, SchedulerOutput)
        step_id = message.step_id
        times_ns = (1_000_000 + 7_919 * (step_id % 97), 200_000 * (step_id % 3), step_id % 5)
        self._worker.times_ns = times_ns
        for result in self.scheduler.update_from_output(self._worker.execute(message)):
            req_id = result.request.req_id
            assert req_id not in self._ended
            position = len(self._delivered[req_id])
            count = len(result.new_token_ids)
            assert result.new_token_ids == self._expected[req_id][0][position : position + count]
            self._delivered[req_id] += result.new_token_ids
            if result.finish_reason is not None:
                assert (self._delivered[req_id], result.finish_reason) == self._expected[req_id]
                self._ended[req_id] = result.finish_reason
        assert self.scheduler.take_failures() == []
        return True

    def _on_work(self, rounds: int) -> None:
        """Run some steps with the largest number in flight."""
        for _ in range(rounds):
            while self._on_schedule():
                pass
            self._on_update()

    def _check_message(self, message: SchedulerOutput) -> None:
        options = self.options
        is_elastic = options.elastic_token_budget
        budget = options.max_num_batched_tokens if is_elastic else options.token_budget
        total = message.total_num_scheduled_tokens
        assert total or message.preempted_req_ids or message.finished_req_ids
        mode = self.scheduler.pause_mode
        assert total <= (0 if mode is PauseMode.PAUSED_ALL else budget)
        admitted = {new.req_id for new in message.scheduled_new_reqs}
        if mode is PauseMode.PAUSED_NEW:
            assert all(i in self._begun or self._delivered[i] for i in admitted)
        self._begun |= admitted
        for new in message.scheduled_new_reqs:
            grammar = new.sampling_params.grammar
            assert grammar is None or grammar in self._compiled, "its grammar is not ready"
            self.num_constrained += grammar is not None
            pooling = new.sampling_params.pooling
            if pooling is not None and pooling.type is PoolingType.MEAN:
                assert new.num_cached_tokens == new.num_computed_tokens == 0
        counts = message.num_scheduled_tokens.values()
        if not is_elastic and not options.long_prefill_token_threshold_adaptive:
            assert max(counts, default=0) <= (options.long_prefill_token_threshold or budget)
        self._check_partial_prefills()

    def _check_partial_prefills(self) -> None:
        partial = [r for r in self.scheduler.running if r.num_computed_tokens < r.num_tokens - 1]
        threshold = self.options.long_prefill_token_threshold
        num_long = sum(request.num_prompt_tokens > threshold for request in partial)
        assert len(partial) <= (self.options.max_num_partial_prefills or len(partial))
        assert num_long <= (self.options.max_long_partial_prefills or num_long)

    # Disturbances -------------------------------------------------------------------------------

    def _on_disturb(self, kind: str) -> None:
        getattr(self, f"_{kind}")()

    def _resume(self) -> None:
        self.scheduler.resume()

    def _pause_new(self) -> None:
        self.scheduler.pause(PauseMode.PAUSED_NEW)

    def _pause_all(self) -> None:
        self.scheduler.pause(PauseMode.PAUSED_ALL)

    def _reset(self) -> None:
        assert self.scheduler.reset_prefix_cache() == (not self._holders())

    def _reset_all(self) -> None:
        assert self.scheduler.reset_prefix_cache(True) != bool(self._loading)
        assert self._loading or self.scheduler.kv.num_free_blocks == self.options.num_blocks - 1

    def _sleep(self) -> None:
        """The worker releases its memory once it has been sent the end of every request."""
        assert self.scheduler.sleep() != bool(self._loading)
        if self._loading:
            return
        while self._on_schedule() or self._on_update():
            pass
        self._worker.sleep()

    def _lose(self) -> None:
        """The worker dies with all steps in flight."""
        self._pipe.clear()
        self.scheduler.recompute_all()
        self.grammars.workers_lost()
        self._compiling.clear()
        self._compiled.clear()
        self._owes_copies = False
        for req_id, request in self._loading.items():
            self.scheduler.loads.end(request, 0)  # the loader notices late
            if self.scheduler.offload is not None:
                self.scheduler.blocks_loaded(BlocksLoaded(req_id, 0))
                self.scheduler.blocks_found(BlocksFound(req_id, b"\1"))
        self._loading.clear()
        self._arrived.clear()
        self._worker = make_worker(self.options, sample)

    # Checks -------------------------------------------------------------------------------------

    def _check_draft_limits(self) -> None:
        """The worker knows every limit that was sent, and assumes the most for a new request."""
        changed = self.scheduler.speculation.limits.changed
        for request in self.scheduler.running:
            if request.req_id not in changed:
                assert self._worker.mirror[request.req_id].draft_limit == request.draft_limit

    def check(self) -> None:
        """Check the scheduler's state in itself, against the tables and against the events."""
        check_invariants(self.scheduler)
        self._check_owners()
        if not self._pipe and self.options.num_speculative_tokens:
            self._check_draft_limits()
        for request in self.scheduler.requests.values():
            assert request.sampling_params.pooling is None or request.swapped_out is None
        assert set(self.scheduler.requests) == set(range(len(self._requests))) - set(self._ended)
        if self.options.enable_kv_events:
            self._cache_reader.follow(self.scheduler)

    def _check_owners(self) -> None:
        """Assert that a block is in two tables only if both have the same tokens up to its end."""
        owners: dict[int, tuple[int, int, Request]] = {}
        for request in self._holders():
            for group, table in enumerate(self.scheduler.kv.kv_tables(request.block_tables)):
                for index, block_id in enumerate(table):
                    if block_id == NULL_BLOCK:
                        continue
                    owner = owners.setdefault(block_id, (group, index, request))
                    if owner[2] is not request:
                        assert owner[:2] == (group, index)
                        self._check_sharing(request, owner[2], index)
                    else:
                        assert owner[:2] == (group, index)
        assert len(owners) + self.scheduler.kv.num_free_blocks == self.options.num_blocks - 1

    def _holders(self) -> list[Request]:
        return [*self.scheduler.running, *self._loading.values()]

    def _check_sharing(self, one: Request, other: Request, index: int) -> None:
        end = (index + 1) * self.options.block_size
        assert end <= one.num_tokens
        assert one.token_ids[:end] == other.token_ids[:end]
        assert (one.cache_salt, one.adapter_id) == (other.cache_salt, other.adapter_id)

    def _end_loads(self) -> None:
        """Answer all loads, which have brought everything."""
        self._bring_loads()
        arrived, self._arrived = self._arrived, []
        for load in arrived:
            if isinstance(load, Load):
                self._end_load(load, load.num_tokens)
            elif isinstance(load, FindBlocks):
                self._answer(load, 1.0)
            else:
                self._end_blocks(load, 1.0)

    def finish(self, limit: int = 20_000) -> None:
        """Run all requests to their ends; assert that all have ended and nothing is left."""
        self.scheduler.resume()
        while self._on_update():
            pass
        self._end_loads()
        for request in self.scheduler.requests.values():
            self.scheduler.unblock(request.req_id, RequestStatus.WAITING_FOR_TRIAL)
            if request.sampling_params.grammar is None:
                self.scheduler.unblock(request.req_id)
        self._run_to_rest(limit)  # what waits for a grammar stays
        self._on_compile(0, "")
        while self._compiling:
            self._on_compile(0, "")
        self._run_to_rest(limit)
        self.check()
        assert self.scheduler.requests == {}, "stuck, or not done within the limit"
        assert set(self._ended) == set(range(len(self._requests)))
        assert self._worker.mirror == {}
        assert self.scheduler.kv.num_free_blocks == self.options.num_blocks - 1
        assert self.scheduler.swapper.num_free_blocks == self.options.num_host_blocks
        assert self.scheduler.swapper.num_free_states == self.options.num_host_state_blocks
        assert self.scheduler.kv.usage == 0.0
        if (states := self.scheduler.kv.states) is not None:
            assert states.usage == 0.0
            assert states.pool.num_free == self.options.num_state_blocks - 1

    def _run_to_rest(self, limit: int) -> None:
        for _ in range(limit):
            has_moved = self._on_schedule() or self._on_update()
            if not has_moved and not self._arrived:
                break
            self._end_loads()  # a load ends whatever the steps do, which may lack its blocks

"""A real scheduler under any sequence of events, with all that must hold checked after each.

Both the property tests and the soak draw from the tables here: which options there are, which
requests, which events. Tokens are a pure function of request and position, so a token that is lost,
repeated or out of order shows at once, whatever has happened in between.
"""

import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from core_proc.block_pool import NULL_BLOCK
from core_proc.invariants import check_invariants
from core_proc.options import SchedulerOptions
from core_proc.request import Request, RequestStatus
from core_proc.scheduler import Scheduler
from protocol.api_core import PauseMode
from protocol.core_worker import KVGroup, SchedulerOutput
from protocol.kv_events import AllBlocksCleared, BlocksStored
from protocol.sampling import FinishReason, SamplingParams
from tests.core.harness import EOS, make_worker

STOP_TOKEN = 5
MAX_PROMPT = 40
MAX_OUTPUTS = 24
SHARED_HEAD = list(range(10, 10 + MAX_PROMPT))

Values = Mapping[str, Sequence[object]]
"""Names, and the values of which one is drawn for each; the first is the plainest."""

OPTIONS: Values = {
    "block_size": (4, 1, 2, 16),
    "room": (1.0, 0.6, 0.3, 1.5, 4.0),
    "windows": ((None,), (None,), (8,), (None, 8), (5, 17)),
    "num_host_blocks": (0, 0, 7, 60),
    "swap_cost_tokens": (0.0, 0.5, 1e9),
    "max_model_len": (64, 24, 200),
    "max_num_seqs": (3, 1, 2, 8),
    "max_num_batched_tokens": (20, 3, 8, 64),
    "max_num_scheduled_tokens": (None, None, 3, 12),
    "enable_chunked_prefill": (True, True, False),
    "long_prefill_token_threshold": (0, 0, 1, 5),
    "long_prefill_token_threshold_adaptive": (False, False, True),
    "max_num_partial_prefills": (0, 0, 1, 2),
    "max_long_partial_prefills": (0, 0, 1),
    "elastic_token_budget": (False, False, True),
    "policy": ("fcfs", "priority", "shortest", "fair"),
    "tenant_weights": ({}, {"a": 3.0}),
    "preempt_for_priority": (False, True),
    "victim_choice": ("policy", "cheapest"),
    "enable_prefix_caching": (True, True, False),
    "enable_kv_events": (False, True),
    "scheduler_reserve_full_isl": (True, False),
    "watermark": (0.0, 0.0, 0.1),
}
ARRIVAL: Values = {
    "length": (5, 1, 2, 12, 17, 25, 33, MAX_PROMPT),
    "shared": (0, 3, 8, 16, 33),
    "source": (-1, 0, 1, 2),
    "num_outputs": (0, 0, 0, 1, 5),
    "max_tokens": (3, 1, 2, 9, MAX_OUTPUTS),
    "stops": ((), (), (STOP_TOKEN,)),
    "ignore_eos": (True, False),
    "min_tokens": (0, 0, 4),
    "prompt_logprobs": (None, None, None, 0),
    "priority": (0, 1, 2),
    "arrival_time": (0.0, 1.0, 2.0),
    "tenant": ("", "a", "b"),
    "salt": ("", "", "salt"),
    "adapter_id": (0, 0, 1),
    "is_blocked": (False, False, False, True),
}
WHICH = range(6)
EVENTS: dict[str, tuple[int, Values]] = {
    "add": (8, ARRIVAL),
    "work": (6, {"rounds": (1, 2, 4, 8)}),
    "schedule": (4, {}),
    "update": (4, {}),
    "abort": (1, {"which": WHICH}),
    "fail": (1, {"which": WHICH}),
    "preempt": (1, {"which": WHICH}),
    "unblock": (1, {"which": WHICH}),
    "begin_load": (1, {"which": WHICH, "share": (1.0, 0.5)}),
    "end_load": (1, {"which": WHICH, "share": (1.0, 0.5, 0.0)}),
    "disturb": (
        2,
        {"kind": ("resume", "reset", "reset_all", "pause_new", "pause_all", "sleep", "lose")},
    ),
}
"""Weight for a driver that draws at random, and what each event takes."""


def make_options(drawn: Mapping[str, object], max_steps_in_flight: int) -> SchedulerOptions:
    """Complete a draw of `OPTIONS` to a consistent whole.

    `room` is the pool's size in requests of the greatest length.
    """
    settings: dict[str, object] = dict(drawn)
    block_size, max_model_len = _integers(drawn, "block_size", "max_model_len")
    chunk = max(_integers(drawn, "max_num_batched_tokens", "max_num_scheduled_tokens"))
    room, windows = drawn["room"], drawn["windows"]
    assert isinstance(room, float)
    assert isinstance(windows, tuple)
    groups = tuple(make_group(window, chunk, block_size) for window in windows)
    del settings["room"], settings["windows"]
    if not settings["long_prefill_token_threshold"]:
        settings["max_long_partial_prefills"] = 0
    longest = min(MAX_PROMPT + MAX_OUTPUTS, max_model_len) - 1
    settings["num_blocks"] = 2 + int(room * num_blocks_for(longest, block_size, groups))
    return SchedulerOptions(
        kv_groups=groups,
        max_steps_in_flight=max_steps_in_flight,
        eos_token_ids=(EOS,),
        **settings,  # type: ignore[arg-type]
    )


def _integers(drawn: Mapping[str, object], *names: str) -> list[int]:
    values = [drawn[name] or 0 for name in names]
    assert all(isinstance(value, int) for value in values)
    return values  # type: ignore[return-value]


def make_group(window: int | None, chunk: int, block_size: int) -> KVGroup:
    """Describe a group: at most the window and a chunk lie in its blocks, wherever they begin."""
    if window is None:
        return KVGroup()
    return KVGroup(window, 1 - (-(window + chunk - 2) // block_size))


def num_blocks_for(num_tokens: int, block_size: int, groups: Sequence[KVGroup]) -> int:
    """Blocks that a request of so many computed tokens holds at most."""
    num_blocks = -(-num_tokens // block_size)
    return sum(min(num_blocks, group.max_blocks or num_blocks) for group in groups)


def sample(req_id: int, position: int) -> int:
    """One token in 24 is EOS, one a frequent stop token."""
    value = zlib.crc32(b"%d:%d" % (req_id, position)) % 24
    return EOS if value == 0 else STOP_TOKEN if value == 1 else 100 + value


def expected(params: SamplingParams, req_id: int, most: int) -> tuple[list[int], FinishReason]:
    """Work out all outputs of a request that is left alone, and why it ends."""
    tokens: list[int] = []
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else {EOS})
    while True:
        tokens.append(sample(req_id, len(tokens)))
        if tokens[-1] in stops and len(tokens) >= params.min_tokens:
            return tokens, FinishReason.STOP
        if len(tokens) == most:
            return tokens, FinishReason.LENGTH


@dataclass
class Load:
    """KV that comes from elsewhere, in the order of the steps."""

    request: Request
    num_tokens: int
    tables: list[list[int]]


class CacheReader:
    """Follows the KV events as a router would."""

    def __init__(self) -> None:
        self._known: set[tuple[bytes, int]] = set()

    def follow(self, scheduler: Scheduler) -> None:
        """Apply the news and compare what is known with the scheduler's snapshot."""
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
    """Takes events by name; every one leaves the scheduler in a state that was checked."""

    def __init__(self, options: SchedulerOptions) -> None:
        self.options = options
        self.scheduler = Scheduler(options)
        self.num_steps = 0
        self.num_loads = 0
        """Of remote KV, begun."""
        self._worker = make_worker(options, sample)
        self._pipe: deque[SchedulerOutput | Load] = deque()
        self._requests: list[Request] = []
        self._expected: list[tuple[list[int], FinishReason]] = []
        self._delivered: list[list[int]] = []
        self._ended: dict[int, FinishReason] = {}
        self._loading: dict[int, Request] = {}
        """Whose blocks somebody else may write, though the request may have ended."""
        self._arrived: list[Load] = []
        self._cache_reader = CacheReader()

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    def apply(self, event: str, **drawn: object) -> None:
        """Let one of `EVENTS` happen and check everything."""
        action: Callable[..., object] = getattr(self, f"_on_{event}")
        action(**drawn)
        self.check()

    # Requests -----------------------------------------------------------------------------------

    def _on_add(self, *, num_outputs: int, is_blocked: bool, **drawn: object) -> None:
        req_id = len(self._requests)
        prompt = self._prompt(drawn, req_id)
        params = SamplingParams(
            max_tokens=drawn["max_tokens"],  # type: ignore[arg-type]
            ignore_eos=drawn["ignore_eos"],  # type: ignore[arg-type]
            stop_token_ids=list(drawn["stops"]),  # type: ignore[call-overload]
            min_tokens=min(drawn["min_tokens"], drawn["max_tokens"]),  # type: ignore[type-var]
            prompt_logprobs=drawn["prompt_logprobs"],  # type: ignore[arg-type]
        )
        most = min(len(prompt) + params.max_tokens, self.options.max_model_len) - len(prompt)
        ending = expected(params, req_id, max(most, 1))
        earlier = ending[0][: min(num_outputs, len(ending[0]) - 1)]
        request = Request(
            req_id,
            prompt,
            params,
            output_token_ids=earlier,
            priority=drawn["priority"],  # type: ignore[arg-type]
            arrival_time=drawn["arrival_time"],  # type: ignore[arg-type]
            tenant=drawn["tenant"],  # type: ignore[arg-type]
            cache_salt=drawn["salt"],  # type: ignore[arg-type]
            adapter_id=drawn["adapter_id"],  # type: ignore[arg-type]
        )
        size, groups = self.options.block_size, self.options.kv_groups
        num_blocks = num_blocks_for(len(prompt) + most - 1, size, groups)
        if most < 1 or num_blocks > self.options.num_blocks - 1:
            try:
                self.scheduler.add_request(request)
            except ValueError:
                return
            raise AssertionError(f"{request.num_tokens} tokens can never be computed")
        blocked = RequestStatus.WAITING_FOR_GRAMMAR if is_blocked else None
        self.scheduler.add_request(request, blocked)
        self._requests.append(request)
        self._expected.append(ending)
        self._delivered.append(list(earlier))

    def _prompt(self, drawn: Mapping[str, object], req_id: int) -> list[int]:
        """Begin like all or like an earlier request, its outputs included, and go on alone."""
        length, shared, source = _integers(drawn, "length", "shared", "source")
        head = SHARED_HEAD
        if 0 <= source < len(self._requests):
            head = self._requests[source].token_ids.tolist()
        head = head[: min(shared, length)]
        return head + [1000 * (req_id + 1) + i for i in range(length - len(head))]

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

    def _on_unblock(self, which: int) -> None:
        request = self._pick(which, RequestStatus.WAITING_FOR_GRAMMAR)
        if request is not None:
            self.scheduler.unblock(request.req_id)
            assert request.status is RequestStatus.WAITING

    # Loads --------------------------------------------------------------------------------------

    def _on_begin_load(self, which: int, share: float) -> None:
        request = self._pick(which, RequestStatus.WAITING)
        if request is None or not self.scheduler.kv.may_read_cache(request):
            return
        size = self.options.block_size
        num_tokens = int(share * (request.num_tokens // size)) * size
        if num_tokens == 0 or request.num_cached_tokens is not None:
            return
        tables = self.scheduler.begin_remote_load(request.req_id, num_tokens)
        if tables is not None:
            self.num_loads += 1
            self._loading[request.req_id] = request
            self._pipe.append(Load(request, num_tokens, [table.copy() for table in tables]))

    def _on_end_load(self, which: int, share: float) -> None:
        self._bring_loads()
        if self._arrived:
            load = self._arrived.pop(which % len(self._arrived))
            size = self.options.block_size
            num_arrived = int(share * (load.num_tokens // size)) * size
            self._end_load(load, num_arrived)

    def _end_load(self, load: Load, num_arrived: int) -> None:
        del self._loading[load.request.req_id]
        self.scheduler.end_remote_load(load.request.req_id, num_arrived)
        assert load.request.status is not RequestStatus.WAITING_FOR_REMOTE_KV

    def _bring_loads(self) -> None:
        while self._pipe and isinstance(load := self._pipe[0], Load):
            self._pipe.popleft()
            token_ids = load.request.token_ids[: load.num_tokens].tolist()
            self._worker.write_from_outside(token_ids, load.tables)
            self._arrived.append(load)

    # Steps --------------------------------------------------------------------------------------

    def _on_schedule(self) -> bool:
        """Returns whether there was anything to send."""
        message = self.scheduler.schedule()
        assert self.scheduler.take_failures() == [], "the scheduler raised"
        if message is None:
            return False
        self.num_steps += 1
        self._check_message(message)
        self._pipe.append(message)
        return True

    def _on_update(self) -> bool:
        """Returns whether a step's output was due."""
        self._bring_loads()
        if not self._pipe:
            return False
        message = self._pipe.popleft()
        assert isinstance(message, SchedulerOutput)
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
        """Keep the pipe full for a while."""
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
        assert total <= (0 if mode is PauseMode.PAUSED_ALL else max(budget, options.token_budget))
        assert mode is PauseMode.RUNNING or not message.scheduled_new_reqs
        counts = message.num_scheduled_tokens.values()
        if not is_elastic and not options.long_prefill_token_threshold_adaptive:
            assert max(counts, default=0) <= (options.long_prefill_token_threshold or budget)

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
        is_idle = self.scheduler.kv.num_free_blocks == self.options.num_blocks - 1
        assert self.scheduler.reset_prefix_cache() == is_idle

    def _reset_all(self) -> None:
        assert self.scheduler.reset_prefix_cache(True) != bool(self._loading)
        assert self._loading or self.scheduler.kv.num_free_blocks == self.options.num_blocks - 1

    def _sleep(self) -> None:
        """The worker gives its memory back once it has been told that everybody left."""
        assert self.scheduler.sleep() != bool(self._loading)
        if self._loading:
            return
        while self._on_schedule() or self._on_update():
            pass
        self._worker.sleep()

    def _lose(self) -> None:
        """The worker dies with all steps that are under way."""
        self._pipe.clear()
        self.scheduler.recompute_all()
        for req_id in self._loading:
            self.scheduler.end_remote_load(req_id, 0)  # whoever loaded finds out late
        self._loading.clear()
        self._arrived.clear()
        self._worker = make_worker(self.options, sample)

    # Checks -------------------------------------------------------------------------------------

    def check(self) -> None:
        """Compare the scheduler's books with themselves, with the tables, and with the events."""
        check_invariants(self.scheduler)
        self._check_owners()
        assert set(self.scheduler.requests) == set(range(len(self._requests))) - set(self._ended)
        if self.options.enable_kv_events:
            self._cache_reader.follow(self.scheduler)

    def _check_owners(self) -> None:
        """A block lies in two tables only where both have the same tokens up to its end."""
        owners: dict[int, tuple[int, int, Request]] = {}
        for request in self._holders():
            for group, table in enumerate(request.block_tables):
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

    def finish(self, limit: int = 20_000) -> None:
        """Let everybody go on and run to the end: all have ended, and nothing is left behind."""
        self.scheduler.resume()
        while self._on_update():
            pass
        for load in self._arrived:
            self._end_load(load, load.num_tokens)
        for req_id in self.scheduler.requests:
            self.scheduler.unblock(req_id)
        for _ in range(limit):
            if not self._on_schedule() and not self._on_update():
                break
        self.check()
        assert self.scheduler.requests == {}, "stuck, or not done within the limit"
        assert set(self._ended) == set(range(len(self._requests)))
        assert self._worker.mirror == {}
        assert self.scheduler.kv.num_free_blocks == self.options.num_blocks - 1
        assert self.scheduler.swapper.num_free_blocks == self.options.num_host_blocks
        assert self.scheduler.kv.usage == 0.0


def draw(values: Values, choose: Callable[[Sequence[object]], object]) -> dict[str, object]:
    """Draw one value for each name."""
    return {name: choose(choices) for name, choices in values.items()}


EVENT_NAMES = list(chain.from_iterable([name] * weight for name, (weight, _) in EVENTS.items()))

"""Requests whose KV is being loaded: another process writes to blocks held for them."""

import heapq
from collections.abc import Iterable
from enum import Enum, auto
from functools import partial
from itertools import count
from typing import NamedTuple

from core_proc.kv.kv_cache import KVCacheManager
from core_proc.kv.offload import Offload
from core_proc.kv.tables import Tables
from core_proc.policy import Key, Policy
from core_proc.request import Request, RequestStatus
from core_proc.scheduling.admission import Admission
from core_proc.scheduling.request_queues import RequestQueues
from protocol.core_worker import BlocksFound, BlocksLoaded

_LOOKED_UP_AT_ONCE = 2**14
"""Number of tokens of requests that are looked up and set aside in a step; takes 1 to 2 ms."""

_MAX_STALE_ROWS = 64
"""Stale rows that the heap may hold, beyond one for each live row, before it is rebuilt."""


class Outcome(Enum):
    """The outcome for a waiting request that might load KV."""

    COMPUTE = auto()
    """The request will be computed, from its hits in the prefix cache on."""
    WAIT = auto()
    """The request waits for its stored blocks, or until they can be loaded; others are admitted."""
    LATER = auto()
    """The request has not been looked up: this step has looked up enough."""


class _Stored(NamedTuple):
    """The part of a request that need not be computed after a load."""

    hits: Tables
    """Blocks that are not read."""
    num_blocks: int
    num_cached: int
    """Number of leading blocks that need not be computed even without the load."""


class Loads:
    """The loads in progress, which hold blocks even if their requests have ended."""

    def __init__(
        self,
        kv: KVCacheManager,
        queues: RequestQueues,
        admission: Admission,
        policy: Policy,
        offload: Offload | None = None,
    ) -> None:
        """`offload` is the source of loads; None: only `hold` begins a load."""
        self._kv = kv
        self._queues = queues
        self._admission = admission
        self._policy = policy
        self._offload = offload
        self._requests: dict[int, Request] = {}
        self._aside: dict[int, tuple[int, Request]] = {}
        """Requests with stored blocks that wait for a place, with their rows' numbers."""
        self._rows: list[tuple[Key, int, int]] = []
        """A heap of their rows, in the policy's order: key, number, id. Some rows are stale."""
        self._row_numbers = count()
        self._num_looked_up = 0
        """Tokens of requests that were set aside in this step."""
        self._asking: dict[int, Request] = {}
        """Requests that wait for another machine's answer about their blocks."""

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request: Request) -> bool:
        return request.req_id in self._requests

    @property
    def requests(self) -> Iterable[Request]:
        return self._requests.values()

    @property
    def num_to_run(self) -> int:
        """Number of requests that will run after their loads; their slots are kept for them."""
        return sum(not request.is_finished for request in self._requests.values())

    @property
    def num_in_slots(self) -> int:
        """Number of requests that run, or will run when their blocks have been loaded."""
        return len(self._queues.running) + self.num_to_run

    def begin(self, request: Request) -> Outcome:
        """Load the stored blocks of the request that would be admitted next, if that pays.

        A request without a slot is not looked up: it stays at the front, and may get a slot by
        preemption.
        """
        offload = self._offload
        if offload is None or not request.may_load or self._admission.still_refuses(request):
            return Outcome.COMPUTE
        if not self._admission.has_slot(self.num_in_slots):
            return Outcome.COMPUTE
        if self._num_looked_up >= _LOOKED_UP_AT_ONCE:
            return Outcome.LATER
        if offload.remote.may_ask(request) and self._ask(request, offload):
            return Outcome.WAIT
        stored = self._find_stored(request, offload)
        if stored is None:
            request.may_load = False  # admission does not ask again
            return Outcome.COMPUTE
        if offload.num_places == 0:
            self._set_aside(request)
            return Outcome.WAIT
        headroom = self._admission.headroom(len(self._queues.running))
        num_tokens = stored.num_blocks * self._kv.block_size
        if not self.hold(request, stored.hits, num_tokens, headroom):
            return Outcome.COMPUTE
        request.may_load = False
        num_hit, num_cached = len(stored.hits[0]), stored.num_cached
        size, has_state = self._kv.block_size, self._kv.states is not None
        offload.begin(request, num_hit, size, num_cached=num_cached, has_state=has_state)
        return Outcome.WAIT

    def _set_aside(self, request: Request) -> None:
        self._num_looked_up += request.num_tokens
        self._queues.change_waiting(request, RequestStatus.WAITING_FOR_REMOTE_KV)
        number = next(self._row_numbers)
        self._aside[request.req_id] = number, request
        heapq.heappush(self._rows, (self._policy.order(request), number, request.req_id))

    def begin_step(self) -> None:
        """Return requests to the queue, to be admitted or loaded, for each free place for loads."""
        self._num_looked_up = 0
        num_places = 0 if self._offload is None else self._offload.num_places
        while self._rows and num_places > 0:
            row = heapq.heappop(self._rows)
            if not self._is_stale(row):
                num_places -= 1
                self._take_back(row[2])

    def _is_stale(self, row: tuple[Key, int, int]) -> bool:
        _, number, req_id = row
        return req_id not in self._aside or self._aside[req_id][0] != number

    def _take_back(self, req_id: int) -> None:
        """Return a request that was set aside to its place in the queue."""
        _, request = self._aside.pop(req_id)
        self._queues.unblock(request)

    def drop(self, request: Request) -> None:
        """Forget a request that has ended."""
        self._asking.pop(request.req_id, None)
        self._aside.pop(request.req_id, None)
        if len(self._rows) > 2 * len(self._aside) + _MAX_STALE_ROWS:
            self._rows = [row for row in self._rows if not self._is_stale(row)]
            heapq.heapify(self._rows)
        if self._offload is not None:
            self._offload.remote.forget(request)

    def _ask(self, request: Request, offload: Offload) -> bool:
        """Ask the request's previous machine for blocks; return False if that is not worthwhile."""
        if request.swapped_out is not None or not self._kv.may_read_cache(request):
            return False
        hits = self._kv.find_cached_prefix(request)
        _, num_here = self._kv.lookup.find_loadable(request, hits, offload.has)
        num_tokens = (len(request.block_hashes) - num_here) * self._kv.block_size
        costs, source = offload.costs, request.blocks_at
        is_trial = not costs.pays(source)
        if num_tokens < offload.min_load_tokens or not costs.try_load(source):
            offload.remote.give_up(request)
            return False
        num_groups = len(self._kv.groups) + (self._kv.states is not None)
        offload.remote.ask(request, num_here, num_groups, is_trial=is_trial)
        self._num_looked_up += request.num_tokens
        self._queues.change_waiting(request, RequestStatus.WAITING_FOR_REMOTE_KV)
        self._asking[request.req_id] = request
        return True

    def found(self, answer: BlocksFound) -> None:
        """Return a request to the queue when its machine has answered, or has failed to."""
        assert self._offload is not None
        self._offload.remote.answered(answer)
        request = self._asking.pop(answer.req_id, None)
        if request is not None and request.status is RequestStatus.WAITING_FOR_REMOTE_KV:
            self._queues.unblock(request)

    def _find_stored(self, request: Request, offload: Offload) -> _Stored | None:
        """Return the request's content in the prefix cache and in the stores.

        None: too little is stored, or loading takes longer than computing.
        """
        if request.swapped_out is not None or not self._kv.may_read_cache(request):
            return None
        cached = self._kv.find_cached_prefix(request)
        hits, num_blocks = self._kv.lookup.find_loadable(request, cached, offload.has)
        if offload.remote.has_any(request):
            reaches = partial(offload.reaches, request)
            all_hits, num_all = self._kv.lookup.find_loadable(request, cached, reaches)
            is_enough = (num_all - num_blocks) * self._kv.block_size >= offload.min_load_tokens
            # Loads that have ended since the question may have shown that it does not pay.
            pays = offload.costs.pays(request.blocks_at) or offload.remote.is_trial(request)
            if is_enough and pays:
                return _Stored(all_hits, num_all, len(cached[0]))
            offload.remote.give_up(request)
        num_tokens = (num_blocks - len(cached[0])) * self._kv.block_size
        if num_tokens < offload.min_load_tokens or not offload.costs.try_load():
            return None
        return _Stored(hits, num_blocks, len(cached[0]))

    def hold(self, request: Request, hits: Tables, num_tokens: int, headroom: int = 0) -> bool:
        """Block a waiting request, and allocate blocks for its first `num_tokens`, whole blocks.

        `hits` are cached already and must not be written to. Steps in flight may still write to the
        other blocks, so the load must come after them. Returns False, with no change, if the blocks
        do not fit with `headroom` blocks left free: they cannot be taken back before the load ends.
        """
        assert request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
        assert self._kv.enable_prefix_caching, "loaded KV lands in the prefix cache"
        assert num_tokens % self._kv.block_size == 0
        assert 0 < num_tokens <= request.num_tokens
        if not self._kv.hold(request, hits, num_tokens, headroom):
            return False
        self._queues.change_waiting(request, RequestStatus.WAITING_FOR_REMOTE_KV)
        self._requests[request.req_id] = request
        return True

    def answered(self, answer: BlocksLoaded) -> None:
        """Record the result of a read from the stores; ignore a load that was forgotten."""
        assert self._offload is not None
        num_tokens = self._offload.end(answer, self._kv.block_size)
        request = self._requests.get(answer.req_id)
        if request is not None and num_tokens is not None:
            if answer.has_state and self._kv.states is not None:
                self._kv.states.remember_loaded(request)
            if not request.is_finished:
                self._offload.remote.give_up(request)
            self.end(request, num_tokens)

    def end(self, request: Request, num_tokens: int) -> None:
        """Put the KV of the first `num_tokens` (0: none has arrived) into the prefix cache.

        Until this call the blocks are held, because they are written to. A load that is unknown,
        because the workers were lost, is ignored.
        """
        if self._requests.get(request.req_id) is not request:
            return
        del self._requests[request.req_id]
        request.num_computed_tokens = num_tokens
        self._kv.free(request)
        request.num_computed_tokens = 0
        if not request.is_finished:
            self._queues.unblock(request)

    def workers_lost(self) -> None:
        """End all loads: the blocks are lost, and their requests may load them again."""
        for request in list(self._requests.values()):
            request.may_load = True
            self.end(request, 0)
        for req_id in list(self._aside):
            self._take_back(req_id)
        self._rows.clear()
        for request in self._asking.values():
            if request.status is RequestStatus.WAITING_FOR_REMOTE_KV:
                self._queues.unblock(request)
        self._asking.clear()
        if self._offload is not None:
            self._offload.workers_lost()

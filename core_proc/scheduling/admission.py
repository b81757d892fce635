"""Decides whether a waiting request may run, and with how many tokens: slots, budget, blocks."""

from typing import NamedTuple

from core_proc.kv.kv_cache import KVCacheManager
from core_proc.kv.tables import Tables
from core_proc.options import SchedulerOptions
from core_proc.request import Request
from core_proc.scheduling.partial_prefills import PartialPrefills
from core_proc.scheduling.step import ScheduledStep


class Candidate(NamedTuple):
    """A waiting request, and the part of it that need not be computed."""

    request: Request
    hits: Tables
    start: int
    """Position at which computation begins. At least one token is computed, for the logits."""
    num_cached: int
    """Number of tokens whose KV exists: one more than `start` if all of it does."""


class Capacity(NamedTuple):
    """The resources that a candidate can use, now or after some preemptions."""

    budget: int
    num_running: int
    num_gained: int = 0
    """Number of blocks in addition to those that are free now."""


class _Refusal(NamedTuple):
    """The last refused request. Its `candidate` is valid while its prefix is unchanged."""

    candidate: Candidate
    num_missing: int
    """Number of free blocks that it lacked even for its first token."""
    num_freed: int
    """`BlockPool.num_freed` at that time."""


class Admission:
    """The rules of admission; the scheduler decides which request is considered, and when.

    A refused request stays at the front of the queue, and would be looked up in every step, which
    takes milliseconds for a long prompt. So the last refusal is kept until something has changed
    that could make the request fit.
    """

    def __init__(
        self, options: SchedulerOptions, kv: KVCacheManager, partial_prefills: PartialPrefills
    ) -> None:
        self._options = options
        self._kv = kv
        self._partial_prefills = partial_prefills
        self._watermark_blocks = int(options.watermark * options.num_blocks)
        self._refusal: _Refusal | None = None

    @property
    def num_slots(self) -> int:
        """The maximum number of requests that run at a time."""
        limit, states = self._options.max_num_seqs, self._kv.states
        return limit if states is None else min(limit, states.pool.num_usable)

    def has_slot(self, num_running: int) -> bool:
        """Return whether another request may run alongside those that run now."""
        return num_running < self._options.max_num_seqs and self._kv.has_slot

    def candidate(self, request: Request) -> Candidate:
        """Look up the request's KV in the prefix cache and on the host."""
        refusal = self._current_refusal(request)
        if refusal is not None:
            return refusal.candidate
        hits = self._kv.find_cached_prefix(request)
        num_cached = len(hits[0]) * self._kv.block_size
        if request.swapped_out is not None:
            num_cached = max(num_cached, request.swapped_out.num_computed_tokens)
        start = min(num_cached, request.num_tokens - 1)
        return Candidate(request, self._kv.lookup.without_passed(hits, start), start, num_cached)

    def _current_refusal(self, request: Request) -> _Refusal | None:
        refusal = self._refusal
        if refusal is None or refusal.candidate.request is not request:
            return None
        return refusal if self._kv.is_prefix_unchanged else None

    def knows(self, request: Request) -> bool:
        """Return whether `candidate` returns the same as when the request was refused."""
        return self._current_refusal(request) is not None

    def refuse(self, candidate: Candidate) -> None:
        """Keep the candidate, which cannot be admitted now."""
        request, hits, start, _ = candidate
        if self._refusal is None or self._refusal.candidate is not candidate:
            self._kv.watch_prefix(request)
        num_reserved = self._num_reserved(request)
        num_missing = self._kv.num_missing_blocks(hits, start, start + 1, num_reserved)
        self._refusal = _Refusal(candidate, num_missing, self._kv.pool.num_freed)

    def still_refuses(self, request: Request) -> bool:
        """Return whether a request that was refused for lack of blocks certainly still lacks them.

        Its shortage shrinks by at most one for each block that is freed: a hit that others take in
        the meantime needs no free block any more, but is no longer free either.
        """
        refusal = self._current_refusal(request)
        if refusal is None:
            return False
        return self._kv.pool.num_freed - refusal.num_freed < refusal.num_missing

    def first_chunk(self, candidate: Candidate, step: ScheduledStep, budget: int) -> int:
        """Return how many tokens the request may begin with in this step; 0: it must wait."""
        request, options = candidate.request, self._options
        num_blocks = self._kv.num_blocks_for(request.num_tokens) * len(options.kv_groups)
        if not step.can_introduce(request, num_blocks):
            return 0
        num_left = request.num_tokens - candidate.start
        num_new = step.limit_prompt(step.limit(request, num_left))
        if num_new > budget:
            # Without chunking it waits for a step that holds all of it; if no step can, it is cut.
            if not options.enable_chunked_prefill and budget < options.token_budget:
                return 0
            num_new = budget
        if num_new < num_left and not self._partial_prefills.has_room:
            return 0
        if num_new < num_left and options.computes_whole_prompts:  # a later step has room for all
            return 0
        return num_new

    def _num_reserved(self, request: Request) -> int:
        return request.num_tokens if self._options.scheduler_reserve_full_isl else 0

    def _headroom(self, num_running: int) -> int:
        return self._watermark_blocks if num_running else 0

    def headroom(self, num_running: int) -> int:
        """Return the free blocks that a load must leave: the next one of each running request."""
        return max(self._headroom(num_running), num_running * len(self._kv.groups))

    def take_blocks(self, candidate: Candidate, num_new: int, num_running: int) -> bool:
        is_admitted = self._kv.admit(
            candidate.request,
            candidate.hits,
            start=candidate.start,
            num_tokens=candidate.start + num_new,
            num_reserved=self._num_reserved(candidate.request),
            headroom=self._headroom(num_running),
        )
        if is_admitted:  # the request changes while it runs, so its candidate is void
            self._refusal = None
        return is_admitted

    def num_lacking(
        self, candidate: Candidate, step: ScheduledStep, capacity: Capacity
    ) -> int | None:
        """Return how many blocks are missing to admit the request with this capacity.

        Below 1: it can be admitted. None: it lacks a slot or tokens, regardless of blocks.
        """
        num_new = self.first_chunk(candidate, step, capacity.budget)
        if num_new == 0 or capacity.num_running >= self.num_slots:
            return None
        num_missing = self._kv.num_missing_blocks(
            candidate.hits,
            candidate.start,
            candidate.start + num_new,
            self._num_reserved(candidate.request),
        )
        return num_missing + self._headroom(capacity.num_running) - capacity.num_gained

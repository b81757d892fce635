"""Whether a waiting request may begin to run, and with how many tokens: slots, budget, blocks."""

from typing import NamedTuple

from core_proc.kv_cache import KVCacheManager, Tables
from core_proc.options import SchedulerOptions
from core_proc.partial_prefills import PartialPrefills
from core_proc.request import Request
from core_proc.step import ScheduledStep


class Candidate(NamedTuple):
    """A waiting request, and what it need not compute."""

    request: Request
    hits: Tables
    """Its blocks in the prefix cache."""
    start: int
    """Position where computing begins. At least one token is computed, for the logits."""
    num_cached: int
    """Tokens whose KV exists: one more than `start` where all of it does."""


class Room(NamedTuple):
    """What there is for a candidate, or would be after some preemptions."""

    budget: int
    num_running: int
    num_gained: int = 0
    """Blocks, beside those that are free now."""


class Admission:
    """The rules of admission; who is asked for, and in which order, is decided elsewhere."""

    def __init__(
        self, options: SchedulerOptions, kv: KVCacheManager, partial_prefills: PartialPrefills
    ) -> None:
        self._options = options
        self._kv = kv
        self._partial_prefills = partial_prefills
        self._watermark_blocks = int(options.watermark * options.num_blocks)

    def still_refuses(self, request: Request) -> bool:
        """Whether a request that did not get its blocks would not get them now: a look only."""
        return self._options.scheduler_reserve_full_isl and self._kv.still_refuses(request)

    def candidate(self, request: Request) -> Candidate:
        """Look for KV of the request in the prefix cache and on the host."""
        hits = self._kv.find_cached_prefix(request)
        num_cached = len(hits[0]) * self._kv.block_size
        if request.swapped_out is not None:
            num_cached = max(num_cached, request.swapped_out.num_computed_tokens)
        return Candidate(request, hits, min(num_cached, request.num_tokens - 1), num_cached)

    def first_chunk(self, candidate: Candidate, step: ScheduledStep, budget: int) -> int:
        """Tokens of `budget` that a request may begin with in this step; 0: it must wait."""
        request, options = candidate.request, self._options
        num_blocks = self._kv.num_blocks_for(request.num_tokens) * len(options.kv_groups)
        if not step.can_introduce(request, num_blocks):
            return 0
        num_left = request.num_tokens - candidate.start
        num_new = step.limit(request, num_left)
        if num_new > budget:
            # Without chunking it waits for a step that holds all of it; if none can, it is cut.
            if not options.enable_chunked_prefill and budget < options.token_budget:
                return 0
            num_new = budget
        if num_new < num_left and not self._partial_prefills.has_room:
            return 0
        return num_new

    def _num_reserved(self, request: Request) -> int:
        return request.num_tokens if self._options.scheduler_reserve_full_isl else 0

    def take_blocks(self, candidate: Candidate, num_new: int, num_running: int) -> bool:
        """Give the request the blocks for its first tokens; returns whether they fitted."""
        return self._kv.admit(
            candidate.request,
            candidate.hits,
            start=candidate.start,
            num_tokens=candidate.start + num_new,
            num_reserved=self._num_reserved(candidate.request),
            headroom=self._watermark_blocks if num_running else 0,
        )

    def fits(self, candidate: Candidate, step: ScheduledStep, room: Room) -> bool:
        """Whether the request could be admitted with so much room."""
        num_new = self.first_chunk(candidate, step, room.budget)
        if num_new == 0 or room.num_running >= self._options.max_num_running:
            return False
        num_missing = self._kv.num_missing_blocks(
            candidate.hits,
            candidate.start,
            candidate.start + num_new,
            self._num_reserved(candidate.request),
        )
        headroom = self._watermark_blocks if room.num_running else 0
        return num_missing + headroom <= room.num_gained

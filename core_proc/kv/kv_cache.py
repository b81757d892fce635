"""KV cache manager: block tables that grow with the computed tokens, and the prefix cache.

It decides whether blocks fit, but never which request gets them. A block is cached once it is full
and its tokens are known, under the hash of all tokens up to its end. A hit on block i therefore
implies the whole prefix.

Layers with a sliding window form KV groups, whose tables take blocks from the same pool. Blocks
that the window has passed are freed, and a hit needs only the blocks within the window.

Recurrent layers form the last group, whose table holds state blocks: see `StateBlocks`.
"""

import logging
from collections import Counter
from collections.abc import Iterator, Sequence

from core_proc.kv.block_pool import BlockPool
from core_proc.kv.event_recorder import EventRecorder, group_key
from core_proc.kv.offload import Offload
from core_proc.kv.prefix_lookup import PrefixLookup
from core_proc.kv.state_blocks import StateBlocks
from core_proc.kv.tables import Tables, first_visible_block, live_blocks
from core_proc.options import SchedulerOptions
from core_proc.request import Request
from protocol import kv_events
from protocol.core_worker import NULL_BLOCK
from protocol.kv_events import KVEvent
from protocol.model_facts import KVGroup

log = logging.getLogger("troika.core")

_HASHED_AT_ONCE = 2**15
"""Number of tokens hashed at a time, which takes about a millisecond."""


class KVCacheManager:
    """Allocates blocks to requests and frees them."""

    def __init__(self, options: SchedulerOptions, offload: Offload | None = None) -> None:
        """`offload` manages blocks outside the pool, if any."""
        self.block_size = options.block_size
        self.enable_prefix_caching = options.enable_prefix_caching
        self.groups = tuple(group for group in options.kv_groups if not group.is_state)
        """The groups whose blocks come from `pool`."""
        on_cached = None if offload is None else offload.state_cached
        has_states = options.kv_groups[-1].is_state
        self.states = StateBlocks(options, on_cached) if has_states else None
        self._has_windows = any(group.window is not None for group in self.groups)
        self._recorder = EventRecorder(options.block_size) if options.enable_kv_events else None
        self.pool = BlockPool(options.num_blocks, self._recorder)
        self.lookup = PrefixLookup(self.groups, options.block_size, self.pool, self.states)
        self._offload = offload

    @property
    def num_free_blocks(self) -> int:
        return self.pool.num_free

    @property
    def usage(self) -> float:
        """Share of the usable KV blocks that is held, 0 to 1."""
        return 1.0 - self.pool.num_free / self.pool.num_usable

    @property
    def has_slot(self) -> bool:
        """True if another request can have a state block, or if requests need none."""
        return self.states is None or self.states.num_available > 0

    def kv_tables(self, tables: Tables) -> Tables:
        """Return the part of tables or hits that belongs to the groups with blocks from `pool`."""
        return tables if self.states is None else tables[:-1]

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks for `num_tokens` tokens in a table, rounded up."""
        return -(-num_tokens // self.block_size)

    def can_ever_fit(self, num_tokens: int) -> bool:
        """Return whether a request can have `num_tokens` computed in an otherwise empty cache."""
        num_blocks = self.num_blocks_for(num_tokens)
        limits = (num_blocks if g.max_blocks is None else g.max_blocks for g in self.groups)
        return sum(min(num_blocks, limit) for limit in limits) <= self.pool.num_usable

    def may_read_cache(self, request: Request) -> bool:
        """Return whether the request may use hits; some must compute all of their tokens."""
        return self.enable_prefix_caching and not request.sampling_params.computes_whole_prompt

    def prepare(self, request: Request) -> bool:
        """Hash further blocks of a waiting request; return whether all are hashed."""
        if not self.may_read_cache(request):
            return True
        num_full = request.num_tokens // self.block_size
        limit = len(request.block_hashes) + max(1, _HASHED_AT_ONCE // self.block_size)
        self._extend_hashes(request, min(num_full, limit))
        return limit >= num_full

    def find_cached_prefix(self, request: Request) -> Tables:
        """Return the longest cached prefix as tables, with NULL_BLOCK where a window has passed."""
        num_groups = len(self.groups) + (self.states is not None)
        if not self.may_read_cache(request):
            return [[] for _ in range(num_groups)]
        self._extend_hashes(request, request.num_tokens // self.block_size)
        limit = len(request.block_hashes)
        if self.states is not None:  # the last token is computed from the state before it
            limit = (request.num_tokens - 1) // self.block_size
        return self.lookup.common_hits(request, num_groups, limit)

    def watch_prefix(self, request: Request) -> None:
        """Watch all contents that `find_cached_prefix` could find for the request."""
        hashes = request.block_hashes if self.may_read_cache(request) else []
        keys = (group_key(key, group) for group in range(len(self.groups)) for key in hashes)
        self.pool.watch(keys)
        if self.states is not None:
            self.states.watch(hashes)

    @property
    def is_prefix_unchanged(self) -> bool:
        """True if `find_cached_prefix` would find the same as at the last `watch_prefix`."""
        is_unchanged = self.pool.is_watched_unchanged
        return is_unchanged and (self.states is None or self.states.pool.is_watched_unchanged)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached contents; return False, changing nothing, while any block is held."""
        pools = [self.pool] if self.states is None else [self.pool, self.states.pool]
        if any(pool.num_free != pool.num_usable for pool in pools):
            return False
        for pool in pools:
            pool.forget_all()
        return True

    def take_events(self) -> list[KVEvent]:
        return [] if self._recorder is None else self._recorder.take()

    def snapshot_events(self) -> Iterator[KVEvent]:
        """Yield events that bring an empty cache to the current state."""
        return iter(()) if self._recorder is None else self._recorder.snapshot()

    def num_missing_blocks(
        self, hits: Tables, start: int, num_tokens: int, num_reserved: int
    ) -> int:
        """Return how many free KV blocks `admit` would lack; negative: how many it would leave."""
        num_wanted = 0
        for group, table in zip(self.groups, self.kv_tables(hits), strict=True):
            first_new = self._first_new(group, table, start)
            num_new = self.num_blocks_for(num_tokens) - first_new
            num_reserve = self.num_blocks_for(max(num_tokens, num_reserved)) - first_new
            live = live_blocks(table)
            if group.max_blocks is not None:
                num_reserve = max(num_new, min(num_reserve, group.max_blocks - len(live)))
            # A hit that no request holds is in the free queue, and is used up like a new block.
            num_wanted += num_reserve + self.pool.count_free(live)
        return num_wanted - self.pool.num_free

    def _first_new(self, group: KVGroup, hits: list[int], start: int) -> int:
        """Return the first entry that needs a new block if computation begins at `start`."""
        return max(len(hits), first_visible_block(group.window, start, self.block_size))

    def admit(
        self,
        request: Request,
        hits: Tables,
        *,
        start: int,
        num_tokens: int,
        num_reserved: int = 0,
        headroom: int = 0,
    ) -> bool:
        """Allocate a request's first blocks; return False, with no change, if they do not fit.

        Computation begins at position `start`; KV between the hits and `start` is copied in before.
        `num_tokens` need slots now. The blocks for `num_reserved` tokens must fit, too, but are not
        allocated yet, and `headroom` blocks must stay free. There must be a state block if the
        request needs one: `has_slot`.
        """
        assert not request.block_tables
        if self.num_missing_blocks(hits, start, num_tokens, num_reserved) + headroom > 0:
            return False
        self._take(request, hits, start, num_tokens)
        self.remember_full_blocks(request, num_tokens)
        return True

    def hold(self, request: Request, hits: Tables, num_tokens: int, headroom: int = 0) -> bool:
        """Give a waiting request its hits, and blocks for a load, if `headroom` blocks are left."""
        if not self.has_slot:
            return False
        hits = self.lookup.without_passed(hits, num_tokens)
        if self.num_missing_blocks(hits, num_tokens, num_tokens, 0) + headroom > 0:
            return False
        self._take_kv(request, hits, num_tokens, num_tokens)
        if self.states is not None:
            request.block_tables.append(self.states.hold(self.num_blocks_for(num_tokens)))
        return True

    def _take(self, request: Request, hits: Tables, start: int, num_tokens: int) -> None:
        self._take_kv(request, hits, start, num_tokens)
        if self.states is not None:
            num_entries = self.num_blocks_for(num_tokens)
            table = self.states.admit(request, hits[-1], start, num_entries)
            request.block_tables.append(table)

    def _take_kv(self, request: Request, hits: Tables, start: int, num_tokens: int) -> None:
        kv_hits = self.kv_tables(hits)
        for table in kv_hits:
            self.pool.touch(live_blocks(table))
        num_entries = self.num_blocks_for(num_tokens)
        for group, table in zip(self.groups, kv_hits, strict=True):
            first_new = self._first_new(group, table, start)
            passed = [NULL_BLOCK] * (first_new - len(table))
            new_ids = self.pool.allocate(max(0, num_entries - first_new))
            request.block_tables.append(table + passed + new_ids)
        request.num_hashed_blocks = len(hits[0])

    def grow(self, request: Request, num_tokens: int, *, again: bool = False) -> Tables | None:
        """Extend the tables to slots for the first `num_tokens`.

        Returns the new blocks of each group; empty if none are needed; None, with no change, if
        they do not fit. With `again`, the same step has already granted the request tokens, which
        still attend to everything in their window.
        """
        tables, pool = request.block_tables, self.pool
        if self._has_windows and not again:
            self._free_passed(request)
        new: Tables = []
        num_new = -(-num_tokens // self.block_size) - len(tables[0])
        if num_new > 0:
            if num_new * len(self.groups) > pool.num_free:
                return None
            for table in self.kv_tables(tables):
                new_ids = pool.allocate(num_new)
                table.extend(new_ids)
                new.append(new_ids)
            if self.states is not None:
                new.append(self.states.grow(request, num_new))
        self.remember_full_blocks(request, num_tokens)
        return new

    def has_room(self, request: Request, num_tokens: int) -> bool:
        num_new = self.num_blocks_for(num_tokens) - len(request.block_tables[0])
        return num_new * len(self.groups) <= self.pool.num_free

    def _free_passed(self, request: Request) -> None:
        """Free the blocks that no window reaches from the next token on.

        Steps in flight may still read these blocks. That is safe: the worker runs steps strictly in
        order, so the next holder of a block writes to it later.
        """
        num_computed = request.num_computed_tokens
        for group, table in zip(self.groups, self.kv_tables(request.block_tables), strict=True):
            visible = first_visible_block(group.window, num_computed, self.block_size)
            first = end = min(visible, len(table))
            while first > 0 and table[first - 1] != NULL_BLOCK:
                first -= 1
            if first < end:
                self.pool.free(table[first:end])
                table[first:end] = [NULL_BLOCK] * (end - first)

    def num_slots(self, request: Request) -> int:
        return len(request.block_tables[0]) * self.block_size

    def num_blocks_gained(self, requests: Sequence[Request], besides: Tables) -> int:
        """Return how many KV blocks only these requests hold, not counting those in `besides`."""
        tables = (table for r in requests for table in self.kv_tables(r.block_tables))
        held = Counter(block_id for table in tables for block_id in table)
        for block_id in {NULL_BLOCK}.union(*self.kv_tables(besides)):
            del held[block_id]
        ref_count = self.pool.ref_count
        return sum(ref_count(block_id) == count for block_id, count in held.items())

    def num_lasting_blocks(self, request: Request) -> int:
        """Return how many of the request's blocks others also hold, and thus keep cached.

        With recurrent layers, these are the blocks up to the last snapshot among them.
        """
        num_blocks = len(request.block_hashes)
        if self.groups:
            ref_count = self.pool.ref_count
            num_blocks = sum(ref_count(block_id) > 1 for block_id in request.block_tables[0])
        if self.states is not None:
            limit = min(num_blocks, len(request.block_hashes))
            num_blocks = len(self.states.find_hit(request, limit))
        return num_blocks

    def forget_uncomputed(self, request: Request) -> None:
        """Drop the hashes of blocks that a step would have filled, since it will not be sent.

        A block that another request also holds was a hit, and has been filled.
        """
        first = request.num_computed_tokens // self.block_size
        for table in self.kv_tables(request.block_tables):
            for block_id in live_blocks(table[first : request.num_hashed_blocks]):
                if self.pool.ref_count(block_id) == 1:
                    self.pool.forget(block_id)
        request.num_hashed_blocks = min(first, request.num_hashed_blocks)

    def free(self, request: Request) -> None:
        """Free all blocks, although steps in flight may still write to them: see `_free_passed`."""
        try:
            self.remember_full_blocks(request, request.num_computed_tokens)
            if self.states is not None:
                self.states.remember(request)
        except AssertionError:
            raise  # the bookkeeping is wrong
        except Exception:
            # The hashes are not needed, but the blocks must be freed.
            log.exception("blocks of request %d are not cached", request.req_id)
            self.forget_uncomputed(request)
        self.discard(request)

    def discard(self, request: Request) -> None:
        """Free all blocks without caching any further ones."""
        for table in self.kv_tables(request.block_tables):
            self.pool.free(live_blocks(table))
        if self.states is not None:
            self.states.release(request)
        request.block_tables = []
        request.num_hashed_blocks = 0

    def remember_full_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Cache the full blocks among the first tokens whose ids are known.

        This happens when the step is scheduled: in a step the worker writes all KV before it
        attends, so a later admission in the same step may already hit these blocks.
        """
        if not self.enable_prefix_caching:
            return
        num_full = min(num_computed_tokens, len(request.token_ids)) // self.block_size
        first = request.num_hashed_blocks
        if num_full <= first:
            return
        self._extend_hashes(request, num_full)
        hashes, recorder, offload = request.block_hashes, self._recorder, self._offload
        tables = self.kv_tables(request.block_tables)
        for index in range(first, num_full):
            for group, table in enumerate(tables):
                block_id = table[index]
                if block_id != NULL_BLOCK:
                    key = hashes[index] if group == 0 else group_key(hashes[index], group)
                    if self.pool.remember(block_id, key):
                        if recorder is not None:
                            recorder.stored(request, index, group)
                        if offload is not None:
                            offload.cached(block_id, key)
            request.num_hashed_blocks = index + 1

    def begin_step(self) -> None:
        """Cache the states that were kept in earlier steps: see `StateBlocks`."""
        if self.states is not None:
            self.states.begin_step()
            self.cache_states()

    def cache_states(self) -> None:
        """Cache the states of sent steps whose preceding tokens are known."""
        states = self.states
        if states is None:
            return
        for request, num_blocks in states.blocks_to_hash().items():
            try:
                num_known = request.num_tokens // self.block_size
                self._extend_hashes(request, min(num_blocks, num_known))
                states.remember(request)
            except AssertionError:
                raise  # the bookkeeping is wrong
            except Exception:
                log.exception("states of request %d are not cached", request.req_id)
                states.give_up(request)

    def _extend_hashes(self, request: Request, num_full: int) -> None:
        hashes, size = request.block_hashes, self.block_size
        first = len(hashes)
        if first >= num_full:
            return
        prefix = request.prefix_hash
        if prefix is None:
            prefix = request.prefix_hash = kv_events.prefix_hash(prefix_root(request))
        token_ids = request.token_ids
        for start in range(first * size, num_full * size, size):
            prefix.update(token_ids[start : start + size])
            hashes.append(prefix.digest())


def prefix_root(request: Request) -> bytes:
    """Return everything that a request's prefix depends on besides its tokens."""
    return kv_events.prefix_root(request.cache_salt, request.adapter_id, request.adapter_digest)

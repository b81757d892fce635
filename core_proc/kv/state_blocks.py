"""State blocks: where the states of recurrent layers are, and which of them can be hit.

A state summarizes all preceding tokens, and a step replaces it. So a running request needs exactly
one block, its own, however long it is: the last entry of its state table. When the table grows, the
block moves along to the new last entry.

A hit needs the state at its very end, so some states are kept: snapshots, at multiples of
`mamba_block_size` tokens and at the last block boundary before the prompt's last token, where the
next turn of a chat begins. They use blocks that nothing else needs: these are allocated when the
rest of a step is decided, and are free again, with their contents cached, as soon as the step has
been sent. Snapshots therefore never delay an admission, and the oldest ones are replaced first.

Within a step the worker does not order requests. So a snapshot can be hit from the next step on,
and a block that is read in a step is held until its end. `protocol/core_worker.py` defines the
rules of the table.
"""

from collections.abc import Callable, Sequence

from core_proc.kv.block_pool import BlockPool
from core_proc.kv.event_recorder import group_key
from core_proc.options import SchedulerOptions
from core_proc.request import Request
from protocol.core_worker import NULL_BLOCK


class StateBlocks:
    """Allocates state blocks to requests and frees them.

    The state table of a request is the last of its block tables. Each of its entries that is not
    null counts as a reference to the block.
    """

    def __init__(
        self,
        options: SchedulerOptions,
        on_cached: Callable[[int, bytes], None] | None = None,
    ) -> None:
        """`on_cached` is called with each snapshot that is cached, and its key."""
        self._on_cached = on_cached
        self.pool = BlockPool(options.num_state_blocks)
        self._block_size = options.block_size
        self._group = len(options.kv_groups) - 1
        self._keeps_snapshots = options.enable_prefix_caching
        self._spacing = options.mamba_block_size // options.block_size
        """Number of blocks between two snapshots."""
        self._grown: dict[Request, int] = {}
        """Requests whose tables the current step has extended, with the first entry that may become
        a snapshot."""
        self._reading: dict[Request, int] = {}
        """Requests admitted in the latest step, with the entry from which they began."""
        self._begins: dict[Request, int] = {}
        """Requests admitted in the current step with a table that ends in that entry."""
        self._unhashed: dict[Request, list[int]] = {}
        """Entries with snapshots of earlier steps that are not cached yet."""

    @property
    def num_available(self) -> int:
        """Number of blocks available to new requests, for which snapshots are dropped."""
        return self.pool.num_free + sum(map(len, self._unhashed.values()))

    @property
    def usage(self) -> float:
        """Share of the usable blocks that running requests hold, 0 to 1."""
        return 1.0 - self.num_available / self.pool.num_usable

    # Hits ---------------------------------------------------------------------------------------

    def find_hit(self, request: Request, limit: int) -> list[int]:
        """Return a table that ends in the last snapshot within the first `limit` blocks, or []."""
        hashes = request.block_hashes
        for index in range(limit - 1, -1, -1):
            block_id = self.pool.cached_block(group_key(hashes[index], self._group))
            if block_id is not None:
                return [NULL_BLOCK] * index + [block_id]
        return []

    def watch(self, block_hashes: Sequence[bytes]) -> None:
        """Watch all contents that `find_hit` could find."""
        self.pool.watch(group_key(block_hash, self._group) for block_hash in block_hashes)

    # A step: begin, admit or grow, and keep snapshots ---------------------------------------------

    def begin_step(self) -> None:
        """Release blocks that only the previous step has read."""
        for request, entry in self._reading.items():
            self._release_entry(request, entry)
        self._reading.clear()

    def admit(self, request: Request, hit: list[int], start: int, num_entries: int) -> list[int]:
        """Return the table of a request that begins at `start`, from a snapshot or from the host.

        There must be an available block. If the snapshot is the only one, the request takes it
        over, and its content is no longer cached.
        """
        snapshot = hit[-1] if hit else NULL_BLOCK
        if snapshot == NULL_BLOCK:
            own = self._allocate()
        elif self.num_available > 1 or self.pool.ref_count(snapshot) > 0:
            self.pool.touch([snapshot])
            own = self._allocate()
        else:
            self.pool.forget(snapshot)
            self.pool.touch([snapshot])
            own = snapshot
        table = [NULL_BLOCK] * num_entries
        table[-1] = own
        entry = (start - 1) // self._block_size
        if start > 0 and entry < num_entries - 1:
            table[entry] = snapshot or own
            if table[entry] == own:
                self.pool.touch([own])
            self._reading[request] = entry
        elif start > 0:
            self._begins[request] = entry
        if self._keeps_snapshots:
            self._grown[request] = entry + 1
        return table

    def grow(self, request: Request, num_new: int) -> list[int]:
        """Extend the table by moving the request's own block along; return the appended entries."""
        table = request.block_tables[-1]
        if self._keeps_snapshots:
            self._grown.setdefault(request, len(table) - 1)
        own = table[-1]
        new_ids = [NULL_BLOCK] * (num_new - 1) + [own]
        begin = self._begins.pop(request, None)
        if begin is None:
            table[-1] = NULL_BLOCK
        else:  # the step that grows it reads the state there
            self.pool.touch([own])
            self._reading[request] = begin
        table += new_ids
        return new_ids

    def end_of_drafts(self, request: Request) -> int:
        """Return the position at which the drafts of the next step must end.

        They add at most one entry to the table, so that all entries from the first draft on have a
        block, whichever drafts are right. They also do not pass the end of a snapshot, so that a
        snapshot holds the state of known tokens.
        """
        end = (len(request.block_tables[-1]) + 1) * self._block_size
        if not self._keeps_snapshots:
            return end
        spacing = self._spacing * self._block_size
        return min(end, (request.num_tokens // spacing + 1) * spacing)

    def keep_snapshots(self) -> list[Request]:
        """Place snapshots in free blocks, as far as there are any, when the step has been decided.

        Returns the requests whose tables have changed.
        """
        grown, self._grown = self._grown, {}
        self._begins.clear()
        changed = []
        for request, first in grown.items():
            entries = self._wanted_entries(request, first)[: self.pool.num_free]
            for entry, block_id in zip(entries, self.pool.allocate(len(entries)), strict=True):
                self._keep(request, entry, block_id, is_first=entry == first)
            if entries:
                changed.append(request)
        return changed

    def _wanted_entries(self, request: Request, first: int) -> list[int]:
        """Return the entries to keep, from `first` to the last but one, latest first."""
        prompt_end = (request.num_prompt_tokens - 1) // self._block_size
        return [
            entry
            for entry in range(len(request.block_tables[-1]) - 2, first - 1, -1)
            if (entry + 1) % self._spacing == 0 or entry + 1 == prompt_end
            if not self._is_cached(request, entry)
        ]

    def _is_cached(self, request: Request, entry: int) -> bool:
        if entry >= len(request.block_hashes):
            return False
        key = group_key(request.block_hashes[entry], self._group)
        return self.pool.cached_block(key) is not None

    def _keep(self, request: Request, entry: int, block_id: int, is_first: bool) -> None:
        table = request.block_tables[-1]
        if is_first:
            # The worker may have the request's own block there, which then stays.
            table[entry], table[-1] = table[-1], block_id
        else:
            table[entry] = block_id
        self._unhashed.setdefault(request, []).append(entry)

    # Snapshots of earlier steps -------------------------------------------------------------------

    def blocks_to_hash(self) -> dict[Request, int]:
        """Return requests with snapshots that are not cached, and the number of blocks to hash."""
        return {request: max(entries) + 1 for request, entries in self._unhashed.items()}

    def remember(self, request: Request) -> None:
        """Cache the request's snapshots whose hashes are known, and release them.

        This must not happen before the step that writes them has been sent, since a hit may follow
        in the next step.
        """
        entries = self._unhashed.pop(request, [])
        num_hashes = len(request.block_hashes)
        for entry in entries:
            if entry < num_hashes:
                self._cache(request, entry)
                self._release_entry(request, entry)
        if left := [entry for entry in entries if entry >= num_hashes]:
            self._unhashed[request] = left

    def give_up(self, request: Request) -> None:
        """Drop the snapshots of a request that are not cached yet."""
        for entry in self._unhashed.pop(request):
            self._release_entry(request, entry)

    # Loads --------------------------------------------------------------------------------------

    def hold(self, num_entries: int) -> list[int]:
        """Return the table of a waiting request whose block a state is loaded to.

        There must be an available block.
        """
        return [NULL_BLOCK] * (num_entries - 1) + [self._allocate()]

    def remember_loaded(self, request: Request) -> None:
        """Cache the state that was loaded for a waiting request, unless it is cached already.

        If it comes from another machine, it is stored on this one.
        """
        self._cache(request, len(request.block_tables[-1]) - 1)

    def _cache(self, request: Request, entry: int) -> None:
        """Cache the state of an entry whose hash is known, unless it is cached already."""
        if self._is_cached(request, entry):
            return
        block_id = request.block_tables[-1][entry]
        key = group_key(request.block_hashes[entry], self._group)
        self.pool.remember(block_id, key)
        if self._on_cached is not None:
            self._on_cached(block_id, key)

    def _allocate(self) -> int:
        if self.pool.num_free == 0:
            self.give_up(next(iter(self._unhashed)))
        return self.pool.allocate(1)[0]

    def _release_entry(self, request: Request, entry: int) -> None:
        table = request.block_tables[-1]
        self.pool.free([table[entry]])
        table[entry] = NULL_BLOCK

    # The end ------------------------------------------------------------------------------------

    def release(self, request: Request) -> None:
        """Free all blocks of a request, although steps in flight may still write to them.

        That is safe: their next holder begins with zeros, or with a copy, in a later step.
        """
        self._grown.pop(request, None)
        self._reading.pop(request, None)
        self._begins.pop(request, None)
        self._unhashed.pop(request, None)
        self.pool.free([block_id for block_id in request.block_tables[-1] if block_id])

    def check_invariants(self, holders: Sequence[Request]) -> None:
        """Compare the pool with the state tables of all requests that hold blocks."""
        self.pool.check_invariants()
        assert not self._grown, "a step has not decided about its snapshots"
        assert not self._begins
        assert {*self._reading, *self._unhashed} <= {*holders}
        counts: dict[int, int] = {}
        owners: dict[int, Request] = {}
        for request in holders:
            table = request.block_tables[-1]
            entries = {index for index, block_id in enumerate(table) if block_id != NULL_BLOCK}
            unhashed = self._unhashed.get(request, [])
            reading = [self._reading[request]] if request in self._reading else []
            assert entries == {len(table) - 1, *unhashed, *reading}
            assert len(entries) == 1 + len(unhashed) + len(reading)
            for entry in entries:
                counts[table[entry]] = counts.get(table[entry], 0) + 1
            for entry in (*unhashed, len(table) - 1):
                assert self.pool.hash_of(table[entry]) is None
                assert owners.setdefault(table[entry], request) is request
            assert len({table[entry] for entry in (*unhashed, len(table) - 1)}) == 1 + len(unhashed)
        assert all(self.pool.ref_count(block_id) == count for block_id, count in counts.items())
        assert len(counts) + self.pool.num_free == self.pool.num_usable

"""Preemption by swap: a victim's KV is copied to host memory and back, instead of computed again.

The core decides, and knows which of the host's blocks hold what; the worker copies, in the order
of the steps. Tokens are the same either way.
"""

from core_proc.kv.kv_cache import live_blocks
from core_proc.options import SchedulerOptions
from core_proc.request import Request, SwappedOut
from protocol.core_worker import NULL_BLOCK, BlockCopies

NO_BLOCK = -1
"""An entry of a host table that was not copied, because no window reaches it any more."""


class Swapper:
    """The host's blocks, and the copies of the step that is being put together."""

    def __init__(self, options: SchedulerOptions) -> None:
        self._block_size = options.block_size
        self._cost_tokens = options.swap_cost_tokens
        self._num_blocks = options.num_host_blocks
        self._num_touched = 0
        """Leading blocks that have been used; the others are not in `_free` yet."""
        self._free: list[int] = []
        self._out = BlockCopies()
        self._in = BlockCopies()
        self._leaving: list[int] = []
        """Blocks that are free from the next step on: this one still reads them."""
        self.num_swapped_out = 0

    @property
    def num_free_blocks(self) -> int:
        return self._num_usable + len(self._leaving)

    @property
    def _num_usable(self) -> int:
        return len(self._free) + self._num_blocks - self._num_touched

    def _take(self) -> int:
        if self._free:
            return self._free.pop()
        self._num_touched += 1
        return self._num_touched - 1

    def prefers(self, victim: Request, num_lost_tokens: int) -> bool:
        """Whether a copy is possible, and cheaper than computing `num_lost_tokens` again."""
        if not self._num_blocks:
            return False
        end = self._num_entries(victim)
        num_blocks = sum(len(live_blocks(table[:end])) for table in victim.block_tables)
        if num_blocks == 0 or num_blocks > self._num_usable:
            return False
        return num_blocks * self._cost_tokens < num_lost_tokens

    def _num_entries(self, victim: Request) -> int:
        return -(-victim.num_computed_tokens // self._block_size)

    def take_out(self, victim: Request) -> None:
        """Copy out what the victim has computed, before its blocks are freed."""
        end = self._num_entries(victim)
        host_tables = []
        for table in victim.block_tables:
            host_table = [NO_BLOCK] * end
            for index, block_id in enumerate(table[:end]):
                if block_id != NULL_BLOCK:
                    host_table[index] = self._take()
                    self._out.device_block_ids.append(block_id)
                    self._out.host_block_ids.append(host_table[index])
            host_tables.append(host_table)
        victim.swapped_out = SwappedOut(victim.num_computed_tokens, host_tables)
        self.num_swapped_out += 1

    def bring_in(self, request: Request, num_hit: int) -> None:
        """Copy in what the prefix cache did not have: the tables from block `num_hit` on."""
        assert request.swapped_out is not None
        tables = zip(request.block_tables, request.swapped_out.host_tables, strict=True)
        for table, host_table in tables:
            for index in range(num_hit, len(host_table)):
                if table[index] != NULL_BLOCK:
                    self._in.device_block_ids.append(table[index])
                    self._in.host_block_ids.append(host_table[index])
        self.drop(request)

    def cancel(self, request: Request) -> None:
        """Cancel the copies into the blocks of a request that releases them before the step."""
        held = {block_id for table in request.block_tables for block_id in table}
        columns = zip(self._in.device_block_ids, self._in.host_block_ids, strict=True)
        left = [pair for pair in columns if pair[0] not in held]
        self._in = BlockCopies([pair[0] for pair in left], [pair[1] for pair in left])

    def drop(self, request: Request) -> None:
        """Free the host's blocks of a request."""
        if request.swapped_out is None:
            return
        for host_table in request.swapped_out.host_tables:
            self._leaving += [block_id for block_id in host_table if block_id != NO_BLOCK]
        request.swapped_out = None

    def take_copies(self) -> tuple[BlockCopies, BlockCopies]:
        """Return the copies of the step: out of the pool, and into it."""
        copies = self._out, self._in
        self._out, self._in = BlockCopies(), BlockCopies()
        self._free += self._leaving
        self._leaving = []
        return copies

    def forget(self) -> None:
        """Free all blocks of the host, and cancel all copies: the worker is gone or asleep."""
        self._free, self._num_touched = [], 0
        self._out, self._in, self._leaving = BlockCopies(), BlockCopies(), []

    def check_invariants(self, waiting: list[Request]) -> None:
        held = [
            block_id
            for request in waiting
            if request.swapped_out is not None
            for host_table in request.swapped_out.host_tables
            for block_id in host_table
            if block_id != NO_BLOCK
        ]
        assert sorted(held + self._free + self._leaving) == list(range(self._num_touched))
        assert self._num_touched <= self._num_blocks

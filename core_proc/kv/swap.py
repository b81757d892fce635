"""Preemption by swap: a victim's KV is copied to the host and back instead of recomputed.

The core decides, and tracks the contents of the host's blocks; the worker copies, in step order.
Tokens are the same either way. With recurrent layers, the state is copied, too.
"""

from core_proc.kv.host_blocks import HostBlocks
from core_proc.kv.tables import Tables, live_blocks
from core_proc.options import SchedulerOptions
from core_proc.request import Request, SwappedOut
from protocol.core_worker import NULL_BLOCK, BlockCopies

NO_BLOCK = -1
"""An entry of a host table that was not copied, because no window reaches it any more."""

MAX_COPIES = 2**17
"""Blocks that one step copies to the host at most; an id of each side takes 5 bytes of a frame."""


class StepCopies:
    """The copies of one kind of blocks in the step that is being built."""

    def __init__(self) -> None:
        self.out = BlockCopies()
        """Blocks to copy from the pool to the host."""
        self.into = BlockCopies()
        """Blocks to copy from the host to the pool."""

    def cancel_into(self, device_block_ids: list[int]) -> None:
        """Leave out the copies into these blocks."""
        columns = zip(self.into.device_block_ids, self.into.host_block_ids, strict=True)
        left = [pair for pair in columns if pair[0] not in device_block_ids]
        self.into = BlockCopies([pair[0] for pair in left], [pair[1] for pair in left])


def _add(copies: BlockCopies, device_block_id: int, host_block_id: int) -> None:
    copies.device_block_ids.append(device_block_id)
    copies.host_block_ids.append(host_block_id)


_NO_COPIES = StepCopies(), StepCopies()
"""The copies of every step without a host pool; never changed."""


class Swapper:
    """The host's blocks, and the copies of the step that is being built."""

    def __init__(self, options: SchedulerOptions) -> None:
        self._block_size = options.block_size
        self._cost_tokens = options.swap_cost_tokens
        self._state_cost_blocks = options.state_swap_blocks
        self._has_states = options.kv_groups[-1].is_state
        self._is_on = options.num_host_blocks + options.num_host_state_blocks > 0
        self._host = HostBlocks(options.num_host_blocks)
        self._host_states = HostBlocks(options.num_host_state_blocks)
        self._copies, self._state_copies = StepCopies(), StepCopies()
        self.num_swapped_out = 0

    @property
    def num_free_blocks(self) -> int:
        return self._host.num_free

    @property
    def num_free_states(self) -> int:
        return self._host_states.num_free

    def prefers(self, victim: Request, num_lost_tokens: int) -> bool:
        """Return whether a copy is possible, and cheaper than recomputing `num_lost_tokens`."""
        if not self._is_on or victim.num_computed_tokens == 0:
            return False
        end = self._num_entries(victim)
        num_blocks = sum(len(live_blocks(table[:end])) for table in self._kv_tables(victim))
        if num_blocks > self._host.num_usable:
            return False
        if len(self._copies.out.host_block_ids) + num_blocks > MAX_COPIES:
            return False
        cost = float(num_blocks)
        if self._has_states:
            if self._host_states.num_usable == 0:
                return False
            cost += self._state_cost_blocks
        return cost * self._cost_tokens < num_lost_tokens

    def _num_entries(self, victim: Request) -> int:
        return -(-victim.num_computed_tokens // self._block_size)

    def _kv_tables(self, request: Request) -> Tables:
        tables = request.block_tables
        return tables[:-1] if self._has_states else tables

    def take_out(self, victim: Request) -> None:
        """Copy out the computed part of a victim, before its blocks are freed.

        Its own state block must have the state after its computed tokens.
        """
        end = self._num_entries(victim)
        host_tables = []
        for table in self._kv_tables(victim):
            host_table = [NO_BLOCK] * end
            for index, block_id in enumerate(table[:end]):
                if block_id != NULL_BLOCK:
                    host_table[index] = self._host.take()
                    _add(self._copies.out, block_id, host_table[index])
            host_tables.append(host_table)
        host_state = None
        if self._has_states:
            host_state = self._host_states.take()
            _add(self._state_copies.out, victim.block_tables[-1][-1], host_state)
        victim.swapped_out = SwappedOut(victim.num_computed_tokens, host_tables, host_state)
        self.num_swapped_out += 1

    def bring_in(self, request: Request, num_hit: int) -> None:
        """Copy in what the prefix cache did not have: the tables from block `num_hit` on."""
        swapped = request.swapped_out
        assert swapped is not None
        for table, host_table in zip(self._kv_tables(request), swapped.host_tables, strict=True):
            for index in range(num_hit, len(host_table)):
                if table[index] != NULL_BLOCK:
                    _add(self._copies.into, table[index], host_table[index])
        start = request.num_computed_tokens
        if swapped.host_state is not None and start > num_hit * self._block_size:
            block_id = request.block_tables[-1][(start - 1) // self._block_size]
            _add(self._state_copies.into, block_id, swapped.host_state)
        self.drop(request)

    def cancel(self, request: Request) -> None:
        """Cancel copies into the blocks of a request that releases them before the step."""
        tables = self._kv_tables(request)
        self._copies.cancel_into([block_id for table in tables for block_id in table])
        if self._has_states and request.block_tables:
            self._state_copies.cancel_into(request.block_tables[-1])

    def drop(self, request: Request) -> None:
        """Free the host's blocks of a request."""
        swapped = request.swapped_out
        if swapped is None:
            return
        for host_table in swapped.host_tables:
            self._host.leave(block_id for block_id in host_table if block_id != NO_BLOCK)
        if swapped.host_state is not None:
            self._host_states.leave([swapped.host_state])
        request.swapped_out = None

    def take_copies(self) -> tuple[StepCopies, StepCopies]:
        """Return the copies of the step, for KV blocks and for state blocks."""
        if not self._is_on:
            return _NO_COPIES
        copies = self._copies, self._state_copies
        self._copies, self._state_copies = StepCopies(), StepCopies()
        self._host.end_step()
        self._host_states.end_step()
        return copies

    def forget(self) -> None:
        """Free all blocks of the host, and cancel all copies: the worker is gone or asleep."""
        self._host.forget()
        self._host_states.forget()
        self._copies, self._state_copies = StepCopies(), StepCopies()

    def check_invariants(self, waiting: list[Request]) -> None:
        swapped = [request.swapped_out for request in waiting if request.swapped_out is not None]
        tables = [table for one in swapped for table in one.host_tables]
        self._host.check_invariants([i for table in tables for i in table if i != NO_BLOCK])
        states = [one.host_state for one in swapped if one.host_state is not None]
        assert len(states) == len(swapped) * self._has_states
        self._host_states.check_invariants(states)

"""Blocks outside the workers' memory: which exist, and which will be written or read.

Workers keep full blocks in stores that they share (`worker_proc/offload`), under the hashes of the
prefix cache. The core asks an index for their probable contents, and decides which blocks are read
before a request is admitted. Nothing depends on the outcome: blocks that do not arrive are
computed.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from core_proc.kv.block_pool import BlockPool
from core_proc.kv.event_recorder import group_key
from core_proc.kv.load_costs import LoadCosts
from core_proc.kv.remote_blocks import RemoteBlocks
from core_proc.request import Request
from protocol.core_worker import NULL_BLOCK, BlocksLoaded, FindBlocks, LoadBlocks, StoreBlocks

MAX_LOADS = 8
"""Maximum number of requests whose blocks are read at a time; further ones wait for a place."""
MIN_LOAD_TOKENS = 64
"""Minimum number of tokens worth reading: the shortest load takes as long as computing them."""
_MAX_PENDING = 2**14
"""Maximum number of blocks to write in one message; further ones are not written."""


class Index(Protocol):
    """The probable contents of a store: see `protocol/stores/index.py`."""

    def __contains__(self, key: bytes, /) -> bool: ...

    def discard(self, key: bytes, /) -> None: ...

    def clear(self) -> None:
        """Forget all contents."""


class _Load(NamedTuple):
    """Blocks that are being read, in the order of their positions."""

    message: LoadBlocks
    entries: list[int]
    """The table entry of each block."""
    num_cached: int
    """Number of leading blocks that need not be computed even without the load."""
    end: int
    """Number of leading blocks that exist after the load."""


class Offload:
    """The stores of one engine, and the transfers of the step that is being built."""

    def __init__(
        self,
        indexes: Sequence[Index],
        *,
        min_load_tokens: int = MIN_LOAD_TOKENS,
        max_loads: int = MAX_LOADS,
        reads_machines: bool = False,
        server_here: str = "",
    ) -> None:
        """`indexes` has each store's index; with `reads_machines`, workers read other machines.

        `server_here` is the address at which others read the stores of this machine.
        """
        self._indexes = indexes
        self._max_loads = max_loads
        self.min_load_tokens = min_load_tokens
        self._new: list[tuple[int, bytes]] = []
        """Blocks whose contents were cached since the last step, and which no store has."""
        self._new_states: list[tuple[int, bytes]] = []
        self._unsent: list[LoadBlocks] = []
        self._loads: dict[int, _Load] = {}
        self.remote = RemoteBlocks(is_on=reads_machines, here=server_here)
        self.costs = LoadCosts()
        self.num_stored = 0
        self.num_loaded_tokens = 0
        self.num_stored_states = 0
        self.num_loaded_states = 0
        self.num_remote_tokens = 0
        """The part of the loaded tokens that came from other machines."""

    def has(self, block_hash: bytes, group: int) -> bool:
        """Return whether a store probably has a block of a KV group."""
        key = group_key(block_hash, group)
        return any(key in index for index in self._indexes)

    def reaches(self, request: Request, block_hash: bytes, group: int) -> bool:
        """Return whether a store has the block, or the machine from which the request comes."""
        key = group_key(block_hash, group)
        return self.remote.has(request, key) or self.has(block_hash, group)

    def cached(self, block_id: int, key: bytes) -> None:
        """Write a block that has entered the prefix cache, unless it is in the first store."""
        if len(self._new) < _MAX_PENDING and key not in self._indexes[0]:
            self._new.append((block_id, key))

    def state_cached(self, block_id: int, key: bytes) -> None:
        """Write a state block that has entered the prefix cache, like `cached`."""
        if len(self._new_states) < _MAX_PENDING and key not in self._indexes[0]:
            self._new_states.append((block_id, key))

    @property
    def num_places(self) -> int:
        """Number of further requests whose blocks may be read now."""
        return self._max_loads - len(self._loads)

    def begin(
        self, request: Request, num_hit: int, block_size: int, *, num_cached: int, has_state: bool
    ) -> None:
        """Read the blocks of a request's tables after the first `num_hit`.

        With `has_state`, the last table is that of its state block, which is read too. Without the
        load, only the first `num_cached` blocks need not be computed.
        """
        entries, block_ids, keys = [], [], []
        tables, end = request.block_tables, len(request.block_tables[0])
        state_block_id, state_key = NULL_BLOCK, b""
        if has_state:
            tables = tables[:-1]
            state_block_id = request.block_tables[-1][-1]
            state_key = group_key(request.block_hashes[end - 1], len(tables))
        for entry in range(num_hit, end):
            for group, table in enumerate(tables):
                if table[entry] != NULL_BLOCK:
                    entries.append(entry)
                    block_ids.append(table[entry])
                    keys.append(group_key(request.block_hashes[entry], group))
        source = request.blocks_at if self.remote.has_any(request) else ""
        limit_ms = self.costs.limit_ms((end - num_cached) * block_size) if source else 0
        message = LoadBlocks(
            request.req_id, block_ids, keys, state_block_id, state_key, source, limit_ms
        )
        self._loads[request.req_id] = _Load(message, entries, num_cached, end)
        self._unsent.append(message)

    def end(self, answer: BlocksLoaded, block_size: int) -> int | None:
        """Return how many tokens of a request have KV after a load; None: it was forgotten.

        A block that did not arrive is written again once it is computed, because one of the ranks
        lacks it.
        """
        load = self._loads.pop(answer.req_id, None)
        if load is None:
            return None
        num_blocks = min(answer.num_blocks, len(load.entries))
        has_kv = num_blocks == len(load.entries)
        end = load.end if has_kv else load.entries[num_blocks]
        missing = [] if has_kv else [load.message.keys[num_blocks]]
        if load.message.state_key:
            self.num_loaded_states += answer.has_state
            if not answer.has_state:
                missing = [load.message.state_key]
        for key in missing:
            for index in self._indexes:
                index.discard(key)
        # KV without the state at its end saves no token.
        is_of_use = not load.message.state_key or not missing
        num_tokens = (end - load.num_cached) * block_size if is_of_use else 0
        self.num_loaded_tokens += num_tokens
        num_remote = num_tokens * min(answer.num_remote_blocks, num_blocks) // max(num_blocks, 1)
        if answer.has_remote_state:  # without it, all of these tokens would be computed
            num_remote = num_tokens
        self.num_remote_tokens += num_remote
        source, limit_ns = load.message.source, load.message.limit_ms * 1_000_000
        if not source:
            self.costs.loaded(num_tokens, answer.load_ns)
        elif not missing:
            self.costs.loaded(max(num_remote, block_size), answer.remote_ns, source)
        elif answer.load_ns >= limit_ns > 0:
            self.costs.loaded(max(num_remote, block_size), answer.load_ns, source)
        return end * block_size

    def clear(self) -> None:
        """Find none of the blocks again that have been written so far."""
        self._new.clear()
        self._new_states.clear()
        self.remote.clear()
        for index in self._indexes:
            index.clear()

    def workers_lost(self) -> None:
        """Forget all transfers; the stores keep their contents."""
        self._new.clear()
        self._new_states.clear()
        self._unsent.clear()
        self._loads.clear()
        self.remote.workers_lost()
        self.costs.workers_lost()

    def take_messages(
        self, pool: BlockPool, state_pool: BlockPool | None = None
    ) -> list[StoreBlocks | LoadBlocks | FindBlocks]:
        """Return the messages to send after the steps that have been decided so far."""
        messages: list[StoreBlocks | LoadBlocks | FindBlocks] = [*self.remote.take_messages()]
        new = _still_cached(self._new, pool)
        states = [] if state_pool is None else _still_cached(self._new_states, state_pool)
        self._new.clear()
        self._new_states.clear()
        if new or states:
            self.num_stored += len(new)
            self.num_stored_states += len(states)
            messages.append(StoreBlocks(*_columns(new), *_columns(states)))
        messages += self._unsent
        self._unsent.clear()
        return messages


def _still_cached(blocks: list[tuple[int, bytes]], pool: BlockPool) -> list[tuple[int, bytes]]:
    """Leave out blocks that have lost their content: a step may write to them already."""
    return [(block_id, key) for block_id, key in blocks if pool.hash_of(block_id) == key]


def _columns(blocks: list[tuple[int, bytes]]) -> tuple[list[int], list[bytes]]:
    return [block_id for block_id, _ in blocks], [key for _, key in blocks]

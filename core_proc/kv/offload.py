"""Blocks outside the workers' memory: which are there, and which are to be written or read.

Workers keep full blocks in stores that they share (`worker_proc/offload`), under the hashes of the
prefix cache. The core asks an index what they probably hold, and decides what is read before a
request is admitted. Nothing depends on the outcome: blocks that do not come are computed.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from core_proc.kv.block_pool import BlockPool
from core_proc.kv.event_recorder import group_key
from core_proc.kv.load_costs import LoadCosts
from core_proc.request import Request
from protocol.core_worker import NULL_BLOCK, BlocksLoaded, LoadBlocks, StoreBlocks

MAX_LOADS = 8
"""Requests whose blocks are being read at a time; further ones wait for a place."""
LEAST_TOKENS = 64
"""To read: fewer are computed in the time that a load takes at least."""
_MOST_PENDING = 2**14
"""Blocks to be written with one message; further ones are not."""


class Index(Protocol):
    """What a store probably holds: see `protocol/stores/index.py`."""

    def __contains__(self, key: bytes, /) -> bool: ...

    def discard(self, key: bytes, /) -> None: ...

    def clear(self) -> None:
        """Forget it."""


class _Load(NamedTuple):
    """Blocks that are being read, in the order of their positions."""

    message: LoadBlocks
    entries: list[int]
    """For each block, its entry in the table."""
    num_hit: int
    """Leading entries that are not read."""


class Offload:
    """The stores of one engine, and the transfers of the step that is being put together."""

    def __init__(
        self,
        indexes: Sequence[Index],
        *,
        least_tokens: int = LEAST_TOKENS,
        most_loads: int = MAX_LOADS,
    ) -> None:
        """Take the index of each store."""
        self._indexes = indexes
        self._most_loads = most_loads
        self.least_tokens = least_tokens
        self._new: list[tuple[int, bytes]] = []
        """Blocks whose contents were cached since the last step, which no store has."""
        self._unsent: list[LoadBlocks] = []
        self._loads: dict[int, _Load] = {}
        self.costs = LoadCosts()
        self.num_stored = 0
        self.num_loaded_tokens = 0

    def has(self, block_hash: bytes, group: int) -> bool:
        """Whether a store probably has a block of a KV group."""
        key = group_key(block_hash, group)
        return any(key in index for index in self._indexes)

    def cached(self, block_id: int, key: bytes) -> None:
        """Write a block that has entered the prefix cache, unless it is in the first store."""
        if len(self._new) < _MOST_PENDING and key not in self._indexes[0]:
            self._new.append((block_id, key))

    @property
    def num_places(self) -> int:
        """How many more requests may have their blocks read now."""
        return self._most_loads - len(self._loads)

    def begin(self, request: Request, num_hit: int) -> None:
        """Read the blocks of a request's tables behind the first `num_hit`."""
        entries, block_ids, keys = [], [], []
        for entry in range(num_hit, len(request.block_tables[0])):
            for group, table in enumerate(request.block_tables):
                if table[entry] != NULL_BLOCK:
                    entries.append(entry)
                    block_ids.append(table[entry])
                    keys.append(group_key(request.block_hashes[entry], group))
        message = LoadBlocks(request.req_id, block_ids, keys)
        self._loads[request.req_id] = _Load(message, entries, num_hit)
        self._unsent.append(message)

    def end(self, answer: BlocksLoaded, block_size: int) -> int | None:
        """Return how many tokens of a request are there after a load; None: it was forgotten.

        A block that did not come is written again once it is computed: one of the ranks lacks it.
        """
        load = self._loads.pop(answer.req_id, None)
        if load is None:
            return None
        num_blocks = min(answer.num_blocks, len(load.entries))
        is_all = num_blocks == len(load.entries)
        end = load.entries[-1] + 1 if is_all else load.entries[num_blocks]
        if not is_all:
            for index in self._indexes:
                index.discard(load.message.keys[num_blocks])
        self.costs.loaded((end - load.num_hit) * block_size, answer.load_ns)
        self.num_loaded_tokens += (end - load.num_hit) * block_size
        return end * block_size

    def clear(self) -> None:
        """Find no block again that was written so far."""
        self._new.clear()
        for index in self._indexes:
            index.clear()

    def workers_lost(self) -> None:
        """Forget all transfers; what is in the stores remains."""
        self._new.clear()
        self._unsent.clear()
        self._loads.clear()
        self.costs.workers_lost()

    def take_messages(self, pool: BlockPool) -> list[StoreBlocks | LoadBlocks]:
        """Return what is to be sent after the steps that were decided so far.

        A block that has lost its content meanwhile may be written to by one of these steps.
        """
        messages: list[StoreBlocks | LoadBlocks] = []
        new = [(block_id, key) for block_id, key in self._new if pool.hash_of(block_id) == key]
        self._new.clear()
        if new:
            self.num_stored += len(new)
            messages.append(StoreBlocks([block[0] for block in new], [block[1] for block in new]))
        messages += self._unsent
        self._unsent.clear()
        return messages

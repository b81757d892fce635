"""KV blocks: reference counts, the queue of free blocks, and the cached contents.

Free blocks are allocated from the front of a queue. Blocks without a hash return to the front,
cached ones to the end, so cached contents survive as long as other blocks are free.
"""

from collections.abc import Iterable, Sequence

from core_proc.kv.event_recorder import EventRecorder
from protocol.core_worker import NULL_BLOCK


class BlockPool:
    """Reference counts, the free queue and the map from content hash to blocks."""

    def __init__(self, num_blocks: int, recorder: EventRecorder | None = None) -> None:
        """Create `num_blocks` blocks, including the null block."""
        assert num_blocks >= 2, f"num_blocks {num_blocks} must be at least 2"
        self.num_blocks = num_blocks
        self.num_free = num_blocks - 1
        self.num_freed = 0
        """Number of blocks freed since the start: an upper bound for the growth of `num_free`."""
        self._recorder = recorder
        self._ref_counts = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._blocks_of: dict[bytes, list[int]] = {}
        """Equal contents are not merged, so several blocks may have the same hash."""
        self._watched: frozenset[bytes] | None = None
        # The free queue: a ring linked in both directions, with the null block as its anchor, so
        # that a cache hit can remove its block from the middle without a search.
        self._next = [*range(1, num_blocks), NULL_BLOCK]
        self._prev = [num_blocks - 1, *range(num_blocks - 1)]

    @property
    def num_usable(self) -> int:
        """Number of blocks that requests can hold."""
        return self.num_blocks - 1

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks from the front, and forget the contents that they cached."""
        assert count <= self.num_free
        taken = []
        following, hashes, ref_counts = self._next, self._hashes, self._ref_counts
        block_id = following[NULL_BLOCK]
        for _ in range(count):
            if hashes[block_id] is not None:
                self.forget(block_id)
            ref_counts[block_id] = 1
            taken.append(block_id)
            block_id = following[block_id]
        following[NULL_BLOCK] = block_id
        self._prev[block_id] = NULL_BLOCK
        self.num_free -= count
        return taken

    def touch(self, block_ids: Sequence[int]) -> None:
        """Add a reference to each cached block, taking it out of the free queue if it was there."""
        ref_counts, following, preceding = self._ref_counts, self._next, self._prev
        for block_id in block_ids:
            if ref_counts[block_id] == 0:
                before, after = preceding[block_id], following[block_id]
                following[before] = after
                preceding[after] = before
                self.num_free -= 1
            ref_counts[block_id] += 1

    def free(self, block_ids: Sequence[int]) -> None:
        """Drop a reference to each block of a table, tail first: shared heads live longest."""
        hashes, ref_counts = self._hashes, self._ref_counts
        following, preceding = self._next, self._prev
        front, last_plain = following[NULL_BLOCK], NULL_BLOCK
        num_plain = 0
        cached: list[int] = []
        for block_id in reversed(block_ids):
            count = ref_counts[block_id] = ref_counts[block_id] - 1
            if count > 0:
                continue
            assert count == 0, f"block {block_id} was free already"
            if hashes[block_id] is None:
                following[last_plain], preceding[block_id] = block_id, last_plain
                last_plain = block_id
                num_plain += 1
            else:
                cached.append(block_id)
        following[last_plain], preceding[front] = front, last_plain
        last = preceding[NULL_BLOCK]
        for block_id in cached:
            following[last], preceding[block_id] = block_id, last
            last = block_id
        following[last], preceding[NULL_BLOCK] = NULL_BLOCK, last
        self.num_free += num_plain + len(cached)
        self.num_freed += num_plain + len(cached)

    def cached_run(self, block_hashes: Iterable[bytes]) -> list[int]:
        """Return a block for each of these contents, up to the first that is not cached."""
        run = []
        for block_hash in block_hashes:
            blocks = self._blocks_of.get(block_hash)
            if blocks is None:
                break
            run.append(blocks[0])
        return run

    def cached_block(self, block_hash: bytes) -> int | None:
        blocks = self._blocks_of.get(block_hash)
        return blocks[0] if blocks else None

    def remember(self, block_id: int, block_hash: bytes) -> bool:
        """Cache a full block's content; return whether it was not cached before."""
        assert self._hashes[block_id] is None
        assert self._ref_counts[block_id] > 0
        self._hashes[block_id] = block_hash
        blocks = self._blocks_of.setdefault(block_hash, [])
        blocks.append(block_id)
        if self._watched and block_hash in self._watched:
            self._watched = None
        return len(blocks) == 1

    def forget(self, block_id: int) -> None:
        block_hash = self._hashes[block_id]
        assert block_hash is not None
        self._hashes[block_id] = None
        blocks = self._blocks_of[block_hash]
        blocks.remove(block_id)
        if self._watched and block_hash in self._watched:
            self._watched = None
        if not blocks:
            del self._blocks_of[block_hash]
            if self._recorder is not None:
                self._recorder.removed(block_hash)

    def forget_all(self) -> None:
        """Empty the cache; reference counts stay."""
        if self._recorder is not None:
            self._recorder.cleared()
        self._blocks_of.clear()
        self._hashes = [None] * self.num_blocks
        self._watched = None

    def watch(self, block_hashes: Iterable[bytes]) -> None:
        """Watch these contents from now on, instead of any others."""
        self._watched = frozenset(block_hashes)

    @property
    def is_watched_unchanged(self) -> bool:
        """True if no block with a watched content has been cached or forgotten since `watch`."""
        return self._watched is not None

    def count_free(self, block_ids: Sequence[int]) -> int:
        """Return how many of these blocks are free."""
        ref_counts = self._ref_counts
        return [ref_counts[block_id] for block_id in block_ids].count(0)

    def ref_count(self, block_id: int) -> int:
        return self._ref_counts[block_id]

    def hash_of(self, block_id: int) -> bytes | None:
        return self._hashes[block_id]

    def free_ids(self) -> list[int]:
        ids = []
        block_id = self._next[NULL_BLOCK]
        while block_id != NULL_BLOCK:
            ids.append(block_id)
            block_id = self._next[block_id]
        return ids

    def check_invariants(self) -> None:
        free = self.free_ids()
        assert len(free) == len(set(free)) == self.num_free
        assert self._ref_counts[NULL_BLOCK] == 0
        assert set(free) == {i for i in range(1, self.num_blocks) if self._ref_counts[i] == 0}
        assert all(self._prev[self._next[i]] == i for i in [NULL_BLOCK, *free])
        known = {block_id: key for key, ids in self._blocks_of.items() for block_id in ids}
        assert known == {i: key for i, key in enumerate(self._hashes) if key is not None}
        assert all(self._blocks_of.values())

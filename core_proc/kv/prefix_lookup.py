"""Finds the KV of a request's first tokens: in the pools, and in the stores outside of them.

A hit is a table like that of a running request: it has NULL_BLOCK where a window has passed.
"""

from collections.abc import Callable, Sequence

from core_proc.kv.block_pool import BlockPool
from core_proc.kv.event_recorder import group_key
from core_proc.kv.state_blocks import StateBlocks
from core_proc.kv.tables import Tables, first_visible_block
from core_proc.request import Request
from protocol.core_worker import NULL_BLOCK
from protocol.model_facts import KVGroup

MAX_LOADED_BLOCKS = 2**18
"""Blocks that one load reads at most: their ids and keys take 40 bytes each of a frame."""


class PrefixLookup:
    """Looks up blocks by the hashes of a request; allocates nothing."""

    def __init__(
        self,
        groups: Sequence[KVGroup],
        block_size: int,
        pool: BlockPool,
        states: StateBlocks | None,
    ) -> None:
        """`groups` are those whose blocks come from `pool`; states are one further group."""
        self._groups = groups
        self._block_size = block_size
        self._pool = pool
        self._states = states
        self._has_windows = any(group.window is not None for group in groups)

    def common_hits(self, request: Request, num_groups: int, limit: int) -> Tables:
        """Return the longest prefix, up to `limit` blocks, that the first groups have in common."""
        while True:
            hits = [self._hits(request, group, limit) for group in range(num_groups)]
            shortest = min(map(len, hits), default=limit)
            if shortest == limit or len(hits) == 1:
                return hits
            limit = shortest

    def _hits(self, request: Request, group: int, limit: int) -> list[int]:
        if group == len(self._groups):
            assert self._states is not None
            return self._states.find_hit(request, limit)
        if self._groups[group].window is not None:
            return self._hits_in_window(request, group, limit)
        keys = request.block_hashes[:limit]
        if group > 0:
            keys = [group_key(key, group) for key in keys]
        return self._pool.cached_run(keys)

    def _hits_in_window(self, request: Request, group: int, limit: int) -> list[int]:
        """Search from the right for a run of blocks that fills the window."""
        window, size = self._groups[group].window, self._block_size
        run: list[int] = []
        end = limit
        for index in range(limit - 1, -1, -1):
            if index < first_visible_block(window, min(end * size, request.num_tokens - 1), size):
                break
            block_id = self._pool.cached_block(group_key(request.block_hashes[index], group))
            if block_id is None:
                end, run = index, []
            else:
                run.append(block_id)
        return [NULL_BLOCK] * (end - len(run)) + run[::-1]

    def without_passed(self, hits: Tables, start: int) -> Tables:
        """Drop the hits that no token from position `start` on attends to or begins from."""
        num_hit = len(hits[0])
        if self._states is not None and start > num_hit * self._block_size:
            hits = [*hits[:-1], [NULL_BLOCK] * num_hit]
        if not self._has_windows:
            return hits
        size = self._block_size
        visible = [first_visible_block(group.window, start, size) for group in self._groups]
        num_passed = [min(index, num_hit) for index in visible]
        tables = zip(num_passed, hits[: len(self._groups)], strict=True)
        return [[NULL_BLOCK] * n + t[n:] for n, t in tables] + hits[len(self._groups) :]

    def find_loadable(
        self, request: Request, hits: Tables, is_stored: Callable[[bytes, int], bool]
    ) -> tuple[Tables, int]:
        """Return the hits from which a load begins, and the number of leading blocks after it.

        A load reads at most `MAX_LOADED_BLOCKS`; the request computes what follows.
        `is_stored` takes a hash and a KV group, or the number after the last group for a state.
        With recurrent layers, these blocks end at a stored state. Their KV may be cached already
        beyond `hits`, which end at a cached state.
        """
        num_hit = len(hits[0])
        end = num_hit + MAX_LOADED_BLOCKS // max(len(self._groups), 1)
        end = min(end, len(request.block_hashes))
        if self._states is None:
            return hits, self._num_loadable(request, hits, end, is_stored)
        end = min(end, (request.num_tokens - 1) // self._block_size)
        while end > num_hit:
            if not is_stored(request.block_hashes[end - 1], len(self._groups)):
                end -= 1
                continue
            kv_hits = self.common_hits(request, len(self._groups), end)  # without the states
            reach = self._num_loadable(request, kv_hits, end, is_stored)
            if reach == end:
                num_kv_hit = len(kv_hits[0]) if kv_hits else 0
                return [*kv_hits, [NULL_BLOCK] * num_kv_hit], end
            end = max(reach, num_hit)
        return hits, num_hit

    def _num_loadable(
        self,
        request: Request,
        hits: Tables,
        end: int,
        is_stored: Callable[[bytes, int], bool],
    ) -> int:
        """Return the number of leading blocks, up to `end`, whose KV is a hit or stored."""
        if not self._groups:
            return end
        hashes, num_hit, size = request.block_hashes, len(hits[0]), self._block_size
        for number, group in enumerate(self._groups):
            if group.window is None:
                index = num_hit
                while index < end and is_stored(hashes[index], number):
                    index += 1
                end = index
        # Layers with a window need the blocks that it still sees at the end.
        windows = [(n, g.window) for n, g in enumerate(self._groups) if g.window is not None]
        while windows and end > num_hit:
            missing = [
                index
                for number, window in windows
                for index in range(max(num_hit, first_visible_block(window, end * size, size)), end)
                if not is_stored(hashes[index], number)
            ]
            if not missing:
                break
            end = min(missing)
        return end

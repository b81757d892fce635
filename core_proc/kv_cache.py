"""KV cache manager: block tables that grow with the computed tokens, and the prefix cache.

It answers whether something fits and never decides who should. A block is cached once it is full
and its tokens are known, under a hash that chains over all tokens before it, so a hit on block i
implies the whole prefix.
"""

import hashlib
from collections.abc import Iterable
from typing import NamedTuple

from core_proc.block_pool import BlockPool
from core_proc.request import Request

_HASH_BYTES = 16


class _Refusal(NamedTuple):
    """What must change before the same request can be admitted."""

    request: Request
    num_frees: int
    missing_hash: bytes | None
    """Of the first block that the cache did not have; None if it had all full ones."""


class KVCacheManager:
    """Gives blocks to requests and takes them back."""

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool) -> None:
        """Manage `num_blocks` blocks (with the null block) of `block_size` tokens each."""
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.pool = BlockPool(num_blocks)
        self._refusal: _Refusal | None = None

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody holds, cached ones included."""
        return self.pool.num_free

    @property
    def usage(self) -> float:
        """Held share of the usable blocks, 0 to 1."""
        return 1.0 - self.pool.num_free / self.pool.num_usable

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that so many tokens fill, the last one perhaps in part."""
        return -(-num_tokens // self.block_size)

    def can_ever_fit(self, num_tokens: int) -> bool:
        """Whether an otherwise empty cache holds so many tokens."""
        return self.num_blocks_for(num_tokens) <= self.pool.num_usable

    def may_read_cache(self, request: Request) -> bool:
        """Whether the request profits from hits; for prompt logprobs all must be computed."""
        return self.enable_prefix_caching and request.sampling_params.prompt_logprobs is None

    def find_cached_prefix(self, request: Request) -> list[int]:
        """Find the cached blocks that hold the request's longest known prefix; changes nothing."""
        if not self.may_read_cache(request):
            return []
        hits: list[int] = []
        self._extend_hashes(request, request.num_tokens // self.block_size)
        for block_hash in request.block_hashes:
            block_id = self.pool.cached_block(block_hash)
            if block_id is None:
                break
            hits.append(block_id)
        return hits

    def admit(
        self, request: Request, hits: list[int], num_tokens: int, num_reserved: int, headroom: int
    ) -> bool:
        """Give a request without blocks its first ones, if they fit.

        Args:
            request: Holds no blocks yet.
            hits: What `find_cached_prefix` returned for it, in this very step.
            num_tokens: Tokens that need slots now.
            num_reserved: Tokens that must fit too, though their blocks are not taken yet.
            headroom: Blocks that must stay free besides.

        Returns:
            Whether it fitted; if not, nothing changed.
        """
        assert not request.block_ids
        pool = self.pool
        # A hit that nobody holds lies in the free queue and is used up just like a new block.
        num_free_hits = sum(map(pool.is_free, hits))
        num_wanted = self.num_blocks_for(max(num_tokens, num_reserved)) - len(hits)
        if num_wanted + num_free_hits + headroom > pool.num_free:
            hashes = request.block_hashes
            missing = hashes[len(hits)] if len(hits) < len(hashes) else None
            self._refusal = _Refusal(request, pool.num_frees, missing)
            return False
        pool.touch(hits)
        request.block_ids = hits + pool.allocate(self.num_blocks_for(num_tokens) - len(hits))
        request.num_hashed_blocks = len(hits)
        self._remember_full_blocks(request, num_tokens)
        return True

    def still_refuses(self, request: Request) -> bool:
        """Whether `admit` has refused the request and would do so again: a look, not a search.

        It would where nothing was freed since then and its cached prefix has not become longer,
        provided that it asks for no fewer tokens and no less headroom.
        """
        refusal = self._refusal
        if refusal is None or refusal.request is not request:
            return False
        if refusal.num_frees != self.pool.num_frees:
            return False
        missing = refusal.missing_hash
        return missing is None or self.pool.cached_block(missing) is None

    def grow(self, request: Request, num_tokens: int) -> list[int] | None:
        """Extend the table to slots for `num_tokens`.

        Returns:
            The new blocks' ids, perhaps none; None, with nothing changed, if they do not fit.
        """
        table = request.block_ids
        num_new = -(-num_tokens // self.block_size) - len(table)
        if num_new > self.pool.num_free:
            return None
        new_ids = self.pool.allocate(num_new) if num_new > 0 else []
        table += new_ids
        self._remember_full_blocks(request, num_tokens)
        return new_ids

    def quiet_until(self, request: Request) -> int:
        """Number of computed tokens up to which single tokens need neither a block nor a hash."""
        return len(request.block_ids) * self.block_size - self.enable_prefix_caching

    def forget_uncomputed(self, request: Request) -> None:
        """Drop the hashes of blocks that were to be filled by a step that will not be sent."""
        first = request.num_computed_tokens // self.block_size
        for block_id in request.block_ids[first : request.num_hashed_blocks]:
            self.pool.forget(block_id)
        request.num_hashed_blocks = min(first, request.num_hashed_blocks)

    def free(self, request: Request) -> None:
        """Take back all blocks; what full ones contain stays cached until they are reused.

        Steps in flight may still write to these blocks. That is safe: the worker runs steps
        strictly in order, so whoever gets a block next writes after them.
        """
        self._remember_full_blocks(request, request.num_computed_tokens)
        self.pool.free(request.block_ids)
        request.block_ids = []
        request.num_hashed_blocks = 0

    def reset_prefix_cache(self) -> bool:
        """Forget all cached contents; refused (False) while any block is held."""
        if self.pool.num_free != self.pool.num_usable:
            return False
        self.pool.forget_all()
        return True

    def _remember_full_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Cache the full blocks among the first tokens, as far as their ids are known.

        This happens when the step is scheduled: within one step the worker writes all KV before
        anyone attends, so a later admission of the same step may already hit them.
        """
        if not self.enable_prefix_caching:
            return
        num_full = min(num_computed_tokens, request.num_tokens) // self.block_size
        first = request.num_hashed_blocks
        if num_full <= first:
            return
        self._extend_hashes(request, num_full)
        for index in range(first, num_full):
            self.pool.remember(request.block_ids[index], request.block_hashes[index])
        request.num_hashed_blocks = num_full

    def _extend_hashes(self, request: Request, num_full: int) -> None:
        """Extend the hash chain to `num_full` blocks: each hash covers its parent and the ids."""
        hashes, size = request.block_hashes, self.block_size
        if len(hashes) >= num_full:
            return
        parent = hashes[-1] if hashes else _root(request.cache_salt)
        for start in range(len(hashes) * size, num_full * size, size):
            data = parent + request.token_ids[start : start + size].tobytes()
            parent = hashlib.blake2b(data, digest_size=_HASH_BYTES).digest()
            hashes.append(parent)

    def check_invariants(self, holders: Iterable[Request]) -> None:
        """Compare the pool with the tables of all requests that may hold blocks."""
        self.pool.check_invariants()
        counts: dict[int, int] = {}
        for request in holders:
            table = request.block_ids
            assert len(set(table)) == len(table)
            assert request.num_hashed_blocks <= len(table)
            for index, block_id in enumerate(table):
                counts[block_id] = counts.get(block_id, 0) + 1
                known = self.pool.hash_of(block_id)
                if index < request.num_hashed_blocks:
                    assert known == request.block_hashes[index]
                else:
                    assert known is None
                    assert self.pool.ref_count(block_id) == 1
        assert all(self.pool.ref_count(block_id) == count for block_id, count in counts.items())
        assert len(counts) + self.pool.num_free == self.pool.num_usable


def _root(cache_salt: str) -> bytes:
    """Start of all chains of one salt; `person` keeps salts apart from chained blocks."""
    data = cache_salt.encode()
    return hashlib.blake2b(data, digest_size=_HASH_BYTES, person=b"cache_salt").digest()

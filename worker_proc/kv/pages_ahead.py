"""Allocates pages of the KV cache before a step needs them."""

import logging
from collections.abc import Sequence

from worker_proc.kv.kv_tensors import HostMemory

MAX_AHEAD_BYTES = 512 * 1024**2
"""Of pages that are allocated and that no request has used."""
PIECE_BYTES = 2 * 1024**2
"""Of one tensor, at a time: a huge page, which takes a virtual machine up to 5 ms."""

_log = logging.getLogger("troika.worker")


class PagesAhead:
    """The pages of the blocks that requests will use next, in all tensors of a pool.

    The system allocates a page when it is first written. On a virtual machine whose own memory is
    allocated late, a step that waits for pages computes prompts a tenth slower. Blocks that were
    never used are taken in ascending order, so the next ones are known.
    """

    def __init__(self, memories: Sequence[HostMemory]) -> None:
        """Take tensors whose rows are blocks, as many in each."""
        self._memories = memories
        self._num_blocks = len(memories[0].tensor) if memories else 0
        block_bytes = [memory.tensor[0].nbytes for memory in memories]
        self._max_ahead = MAX_AHEAD_BYTES // max(sum(block_bytes), 1)
        self._piece = max(PIECE_BYTES // max(block_bytes, default=1), 1)
        self._first_missing = 0
        """The first block after those in use that lacks pages in some tensor."""
        self._next_memory = 0
        """The first tensor in which it lacks them."""

    def forget(self) -> None:
        """Start over: the memory was returned to the system."""
        self._first_missing = self._next_memory = 0

    def allocate(self, highest_block: int) -> bool:
        """Allocate a piece, and return whether another one is missing.

        `highest_block` is the highest in use; as many blocks after it should have pages.
        """
        if self._first_missing <= highest_block:
            self._first_missing, self._next_memory = highest_block + 1, 0
        num_ahead = min(highest_block, self._max_ahead)
        wanted = min(highest_block + 1 + num_ahead, self._num_blocks)
        if self._first_missing >= wanted or not self._memories:
            return False
        end = min(self._first_missing + self._piece, wanted)
        try:
            self._memories[self._next_memory].allocate(self._first_missing, end)
        except OSError as error:  # Linux before 5.14, or no memory is left
            _log.debug("pages are allocated when they are written: %s", error)
            self._memories = ()
            return False
        self._next_memory += 1
        if self._next_memory == len(self._memories):
            self._next_memory = 0
            self._first_missing = end
        return self._first_missing < wanted

"""Allocates pages of the KV cache before a step needs them."""

import logging
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from worker_proc.kv.kv_tensors import HostMemory

MAX_AHEAD_BYTES = 512 * 1024**2
"""Maximum size of allocated pages that no request has used yet."""
PIECE_BYTES = 2 * 1024**2
"""Size of one allocation: a huge page, which takes up to 5 ms on a virtual machine."""
CATCH_UP = 2
"""Bytes allocated between steps for each byte that a step was the first to use."""

_log = logging.getLogger("troika.worker")


class PagesAhead:
    """Allocates the pages of the blocks that requests will use next, in all tensors of a pool.

    The system allocates a page when it is first written. On a virtual machine whose memory the host
    allocates lazily, waiting for pages makes prompts a tenth slower. Unused blocks are allocated in
    ascending order, so the next ones are known.
    """

    def __init__(self, memories: Sequence[HostMemory], num_threads: int = 1) -> None:
        """Store the tensors, whose rows are blocks; all have the same number of blocks.

        `num_threads` pieces are allocated at once, in the time of one.
        """
        self._memories = memories
        self._num_threads = num_threads
        self._threads = ThreadPoolExecutor(num_threads, "pages-ahead")
        self._num_blocks = len(memories[0].tensor) if memories else 0
        block_bytes = [memory.tensor[0].nbytes for memory in memories]
        self._max_ahead = MAX_AHEAD_BYTES // max(sum(block_bytes), 1)
        self._piece = max(PIECE_BYTES // max(block_bytes, default=1), 1)
        self._round = range(0)
        """The blocks whose pages are being allocated, tensor by tensor."""
        self._next_memory = len(memories)
        """Index of the first tensor without pages for these blocks."""
        self._highest_counted = 0
        """The highest block in use for which `keep_up` was called."""
        self._num_owed = 0
        """Number of pieces that `keep_up` has still to allocate for the blocks up to that one."""

    def forget(self) -> None:
        """Start over: the memory was returned to the system."""
        self._round = range(0)
        self._next_memory = len(self._memories)
        self._highest_counted = self._num_owed = 0

    def allocate(self, highest_block: int) -> bool:
        """Allocate one piece per thread while the worker is idle; return True if more are missing.

        `highest_block` is the highest block in use. The goal is as many blocks again after it, and
        at least one piece of each tensor.
        """
        num_ahead = min(max(highest_block, self._piece), self._max_ahead)
        return self._advance(highest_block, num_ahead, self._num_threads)

    def keep_up(self, highest_block: int) -> bool:
        """Allocate at most one piece per thread between steps; return True if more are owed.

        Pieces are owed in proportion to the blocks that were newly used, until one piece of each
        tensor is ahead: a busy worker thus stays ahead, and no step waits for the pages of all
        tensors at once. A step that arrives meanwhile waits for one piece.
        """
        num_memories = len(self._memories)
        if (num_new := highest_block - self._highest_counted) > 0:
            self._highest_counted = highest_block
            num_pieces = math.ceil(CATCH_UP * num_new * num_memories / self._piece)
            self._num_owed = min(self._num_owed + num_pieces, CATCH_UP * num_memories)
        num_pieces = min(self._num_owed, self._num_threads)
        if not num_pieces:
            return False
        num_ahead = min(self._piece, self._max_ahead)
        is_missing = self._advance(highest_block, num_ahead, num_pieces)
        self._num_owed = self._num_owed - num_pieces if is_missing else 0
        return self._num_owed > 0

    def _advance(self, highest_block: int, num_ahead: int, num_pieces: int) -> bool:
        """Allocate at most `num_pieces`, until `num_ahead` blocks after the highest have pages."""
        num_memories = len(self._memories)
        if self._round.stop <= highest_block:
            self._round, self._next_memory = range(highest_block, highest_block + 1), num_memories
        wanted = min(highest_block + 1 + num_ahead, self._num_blocks) if num_memories else 0
        pieces: list[tuple[HostMemory, range]] = []
        while len(pieces) < num_pieces:
            if self._next_memory == num_memories:
                first = self._round.stop
                if first >= wanted:
                    break
                self._round = range(first, min(first + self._piece, self._num_blocks))
                self._next_memory = 0
            pieces.append((self._memories[self._next_memory], self._round))
            self._next_memory += 1
        try:
            for _ in self._threads.map(_allocate, pieces):
                pass
        except OSError as error:  # Linux before 5.14, or no memory is left
            _log.debug("pages are allocated when they are written: %s", error)
            self._memories = ()
            self._next_memory = 0
            return False
        return self._next_memory < num_memories or self._round.stop < wanted


def _allocate(piece: tuple[HostMemory, range]) -> None:
    memory, blocks = piece
    memory.allocate(blocks.start, blocks.stop)

"""The blocks of a pool in host memory: free ones, and those that the next step frees."""

from collections.abc import Iterable


class HostBlocks:
    """Numbers blocks from 0, and uses as few different ones as possible."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._num_touched = 0
        """Number of leading blocks that have been used; the others are not in `_free` yet."""
        self._free: list[int] = []
        self._leaving: list[int] = []
        """Blocks that are free from the next step on, since the current step still reads them."""

    @property
    def num_free(self) -> int:
        return self.num_usable + len(self._leaving)

    @property
    def num_usable(self) -> int:
        """Number of blocks that may be written in the current step."""
        return len(self._free) + self._num_blocks - self._num_touched

    def take(self) -> int:
        if self._free:
            return self._free.pop()
        self._num_touched += 1
        return self._num_touched - 1

    def leave(self, block_ids: Iterable[int]) -> None:
        self._leaving += block_ids

    def end_step(self) -> None:
        self._free += self._leaving
        self._leaving = []

    def forget(self) -> None:
        """Free all blocks: no step reads them any more."""
        self._free, self._leaving, self._num_touched = [], [], 0

    def check_invariants(self, held: list[int]) -> None:
        """Compare the free lists with the blocks that requests hold."""
        assert sorted(held + self._free + self._leaving) == list(range(self._num_touched))
        assert self._num_touched <= self._num_blocks

"""The blocks of a runner in the form that stores use."""

from collections.abc import Callable, Sequence
from typing import Protocol

Parts = Sequence[memoryview]
"""Consecutive pieces of a block, in bytes."""
Wait = Callable[[], None]


class BlockMemory(Protocol):
    """The pool of a runner, and slots, which hold blocks in transit to or from a store."""

    @property
    def num_slots(self) -> int: ...

    @property
    def block_bytes(self) -> int: ...

    def parts(self, slot: int) -> Parts:
        """Return the bytes of a slot, which are those of the block in it."""

    @property
    def is_asleep(self) -> bool:
        """True if the pool's memory is released; its blocks have lost their content."""

    def wake(self) -> None:
        """Make the pool usable; called between two steps, before blocks are copied in."""

    def copy_out(self, block_ids: Sequence[int], slots: Sequence[int]) -> Wait:
        """Copy blocks to slots, after all steps launched so far; return a wait for the copy."""

    def copy_in(self, slot: int, block_id: int) -> None:
        """Copy a slot to a block, from any thread; return when the copy is complete."""


class NoMemory:
    """Blocks without content, for a null runner or for a stage without such layers.

    Each block still has a file in a store: with several ranks, a block counts as stored if all
    ranks have it.
    """

    block_bytes = 0
    is_asleep = False

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots

    def parts(self, slot: int) -> Parts:
        return []

    def wake(self) -> None:
        pass

    def copy_out(self, block_ids: Sequence[int], slots: Sequence[int]) -> Wait:
        return no_wait

    def copy_in(self, slot: int, block_id: int) -> None:
        pass


def no_wait() -> None:
    pass

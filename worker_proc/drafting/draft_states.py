"""State blocks in addition to the core's, for the states before drafts.

A step over drafts leaves the state after all of them in the request's own block. If one is wrong,
the next step begins from the state before it. So the states before all drafts of a step are kept in
these blocks, of which the core knows nothing, until it is known how many drafts are right. A
request gets no more drafts than there are blocks for it.
"""

from typing import Protocol

from protocol.core_worker import NULL_BLOCK


class HasDraftStates(Protocol):
    """The part of a mirrored request that concerns the states before its drafts."""

    draft_states: list[int]
    state_block: int


class DraftStates:
    """Allocates blocks to the drafts of requests."""

    def __init__(self, first_block: int, num_blocks: int) -> None:
        """Use the ids from `first_block` on."""
        self._ids = range(first_block, first_block + num_blocks)
        self._free = list(self._ids)
        self.max_used = num_blocks
        """Maximum number of blocks that all requests may hold; less if another rank has fewer."""

    def clear(self) -> None:
        """Take all blocks back: there are no requests any more."""
        self._free = list(self._ids)

    def reserve(self, request: HasDraftStates, num_drafts: int) -> int:
        """Allocate a block for each of a request's next drafts, as far as possible.

        Returns the number of drafts with blocks; the others cannot be verified. The block from
        which the next step begins is kept, and may be one of them: a step reads before it writes.
        """
        held, block_id = request.draft_states, request.state_block
        if block_id != NULL_BLOCK:
            held.remove(block_id)
            held.insert(0, block_id)
        num_held = max(num_drafts, int(block_id != NULL_BLOCK))
        while len(held) > num_held:
            self._free.append(held.pop())
        while len(held) < num_held and self.num_free > len(self._ids) - self.max_used:
            held.append(self._free.pop())
        return min(num_drafts, len(held))

    def release(self, request: HasDraftStates) -> None:
        """Release the blocks of a request that leaves."""
        self._free += request.draft_states
        request.draft_states = []
        request.state_block = NULL_BLOCK

    @property
    def num_free(self) -> int:
        return len(self._free)


def state_after(request: HasDraftStates, num_drafts: int, num_right: int) -> int:
    """Return the block with the state after the last right draft of a step.

    NULL_BLOCK: it is in the request's state table.
    """
    return NULL_BLOCK if num_right == num_drafts else request.draft_states[num_right]

"""States of a draft model's recurrent layers, for requests and for prefixes.

A state summarizes all preceding tokens, and the core knows nothing of a draft model's states. A
request holds the state at the position up to which the draft model has computed it. While it has
drafts, it also holds the states after each of them except the last, and continues from the state
after its last right draft.

Snapshots are kept at the ends of KV blocks, at the same positions as the core's snapshots of a
model: at multiples of a spacing, and at the last block boundary before a prompt's last token. If a
request's table begins with blocks that have snapshots, the request begins from the last of them,
otherwise from its first token. Snapshots occupy blocks that nothing else needs; the least recently
used one is dropped first.

A block may belong to a request and be a snapshot at once. Its only holder may write it; once it has
several, it is never written again.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from protocol.core_worker import NULL_BLOCK


class StatePath(NamedTuple):
    """The state blocks of a request's next part, and of its drafts."""

    source: int
    """The block with the state that the part begins from; NULL_BLOCK: a zero state."""
    blocks: dict[int, int]
    """For each position, the block that receives the state there."""
    num_drafts: int
    """The number of drafts that have blocks."""


class DraftModelStates:
    """Allocates state blocks to requests and snapshots."""

    def __init__(self, num_blocks: int, block_size: int, spacing: int | None) -> None:
        """`num_blocks` includes the null block.

        `block_size` is that of KV blocks; `spacing` is the number of tokens between two snapshots;
        None: no snapshots.
        """
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._spacing = spacing
        self.clear()

    def clear(self) -> None:
        """Forget all requests and snapshots."""
        self._free = list(range(self._num_blocks - 1, NULL_BLOCK, -1))
        self._num_holders = [0] * self._num_blocks
        self._held: dict[int, dict[int, int]] = {}
        """The blocks of each request, by position."""
        self._snapshots: dict[int, int] = {}
        """The state block of each snapshot, by the KV block at whose end it is.

        The least recently used one is first.
        """
        self._used: list[int] = []
        """Blocks that the current step holds, since it reads or writes them."""

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_snapshots(self) -> int:
        return len(self._snapshots)

    # Requests -----------------------------------------------------------------------------------

    def begin(self, req_id: int, kv_blocks: Sequence[int]) -> int:
        """Begin a request after the last of its first KV blocks that has a snapshot.

        Returns the position; 0: there is no snapshot.
        """
        held = self._held[req_id] = {}
        for number in range(len(kv_blocks), 0, -1):
            block_id = self._snapshots.pop(kv_blocks[number - 1], None)
            if block_id is not None:
                self._snapshots[kv_blocks[number - 1]] = block_id
                self._hold(block_id)
                held[number * self._block_size] = block_id
                return number * self._block_size
        return 0

    def take(
        self, req_id: int, start: int, stop: int, num_slots: int, num_drafts: int
    ) -> StatePath | None:
        """Allocate blocks for a request's states after a part, and after each draft but the last.

        KV is kept in the request's first `num_slots` positions, so a state is also kept at their
        end if the part ends later. Returns None, without changes, if there are too few blocks for
        the part itself. There may be fewer drafts, since each further draft needs a block.
        """
        held = self._held[req_id]
        source = held.get(start, NULL_BLOCK)
        kept = min(stop, num_slots)
        required = sorted({kept, stop} - {start})
        positions = [*required, *range(stop + 1, stop + num_drafts)]
        blocks = []
        if source != NULL_BLOCK and kept > start:
            del held[start]
            if self._num_holders[source] == 1:  # a step reads before it writes
                blocks.append(source)
            else:
                self._used.append(source)
        while len(blocks) < len(positions) and (block_id := self._allocate()) is not None:
            blocks.append(block_id)
        if len(blocks) < len(required):
            self._give_back(held, start, source, blocks)
            return None
        path = dict(zip(positions, blocks, strict=False))
        held |= path
        return StatePath(source, path, min(num_drafts, 1 + len(blocks) - len(required)))

    def _give_back(
        self, held: dict[int, int], start: int, source: int, blocks: Sequence[int]
    ) -> None:
        """Restore a request's blocks to those before the allocation."""
        for block_id in blocks:
            if block_id != source:
                self._drop(block_id)
        if source != NULL_BLOCK and start not in held:
            held[start] = source
            if source not in blocks:
                self._used.remove(source)

    def settle(self, req_id: int, position: int) -> None:
        """Keep only the state at the position from which the request continues."""
        held = self._held[req_id]
        for other in [each for each in held if each != position]:
            self._drop(held.pop(other))

    def release(self, req_id: int) -> None:
        """Release the blocks of a request that leaves."""
        for block_id in self._held.pop(req_id, {}).values():
            self._drop(block_id)

    def end_step(self) -> None:
        """Release blocks that only the step has read or written, once it is computed."""
        for block_id in self._used:
            self._drop(block_id)
        self._used.clear()

    # Snapshots ----------------------------------------------------------------------------------

    def ends_of_snapshots(self, start: int, stop: int, num_prompt_tokens: int) -> Iterator[int]:
        """Yield the positions of snapshots between `start` and `stop`, last first."""
        if self._spacing is None:
            return
        size = self._block_size
        ends = set(range((start // self._spacing + 1) * self._spacing, stop + 1, self._spacing))
        end_of_prompt = (num_prompt_tokens - 1) // size * size
        if start < end_of_prompt <= stop:
            ends.add(end_of_prompt)
        yield from sorted(ends, reverse=True)

    def keep(self, req_id: int, kv_block: int, position: int) -> int | None:
        """Keep a snapshot of a request's state at a position, which is the end of a KV block.

        Returns the block that must receive the state; None: nothing more has to be done. Call it
        when all requests of the step have their blocks.
        """
        if kv_block in self._snapshots:
            return None
        block_id = self._held[req_id].get(position)
        if block_id is not None:
            self._hold(block_id)
            self._snapshots[kv_block] = block_id
            return None
        block_id = self._allocate()
        if block_id is not None:
            self._hold(block_id)
            self._used.append(block_id)
            self._snapshots[kv_block] = block_id
        return block_id

    def forget(self, kv_block: int) -> None:
        """Drop the snapshot at the end of a KV block whose contents have changed."""
        block_id = self._snapshots.pop(kv_block, None)
        if block_id is not None:
            self._drop(block_id)

    # Blocks -------------------------------------------------------------------------------------

    def _allocate(self) -> int | None:
        """Return a block with one holder: a free one, or that of the oldest unused snapshot."""
        if not self._free:
            for kv_block, block_id in self._snapshots.items():
                if self._num_holders[block_id] == 1:
                    self.forget(kv_block)
                    break
        if not self._free:
            return None
        block_id = self._free.pop()
        self._hold(block_id)
        return block_id

    def _hold(self, block_id: int) -> None:
        self._num_holders[block_id] += 1

    def _drop(self, block_id: int) -> None:
        self._num_holders[block_id] -= 1
        if self._num_holders[block_id] == 0:
            self._free.append(block_id)

    def check_invariants(self) -> None:
        """Compare the holder counts with the requests and snapshots that hold blocks."""
        holders = [0] * self._num_blocks
        held: list[Mapping[int, int]] = [*self._held.values(), self._snapshots]
        for block_id in (*(each for one in held for each in one.values()), *self._used):
            holders[block_id] += 1
        assert holders == self._num_holders
        assert sorted(self._free) == [
            block_id for block_id in range(1, self._num_blocks) if not holders[block_id]
        ]

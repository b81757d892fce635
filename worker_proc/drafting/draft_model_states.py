"""States of the recurrent layers of a draft model: where those of requests and of prefixes are.

A state stands for all tokens before it, and the core knows nothing of those of a draft model. A
request holds the state at the position up to which the draft model has computed it. While it has
drafts, it also holds those after each of them but the last, and continues from the one after its
last right draft.

Snapshots stand at the ends of KV blocks, at the positions at which the core keeps those of a model:
at multiples of a spacing, and at the last block boundary before the last token of a prompt. A
request whose table begins with such blocks begins from the last of them, and without one from its
first token. They take blocks that nothing else needs: the least recently used is given up first.

A block may be a request's and a snapshot at once. It is written by its only holder, and never
again once it has several.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from protocol.core_worker import NULL_BLOCK


class StatePath(NamedTuple):
    """The state blocks of a request's next part, and of its drafts."""

    source: int
    """Has the state that the part begins from; NULL_BLOCK: it begins with zeros."""
    blocks: dict[int, int]
    """By position: the block that receives the state there."""
    num_drafts: int
    """For how many drafts there are blocks."""


class DraftModelStates:
    """Gives state blocks to requests and snapshots, and takes them back."""

    def __init__(self, num_blocks: int, block_size: int, spacing: int | None) -> None:
        """Take the number of state blocks, the null block included.

        `block_size` is that of KV blocks, `spacing` the tokens between two snapshots; None: none
        are kept.
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
        """Of each request, by position."""
        self._snapshots: dict[int, int] = {}
        """By the KV block at whose end they stand; the least recently used one is the first."""
        self._used: list[int] = []
        """Blocks that the present step holds, since it reads or writes them."""

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_snapshots(self) -> int:
        return len(self._snapshots)

    # Requests -----------------------------------------------------------------------------------

    def begin(self, req_id: int, kv_blocks: Sequence[int]) -> int:
        """Let a request begin after the last of its first KV blocks that has a snapshot.

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
        """Give a request blocks for the states of a part, and of as many drafts after it.

        Its KV is kept in its first `num_slots` positions, so a state is kept where these end, if
        the part ends after them. None: there are too few blocks for the part itself; the request
        keeps what it has. As each draft needs a block, there may be fewer.
        """
        held = self._held[req_id]
        source = held.get(start, NULL_BLOCK)
        kept = min(stop, num_slots)
        least = sorted({kept, stop} - {start})
        positions = [*least, *range(stop + 1, stop + num_drafts)]
        blocks = []
        if source != NULL_BLOCK and kept > start:
            del held[start]
            if self._num_holders[source] == 1:  # a step reads before it writes
                blocks.append(source)
            else:
                self._used.append(source)
        while len(blocks) < len(positions) and (block_id := self._allocate()) is not None:
            blocks.append(block_id)
        if len(blocks) < len(least):
            self._give_back(held, start, source, blocks)
            return None
        path = dict(zip(positions, blocks, strict=False))
        held |= path
        return StatePath(source, path, min(num_drafts, 1 + len(blocks) - len(least)))

    def _give_back(
        self, held: dict[int, int], start: int, source: int, blocks: Sequence[int]
    ) -> None:
        """Leave a request what it had before blocks were taken for it."""
        for block_id in blocks:
            if block_id != source:
                self._drop(block_id)
        if source != NULL_BLOCK and start not in held:
            held[start] = source
            if source not in blocks:
                self._used.remove(source)

    def settle(self, req_id: int, position: int) -> None:
        """Keep the state at a position only, from which the request continues."""
        held = self._held[req_id]
        for other in [each for each in held if each != position]:
            self._drop(held.pop(other))

    def release(self, req_id: int) -> None:
        """Take the blocks of a request that leaves."""
        for block_id in self._held.pop(req_id, {}).values():
            self._drop(block_id)

    def end_step(self) -> None:
        """Release what only the step has read or written, once it is computed."""
        for block_id in self._used:
            self._drop(block_id)
        self._used.clear()

    # Snapshots ----------------------------------------------------------------------------------

    def ends_of_snapshots(self, start: int, stop: int, num_prompt_tokens: int) -> Iterator[int]:
        """Yield where snapshots are kept of what is computed from `start` to `stop`, last first."""
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

        Returns the block that must receive the state; None: nothing is left to be done. Called when
        all requests of the step have taken their blocks.
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
        """Drop the snapshot at the end of a KV block, which has got other contents."""
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
        """Compare the numbers of holders with the requests and snapshots that hold blocks."""
        holders = [0] * self._num_blocks
        held: list[Mapping[int, int]] = [*self._held.values(), self._snapshots]
        for block_id in (*(each for one in held for each in one.values()), *self._used):
            holders[block_id] += 1
        assert holders == self._num_holders
        assert sorted(self._free) == [
            block_id for block_id in range(1, self._num_blocks) if not holders[block_id]
        ]

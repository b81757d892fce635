"""The null runner's states in the form that stores use: the number and a digest of the tokens."""

import struct
from collections.abc import Sequence

from worker_proc.null.states import State
from worker_proc.offload.memory import Parts, Wait, no_wait

_STATE = struct.Struct("<QI")


class NullStateMemory:
    """State blocks, and slots for those in transit."""

    block_bytes = _STATE.size
    is_asleep = False

    def __init__(self, blocks: dict[int, State], num_slots: int) -> None:
        self.num_slots = num_slots
        self._blocks = blocks
        self._slots = [bytearray(self.block_bytes) for _ in range(num_slots)]

    def parts(self, slot: int) -> Parts:
        return [memoryview(self._slots[slot])]

    def wake(self) -> None:
        pass

    def copy_out(self, block_ids: Sequence[int], slots: Sequence[int]) -> Wait:
        for block_id, slot in zip(block_ids, slots, strict=True):
            _STATE.pack_into(self._slots[slot], 0, *self._blocks[block_id])
        return no_wait

    def copy_in(self, slot: int, block_id: int) -> None:
        self._blocks[block_id] = State(*_STATE.unpack(self._slots[slot]))

"""The arrays that a step of the native kernels points to.

In a decode step that follows another, each text advances by one token: its first position and its
slot are incremented in place, and its table gains an entry when it begins a block. Everything else
stays.
"""

import ctypes
import struct
from array import array
from collections.abc import Sequence
from itertools import accumulate, repeat
from typing import Any, NamedTuple

import torch

from worker_proc.attention.work import SECTION
from worker_proc.inputs import NULL_SLOT, BegunBlock

SPARE_BLOCKS = 4
"""Spare entries in each table."""


class _Group(NamedTuple):
    """The arrays that differ between KV groups."""

    slots: torch.Tensor
    slot_array: Any
    """The same memory, in which setting single values is much faster."""
    offsets: list[int]
    """The index of each text's block 0 in `tables`."""
    tables: "array[int]"


class StepMemory:
    """The arrays of one step."""

    def __init__(self, starts: list[int], block_size: int, windows: Sequence[int | None]) -> None:
        """Take the position of each text's first token, and each KV group's window."""
        self._starts = starts
        self._block_size = block_size
        self._windows = windows
        self._kept: list[array[int]] = []
        self._groups: list[_Group] = []
        self._moves_left: int | None = None
        self.starts_at = self.pointer(starts)
        self._start_array = self._kept[0]

    def pointer(self, column: Sequence[int]) -> int:
        """Return the address of an int32 copy of `column`."""
        return self._address(struct.pack(f"{len(column)}i", *column))  # faster than a tensor

    def add_group(
        self, slots: torch.Tensor, tables: Sequence["array[int]"], firsts: Sequence[int]
    ) -> tuple[int, int, int]:
        """Add a KV group; return the addresses of its slots, offsets and tables.

        `firsts` has the block number, in its text, of each table's first entry.
        """
        spare = bytes(4 * SPARE_BLOCKS)
        ends = accumulate((len(table) + SPARE_BLOCKS for table in tables), initial=0)
        offsets = [end - first for end, first in zip(ends, firsts, strict=False)]
        joined = b"".join(part for pair in zip(tables, repeat(spare)) for part in pair)
        addresses = slots.data_ptr(), self.pointer(offsets), self._address(joined)
        slot_array = (ctypes.c_int64 * len(slots)).from_address(slots.data_ptr())
        self._groups.append(_Group(slots, slot_array, offsets, self._kept[-1]))
        return addresses

    def move_on(self, begun: Sequence[BegunBlock]) -> bool:
        """Advance every text by one token, in place; False: the step must be built anew."""
        if self._moves_left is None:
            self._moves_left = self._count_moves()
        if self._moves_left == 0:
            return False
        self._moves_left -= 1
        torch.frombuffer(self._start_array, dtype=torch.int32).add_(1)
        for group in self._groups:
            group.slots.add_(1)
        size = self._block_size
        for row, number, request in begun:
            # The table of state blocks follows those of the groups.
            for group, table in zip(self._groups, request.block_tables, strict=False):
                block_id = table[number]
                group.tables[group.offsets[row] + number] = block_id
                group.slot_array[row] = block_id * size
        return True

    def _count_moves(self) -> int:
        """Return how often a step can advance before tables are full or sections change."""
        if any(bool((group.slots == NULL_SLOT).any()) for group in self._groups):
            return 0
        moves = [SPARE_BLOCKS * self._block_size]
        for window in {None, *self._windows}:
            first = 0 if window is None else 1 - window
            moves += [SECTION - 1 - (start + first) % SECTION for start in self._starts]
        return min(moves)

    def _address(self, values: bytes) -> int:
        kept = array("i", values)
        self._kept.append(kept)
        return kept.buffer_info()[0]

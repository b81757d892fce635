"""A written program as native calls: one for all instructions, or one from hook to hook."""

import ctypes
from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

from worker_proc.attention.interface import PagedLayer
from worker_proc.decoder.hooks import Cut
from worker_proc.decoder.program import ProgramWriter
from worker_proc.native.structures import Instruction, ProgramArgs


class Segment(NamedTuple):
    """Instructions of one native call, and the hooks that are called after it."""

    args: ProgramArgs
    cuts: list[Cut]


class Program:
    """The instructions for one pool; keeps alive everything that they point to."""

    def __init__(
        self,
        key: tuple[int, ...],
        paged: list[PagedLayer],
        first_layers: list[int],
        writer: ProgramWriter,
        is_bf16: bool,
    ) -> None:
        self.key = key
        self.first_layers = first_layers
        """For each kind of angles, the first layer that uses it."""
        self._paged = paged  # kept alive so that the key stays unique
        self._adapted = writer.projections.adapted
        self._array = (Instruction * len(writer.instructions))(*writer.instructions)
        self._is_bf16 = is_bf16
        self._boundaries = [*writer.boundaries, len(writer.instructions)]
        self._cuts = writer.projections.cuts
        self._segments: dict[range, list[Segment]] = {}

    @cached_property
    def all_instructions(self) -> ProgramArgs:
        """All instructions in one call, for a program without hooks."""
        return self._args(0, len(self._array))

    def segments(self, layers: range) -> list[Segment]:
        """Return the calls for consecutive layers; a single one if they have no hooks."""
        found = self._segments.get(layers)
        if found is None:
            found = self._segments[layers] = list(self._segments_of(layers))
        return found

    def _segments_of(self, layers: range) -> Iterator[Segment]:
        first, last = self._boundaries[layers.start], self._boundaries[layers.stop]
        cuts = [cut for cut in self._cuts if cut.point.layer in layers]
        for index in sorted({cut.position for cut in cuts}):
            yield Segment(self._args(first, index), [cut for cut in cuts if cut.position == index])
            first = index
        yield Segment(self._args(first, last), [])

    def _args(self, first: int, last: int) -> ProgramArgs:
        address = ctypes.addressof(self._array) + first * ctypes.sizeof(Instruction)
        return ProgramArgs(address, last - first, self._is_bf16)

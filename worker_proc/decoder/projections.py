"""Writes projections, with the instructions that their adapters and formats require."""

import ctypes
from collections.abc import Mapping
from typing import Any

import torch

from worker_proc.adapters.rows import MAX_SITES
from worker_proc.adapters.sites import Site
from worker_proc.decoder.adapter_sites import Projection
from worker_proc.decoder.buffers import CODES, HIDDEN, PERMUTED
from worker_proc.native.packed_weights import Format, PackedWeight
from worker_proc.native.structures import AdaptedSiteArgs, Instruction, Kind

_ADAPTING = (Kind.SHRINK, Kind.EXPAND)


class ProjectionWriter:
    """Writes projections to the end of a program."""

    def __init__(
        self,
        instructions: list[Instruction],
        sites: Mapping[tuple[int, Projection], tuple[int, Site]],
    ) -> None:
        """Take the program, and the numbered sites of projections by layer."""
        self.adapted: list[Any] = []
        """Arrays of sites that instructions point to."""
        self._instructions = instructions
        self._sites = sites
        self._layer = -1
        self._coded = HIDDEN
        """The buffer that CODES was computed from."""
        self._permuted: tuple[int, torch.Tensor] | None = None
        """The buffer that PERMUTED was computed from, and the order."""

    def begin_layer(self) -> None:
        """Count the following projections to the next layer."""
        self._layer += 1

    def is_adapted(self, name: Projection) -> bool:
        """Return whether adapters may add to a projection of this layer."""
        return (self._layer, name) in self._sites

    def write(
        self,
        instruction: Instruction,
        weight: PackedWeight,
        columns: Mapping[Projection, int] | None = None,
    ) -> None:
        """Write an instruction that computes one or several projections of a buffer's rows.

        `columns` has the first column of each projection's outputs in the target. None: the outputs
        are not stored, and none of the projections is adapted.
        """
        source = instruction.source
        if weight.order is not None:
            self._permute(source, weight.order)
            instruction.source = PERMUTED
        if instruction.format == Format.INT8_FOR_CODES:
            self._code(source, instruction.size)
            instruction.source = CODES
        self._instructions += self._adapting(instruction, source, columns or {})

    def _adapting(
        self, instruction: Instruction, source: int, columns: Mapping[Projection, int]
    ) -> list[Instruction]:
        """Return an instruction together with those that add adapter products to its projections.

        The inner values of adapters are computed in the same phase as the projection, from the same
        rows.
        """
        layer = self._layer
        found = [
            (*self._sites[layer, n], c) for n, c in columns.items() if (layer, n) in self._sites
        ]
        if not found:
            return [instruction]
        assert len(found) <= MAX_SITES
        array = (AdaptedSiteArgs * len(found))(
            *(AdaptedSiteArgs(number, site.num_outputs, column) for number, site, column in found)
        )
        self.adapted.append(array)
        sites = {"weight": ctypes.addressof(array), "num_units": len(found)}
        size = found[0][1].num_inputs
        shrink = Instruction(kind=Kind.SHRINK, source=source, size=size, **sites)
        shrink.joins_next = True
        return [
            shrink,
            instruction,
            Instruction(kind=Kind.EXPAND, target=instruction.target, **sites),
        ]

    def _permute(self, source: int, order: torch.Tensor) -> None:
        """Write rows in an order, unless the previous projection has taken the same rows."""
        before = self._projected_before()
        is_there = before is not None and before.source == PERMUTED
        if is_there and self._permuted is not None:
            same_source, same_order = self._permuted
            if same_source == source and torch.equal(same_order, order):
                return
        self._instructions.append(
            Instruction(
                kind=Kind.PERMUTE,
                source=source,
                target=PERMUTED,
                weight=order.data_ptr(),
                size=len(order),
            )
        )
        self._permuted = source, order

    def _code(self, source: int, size: int) -> None:
        """Write codes of rows, unless the previous projection has taken the same rows."""
        before = self._projected_before()
        has_codes = before is not None and before.kind == Kind.PROJECT and before.source == CODES
        if not has_codes or self._coded != source:
            code = Instruction(kind=Kind.CODE, source=source, target=CODES, size=size)
            self._instructions.append(code)
            self._coded = source

    def _projected_before(self) -> Instruction | None:
        """Return the last instruction, skipping those that add adapter products."""
        others = (one for one in reversed(self._instructions) if one.kind not in _ADAPTING)
        return next(others, None)

"""Writes projections, with the instructions that their hooks, adapters and formats require.

A projection with a hook after it is not fused with the operation that follows: its outputs are
stored, and a separate instruction adds or activates them. Values are rounded at the same points, so
that a hook that changes nothing changes no bit.
"""

import ctypes
from collections.abc import Collection, Mapping
from typing import Any

import torch

from worker_proc.adapters.rows import MAX_SITES
from worker_proc.adapters.sites import Site
from worker_proc.decoder.buffers import CODES, HIDDEN, PERMUTED
from worker_proc.decoder.hooks import Columns, Cut, HookPoint, Projection, When
from worker_proc.native.packed_weights import Format, PackedWeight
from worker_proc.native.structures import AdaptedSiteArgs, Instruction, Kind

_ADAPTING = (Kind.SHRINK, Kind.EXPAND)


class ProjectionWriter:
    """Writes projections to the end of a program, with cuts at hooks."""

    def __init__(
        self,
        instructions: list[Instruction],
        points: Collection[HookPoint],
        sites: Mapping[tuple[int, Projection], tuple[int, Site]],
    ) -> None:
        """Take the program, its hooks, and the numbered sites of projections by layer."""
        self.cuts: list[Cut] = []
        self.adapted: list[Any] = []
        """Arrays of sites that instructions point to."""
        self._instructions = instructions
        self._points = points
        self._sites = sites
        self._layer = -1
        self._coded = HIDDEN
        """The buffer that CODES was computed from."""
        self._permuted: tuple[int, torch.Tensor] | None = None
        """The buffer that PERMUTED was computed from, and the order."""

    def begin_layer(self) -> None:
        """Count the following projections to the next layer."""
        self._layer += 1

    def is_hooked(self, name: Projection, when: When) -> bool:
        """Return whether one side of a projection in this layer has a hook or an adapter site."""
        layer = self._layer
        is_adapted = when is When.AFTER and (layer, name) in self._sites
        return is_adapted or HookPoint(layer, name, when) in self._points

    def write(
        self,
        instruction: Instruction,
        weight: PackedWeight,
        inputs: Columns,
        outputs: dict[Projection, Columns],
    ) -> None:
        """Write a projection, with hooks before and after it."""
        self._cut(When.BEFORE, inputs, outputs)
        if weight.order is not None:
            self._permute(inputs.buffer, weight.order)
            instruction.source = PERMUTED
        if instruction.format == Format.INT8_FOR_CODES:
            self._code(inputs.buffer, instruction.size)
            instruction.source = CODES
        self._instructions += self._adapting(instruction, inputs, outputs)
        self._cut(When.AFTER, inputs, outputs)

    def _adapting(
        self, instruction: Instruction, inputs: Columns, outputs: Mapping[Projection, Columns]
    ) -> list[Instruction]:
        """Return an instruction together with those that add adapter products to its projections.

        The inner values of adapters are computed in the same phase as the projection, from the same
        rows.
        """
        layer = self._layer
        found = [
            (*self._sites[layer, n], c) for n, c in outputs.items() if (layer, n) in self._sites
        ]
        if not found:
            return [instruction]
        assert len(found) <= MAX_SITES
        array = (AdaptedSiteArgs * len(found))(
            *(
                AdaptedSiteArgs(number, site.num_outputs, columns.first)
                for number, site, columns in found
            )
        )
        self.adapted.append(array)
        sites = {"weight": ctypes.addressof(array), "num_units": len(found)}
        size = found[0][1].num_inputs
        shrink = Instruction(kind=Kind.SHRINK, source=inputs.buffer, size=size, **sites)
        shrink.joins_next = True
        return [
            shrink,
            instruction,
            Instruction(kind=Kind.EXPAND, target=instruction.target, **sites),
        ]

    def _permute(self, source: int, order: torch.Tensor) -> None:
        """Write rows in an order, unless the previous projection has taken the same rows."""
        before = self._projected_before()
        is_there = before is not None and before.source == PERMUTED and not self._is_cut_here()
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
        if self._is_cut_here() or not has_codes or self._coded != source:
            code = Instruction(kind=Kind.CODE, source=source, target=CODES, size=size)
            self._instructions.append(code)
            self._coded = source

    def _projected_before(self) -> Instruction | None:
        """Return the last instruction, skipping those that add adapter products."""
        others = (one for one in reversed(self._instructions) if one.kind not in _ADAPTING)
        return next(others, None)

    def _is_cut_here(self) -> bool:
        """Return whether a hook, which may change rows, is called before the next instruction."""
        return bool(self.cuts) and self.cuts[-1].position == len(self._instructions)

    def _cut(self, when: When, inputs: Columns, outputs: dict[Projection, Columns]) -> None:
        """Cut the program here if one side of a projection has a hook."""
        for name, columns in outputs.items():
            point = HookPoint(self._layer, name, when)
            if point in self._points:
                made = columns if when is When.AFTER else columns._replace(width=0)
                self.cuts.append(Cut(len(self._instructions), point, inputs, made))

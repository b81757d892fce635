"""Writes the program of a decoder: the instructions of its layers, and where they can be cut.

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
from worker_proc.attention.interface import PagedLayer
from worker_proc.attention.native import NativeBackend
from worker_proc.decoder.buffers import (
    ATTENDED,
    CHOICES,
    CODES,
    EXPERT_CODES,
    EXPERT_INNER,
    GATHERED,
    HIDDEN,
    INNER,
    LOGITS,
    NORMED,
    OUTPUT,
    PERMUTED,
    PROJECTED,
    QKV,
    SPLIT,
    first_factor,
)
from worker_proc.decoder.hooks import Columns, Cut, HookPoint, Projection, When
from worker_proc.decoder.layers import DecoderLayer, LayerSettings
from worker_proc.modules.experts.mixture import FusedExperts
from worker_proc.modules.experts.products import ExpertBuffers
from worker_proc.modules.mlp import FusedMLP
from worker_proc.modules.pointwise import FusedRMSNorm
from worker_proc.native.instructions import embedding, projection
from worker_proc.native.packed_weights import Format, PackedWeight
from worker_proc.native.structures import AdaptedSiteArgs, Epilogue, Instruction, Kind

GATES = (Projection.GATE, Projection.UP)
_MAKE_ROWS = (Kind.EMBED, Kind.ADD)
"""Like a norm, these divide the rows equally among the threads, and do nothing else."""
_ADAPTING = (Kind.SHRINK, Kind.EXPAND)
_NOWHERE = Columns(HIDDEN, 0, 0)
"""Stands for outputs that are fused with the next operation and that no hook reads."""


class ProgramWriter:
    """Writes layer after layer, with cuts at hooks."""

    def __init__(
        self,
        points: Collection[HookPoint],
        sites: Mapping[tuple[int, Projection], tuple[int, Site]] | None = None,
        *,
        adds_ranks: bool = False,
    ) -> None:
        """Take hooks, and the numbered sites of projections by layer, for steps with adapters.

        With `adds_ranks`, a layer is one rank's part, and the sums over all ranks are added to the
        residual.
        """
        self.instructions: list[Instruction] = []
        self.boundaries: list[int] = []
        """The index of each layer's first instruction."""
        self.adapted: list[Any] = []
        """Arrays of sites that instructions point to."""
        self.cuts: list[Cut] = []
        self._points = points
        self._sites = sites or {}
        self._adds_ranks = adds_ranks
        self._first_of_kept: int | None = None
        """The first instruction that computes only the rows that get logits."""
        self._coded = HIDDEN
        """The buffer that CODES was computed from."""
        self._permuted: tuple[int, torch.Tensor] | None = None
        """The buffer that PERMUTED was computed from, and the order."""

    def add_layer(
        self,
        layer: DecoderLayer,
        settings: LayerSettings,
        angles: int,
        cosines: torch.Tensor,
        *,
        keeps: bool = False,
    ) -> None:
        """Write the instructions of one layer; `angles` is the number of its kind of angles.

        With `keeps`, its attention may leave out the rows that get no logits, and everything after
        it does.
        """
        self.boundaries.append(len(self.instructions))
        norms, spec = layer.norms, layer.paged.spec
        self._queries_and_keys(layer, self._normed(norms.before_attention))
        self.instructions += [
            _rotation(layer, settings, angles, cosines),
            _attention(layer.paged, settings),
        ]
        if keeps:
            self.instructions[-1].of_kept = True
            self._keep(ATTENDED)
        inputs = Columns(ATTENDED, 0, spec.num_heads * spec.value_head_dim)
        self._residual(layer, Projection.OUT, layer.out, inputs, norms.after_attention)
        source = self._normed(norms.before_mlp)
        if isinstance(layer.mlp, FusedExperts):
            self.instructions += layer.mlp.instructions(
                ExpertBuffers(
                    source,
                    LOGITS,
                    CHOICES,
                    GATHERED,
                    EXPERT_INNER,
                    CODES,
                    EXPERT_CODES,
                    PROJECTED,
                )
            )
            self._add_projected(layer, norms.after_mlp)
            return
        self._gates(layer.mlp, Columns(source, 0, layer.hidden_size))
        assert layer.down is not None
        inputs = Columns(INNER, 0, layer.mlp.size)
        self._residual(layer, Projection.DOWN, layer.down, inputs, norms.after_mlp)

    def add_embedding(
        self, table: torch.Tensor | PackedWeight, num_tokens: int, factor: float
    ) -> None:
        """Write the initial residual of the step's tokens: rows of a table, times a factor."""
        self.instructions.append(embedding(table, num_tokens, target=HIDDEN, factor=factor))

    def add_logits(self, norm: FusedRMSNorm, weight: PackedWeight) -> None:
        """Write the last norm and the output layer, for the rows that get logits."""
        if self._first_of_kept is None:
            self._keep(HIDDEN)
        self.instructions.append(projection(weight, source=self._normed(norm), target=OUTPUT))
        for instruction in self.instructions[self._first_of_kept :]:
            instruction.of_kept = True

    def _keep(self, buffer: int) -> None:
        """Drop the rows that get no logits, from the residual and from another buffer."""
        self.instructions.append(Instruction(kind=Kind.KEEP, source=HIDDEN, target=buffer))
        self._first_of_kept = len(self.instructions)

    def _normed(self, norm: FusedRMSNorm | None) -> int:
        """Write a norm of the residual, if there is one; return the buffer of the result."""
        if norm is None:
            return HIDDEN
        before = self.instructions[-1] if self.instructions else None
        if before is not None and before.kind in _MAKE_ROWS and before.target == HIDDEN:
            before.joins_next = True
        self.instructions.append(_norm(norm, HIDDEN, NORMED))
        return NORMED

    def _queries_and_keys(self, layer: DecoderLayer, source: int) -> None:
        """Write projections to queries, keys and values, and norms over all heads together."""
        spec = layer.paged.spec
        widths = (
            spec.num_heads * spec.head_dim,
            spec.num_kv_heads * spec.head_dim,
            spec.num_kv_heads * spec.value_head_dim,
        )
        firsts = (0, widths[0], widths[0] + widths[1])
        inputs = Columns(source, 0, layer.hidden_size)
        outputs = {
            name: Columns(QKV, first, width)
            for name, first, width in zip(
                (Projection.QUERY, Projection.KEY, Projection.VALUE), firsts, widths, strict=True
            )
        }
        # Each writes whole panels: the next one overwrites the values after its outputs.
        groups = [outputs] if len(layer.qkv) == 1 else [{name: outputs[name]} for name in outputs]
        for weight, first, group in zip(layer.qkv, firsts, groups, strict=False):
            instruction = projection(weight, source=source, target=QKV, column=first)
            self._project(instruction, weight, inputs, group)
        norms = layer.query_norm, layer.key_norm
        if norms[0] is not None and norms[1] is not None and not layer.norms_each_head:
            self.instructions.append(_norm(norms[0], QKV, QKV))
            self.instructions.append(_norm(norms[1], QKV, QKV, column=widths[0]))

    def _gates(self, mlp: FusedMLP, inputs: Columns) -> None:
        """Write the activated gates times the factors."""
        if not any(self._is_hooked(name, When.AFTER) for name in GATES):
            instruction = projection(
                mlp.gate_up,
                source=inputs.buffer,
                target=INNER,
                epilogue=Epilogue.ACTIVATE,
                activation=mlp.activation,
            )
            self._project(instruction, mlp.gate_up, inputs, dict.fromkeys(GATES, _NOWHERE))
            return
        column = first_factor(mlp)
        outputs = {
            Projection.GATE: Columns(SPLIT, 0, mlp.size),
            Projection.UP: Columns(SPLIT, column, mlp.size),
        }
        instruction = projection(
            mlp.gate_up,
            source=inputs.buffer,
            target=SPLIT,
            column=column,
            epilogue=Epilogue.SPLIT,
        )
        self._project(instruction, mlp.gate_up, inputs, outputs)
        self.instructions.append(
            Instruction(
                kind=Kind.GATE,
                source=SPLIT,
                target=INNER,
                size=mlp.size,
                column=column,
                activation=mlp.activation,
            )
        )

    def _residual(
        self,
        layer: DecoderLayer,
        name: Projection,
        weight: PackedWeight,
        inputs: Columns,
        norm: FusedRMSNorm | None,
    ) -> None:
        """Project back and add to the residual, after the projection's norm if there is one."""
        if norm is None and not self._adds_ranks and not self._is_hooked(name, When.AFTER):
            adding = {"epilogue": Epilogue.ADD_TO, "factor": layer.residual_factor}
            instruction = projection(weight, source=inputs.buffer, target=HIDDEN, **adding)
            self._project(instruction, weight, inputs, {name: _NOWHERE})
            return
        instruction = projection(weight, source=inputs.buffer, target=PROJECTED)
        outputs = {name: Columns(PROJECTED, 0, layer.hidden_size)}
        self._project(instruction, weight, inputs, outputs)
        self._add_projected(layer, norm)

    def _add_projected(self, layer: DecoderLayer, norm: FusedRMSNorm | None) -> None:
        """Add the projection to the residual, normalizing it first if there is a norm."""
        if self._adds_ranks:
            add = Instruction(kind=Kind.ADD_RANKS, target=PROJECTED, size=layer.hidden_size)
            self.instructions.append(add)
        if norm is not None:
            normalize = _norm(norm, PROJECTED, PROJECTED)
            normalize.joins_next = True
            self.instructions.append(normalize)
        adding = {"size": layer.hidden_size, "factor": layer.residual_factor}
        self.instructions.append(
            Instruction(kind=Kind.ADD, source=PROJECTED, target=HIDDEN, **adding)
        )

    def _project(
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
        self.instructions += self._adapting(instruction, inputs, outputs)
        self._cut(When.AFTER, inputs, outputs)

    def _adapting(
        self, instruction: Instruction, inputs: Columns, outputs: Mapping[Projection, Columns]
    ) -> list[Instruction]:
        """Return an instruction together with those that add adapter products to its projections.

        The inner values of adapters are computed in the same phase as the projection, from the same
        rows.
        """
        layer = len(self.boundaries) - 1
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
        is_cut = bool(self.cuts) and self.cuts[-1].position == len(self.instructions)
        is_there = before is not None and before.source == PERMUTED and not is_cut
        if is_there and self._permuted is not None:
            same_source, same_order = self._permuted
            if same_source == source and torch.equal(same_order, order):
                return
        self.instructions.append(
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
        is_cut = bool(self.cuts) and self.cuts[-1].position == len(self.instructions)
        has_codes = before is not None and before.kind == Kind.PROJECT and before.source == CODES
        if is_cut or not has_codes or self._coded != source:
            code = Instruction(kind=Kind.CODE, source=source, target=CODES, size=size)
            self.instructions.append(code)
            self._coded = source

    def _projected_before(self) -> Instruction | None:
        """Return the last instruction, skipping those that add adapter products."""
        others = (one for one in reversed(self.instructions) if one.kind not in _ADAPTING)
        return next(others, None)

    def _cut(self, when: When, inputs: Columns, outputs: dict[Projection, Columns]) -> None:
        layer = len(self.boundaries) - 1
        for name, columns in outputs.items():
            point = HookPoint(layer, name, when)
            if point in self._points:
                made = columns if when is When.AFTER else columns._replace(width=0)
                self.cuts.append(Cut(len(self.instructions), point, inputs, made))

    def _is_hooked(self, name: Projection, when: When) -> bool:
        """Return whether one side of a projection in this layer has a hook or an adapter site."""
        layer = len(self.boundaries) - 1
        is_adapted = when is When.AFTER and (layer, name) in self._sites
        return is_adapted or HookPoint(layer, name, when) in self._points


def _rotation(
    layer: DecoderLayer, settings: LayerSettings, angles: int, cosines: torch.Tensor
) -> Instruction:
    spec = layer.paged.spec
    rotate = Instruction(
        kind=Kind.ROTATE,
        source=QKV,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        num_rotated=cosines.shape[-1],
        angles=angles,
        has_wide_angles=cosines.dtype == torch.float32,
        rotation=settings.rotation,
    )
    if layer.query_norm is not None and layer.key_norm is not None and layer.norms_each_head:
        rotate.query_norm = layer.query_norm.factors.data_ptr()
        rotate.key_norm = layer.key_norm.factors.data_ptr()
        rotate.epsilon = layer.query_norm.epsilon
        rotate.rounds_first = layer.query_norm.round_first
    return rotate


def _attention(paged: PagedLayer, settings: LayerSettings) -> Instruction:
    assert isinstance(paged.backend, NativeBackend)
    return Instruction(
        kind=Kind.ATTEND,
        source=QKV,
        target=ATTENDED,
        group=paged.group,
        scale=settings.scale,
        softcap=settings.softcap,
        layer=ctypes.addressof(paged.backend.layer_args(paged)),
    )


def _norm(norm: FusedRMSNorm, source: int, target: int, column: int = 0) -> Instruction:
    return Instruction(
        kind=Kind.NORMALIZE,
        source=source,
        target=target,
        size=len(norm.factors),
        column=column,
        weight=norm.factors.data_ptr(),
        epsilon=norm.epsilon,
        rounds_first=norm.round_first,
    )

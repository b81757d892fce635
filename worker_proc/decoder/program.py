"""Writes the program of a decoder: its embedding, its layers and its output layer.

Operations that follow a projection are fused with it, unless an adapter adds to the outputs of the
projection. Values are rounded at the same points in both cases.
"""

import ctypes
from collections.abc import Mapping

import torch

from worker_proc.adapters.sites import Site
from worker_proc.attention.interface import PagedLayer
from worker_proc.decoder.adapter_sites import Projection
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
    PROJECTED,
    QKV,
    SPLIT,
    first_factor,
)
from worker_proc.decoder.layer_instructions import attention, gating, normalization, rotation
from worker_proc.decoder.layers import DecoderLayer, LayerSettings
from worker_proc.decoder.projections import ProjectionWriter
from worker_proc.modules.experts.mixture import FusedExperts
from worker_proc.modules.experts.products import ExpertBuffers
from worker_proc.modules.mlp import FusedMLP
from worker_proc.modules.pointwise import FusedRMSNorm
from worker_proc.native.instructions import embedding, projection
from worker_proc.native.packed_weights import PackedWeight
from worker_proc.native.structures import Epilogue, Instruction, Kind, ProgramArgs

GATES = (Projection.GATE, Projection.UP)
_MAKE_ROWS = (Kind.EMBED, Kind.ADD)
"""Like a norm, these divide the rows equally among the threads, and do nothing else."""


class ProgramWriter:
    """Writes one layer after the other."""

    def __init__(
        self, sites: Mapping[tuple[int, Projection], tuple[int, Site]] | None, *, adds_ranks: bool
    ) -> None:
        """Take the numbered sites of projections by layer; None: for steps without adapters.

        With `adds_ranks`, a layer is one rank's part, and the sums over all ranks are added to the
        residual.
        """
        self.instructions: list[Instruction] = []
        self.projections = ProjectionWriter(self.instructions, sites or {})
        self._adds_ranks = adds_ranks
        self._first_of_kept: int | None = None
        """The first instruction that computes only the rows that get logits."""

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
        self.projections.begin_layer()
        norms = layer.norms
        self._queries_and_keys(layer, self._normed(norms.before_attention))
        self.instructions += [
            rotation(layer, settings, angles, cosines),
            attention(layer.paged, settings),
        ]
        if keeps:
            self.instructions[-1].of_kept = True
            self._keep(ATTENDED)
        self._residual(layer, Projection.OUT, layer.out, ATTENDED, norms.after_attention)
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
        self._gates(layer.mlp, source)
        assert layer.down is not None
        self._residual(layer, Projection.DOWN, layer.down, INNER, norms.after_mlp)

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
        self.instructions.append(normalization(norm, HIDDEN, NORMED))
        return NORMED

    def _queries_and_keys(self, layer: DecoderLayer, source: int) -> None:
        """Write projections to queries, keys and values, and norms over all heads together."""
        spec = layer.paged.spec
        first_key = spec.num_heads * spec.head_dim
        first_value = first_key + spec.num_kv_heads * spec.head_dim
        columns = {Projection.QUERY: 0, Projection.KEY: first_key, Projection.VALUE: first_value}
        groups = [columns] if len(layer.qkv) == 1 else [{n: first} for n, first in columns.items()]
        # Each writes whole panels: the next one overwrites the values after its outputs.
        for weight, group in zip(layer.qkv, groups, strict=True):
            column = min(group.values())
            instruction = projection(weight, source=source, target=QKV, column=column)
            self.projections.write(instruction, weight, group)
        norms = layer.query_norm, layer.key_norm
        if norms[0] is not None and norms[1] is not None and not layer.norms_each_head:
            self.instructions.append(normalization(norms[0], QKV, QKV))
            self.instructions.append(normalization(norms[1], QKV, QKV, column=first_key))

    def _gates(self, mlp: FusedMLP, source: int) -> None:
        """Write the activated gates times the factors."""
        if not any(map(self.projections.is_adapted, GATES)):
            instruction = projection(
                mlp.gate_up,
                source=source,
                target=INNER,
                epilogue=Epilogue.ACTIVATE,
                activation=mlp.activation,
            )
            self.projections.write(instruction, mlp.gate_up)
            return
        column = first_factor(mlp)
        instruction = projection(
            mlp.gate_up,
            source=source,
            target=SPLIT,
            column=column,
            epilogue=Epilogue.SPLIT,
        )
        columns = {Projection.GATE: 0, Projection.UP: column}
        self.projections.write(instruction, mlp.gate_up, columns)
        self.instructions.append(gating(mlp))

    def _residual(
        self,
        layer: DecoderLayer,
        name: Projection,
        weight: PackedWeight,
        source: int,
        norm: FusedRMSNorm | None,
    ) -> None:
        """Project back and add to the residual, after the projection's norm if there is one."""
        is_adapted = self.projections.is_adapted(name)
        if norm is None and not self._adds_ranks and not is_adapted:
            adding = {"epilogue": Epilogue.ADD_TO, "factor": layer.residual_factor}
            instruction = projection(weight, source=source, target=HIDDEN, **adding)
            self.projections.write(instruction, weight)
            return
        instruction = projection(weight, source=source, target=PROJECTED)
        self.projections.write(instruction, weight, {name: 0})
        self._add_projected(layer, norm)

    def _add_projected(self, layer: DecoderLayer, norm: FusedRMSNorm | None) -> None:
        """Add the projection to the residual, normalizing it first if there is a norm."""
        if self._adds_ranks:
            add = Instruction(kind=Kind.ADD_RANKS, target=PROJECTED, size=layer.hidden_size)
            self.instructions.append(add)
        if norm is not None:
            normalize = normalization(norm, PROJECTED, PROJECTED)
            normalize.joins_next = True
            self.instructions.append(normalize)
        adding = {"size": layer.hidden_size, "factor": layer.residual_factor}
        self.instructions.append(
            Instruction(kind=Kind.ADD, source=PROJECTED, target=HIDDEN, **adding)
        )


class Program:
    """A written program, for one pool; keeps alive everything that its instructions point to."""

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
        self.args = ProgramArgs(ctypes.addressof(self._array), len(self._array), is_bf16)

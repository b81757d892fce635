"""Attention over windows and compressed entries, by the native kernel.

See native/attention/compressed_attention.h. A row's result depends only on its own text.
"""

from collections.abc import Sequence

import torch

from worker_proc.attention.compression import Compression, Parameters
from worker_proc.attention.interface import PagedLayer, Rows, Scoring
from worker_proc.attention.native import NativeBackend
from worker_proc.attention.work import Shares, Work
from worker_proc.inputs import StepInputs
from worker_proc.kv.kv_groups import CompressedSpec
from worker_proc.native.structures import (
    CompressedLayerArgs,
    CompressedRowsArgs,
    CompressorArgs,
    RowsArgs,
)
from worker_proc.request import ScheduledRequest


class CompressedBackend(NativeBackend):
    """Attention of a model with compressors, reading the pool in place."""

    name = "native kernel for compressed entries"
    _positions: torch.Tensor
    _num_texts: int
    _ends: dict[int, torch.Tensor]
    """The rows whose tokens complete a group, by group size."""

    def _share(self, parts: Sequence[ScheduledRequest], group: int) -> Shares:
        """Return no pieces of work: the kernel divides its own work."""
        return Shares(Work([], [], [0], [], [], [], [], []), 0, 0)

    def begin_step(self, inputs: StepInputs) -> None:
        super().begin_step(inputs)
        self._positions = inputs.position_ids[0]
        self._num_texts = len(inputs.parts)
        self._ends = {}

    def attend(self, layer: PagedLayer, rows: Rows, scoring: Scoring) -> torch.Tensor:
        spec, compression = layer.spec, layer.compression
        compressed = spec.compressed
        assert compressed is not None
        assert scoring.softcap is None
        args = _layer_args(layer, compressed, self._block_size, scoring.scale)
        stored, step = [rows.key[:, 0]], CompressedRowsArgs()
        kept: list[torch.Tensor] = []  # until the kernel has run
        if compression is not None:
            for name in compression.parameters:
                stored += compression.contributions[name]
            kept = self._describe_entries(args, step, compression, rows.key)
        whole = torch.cat(stored, dim=1)
        query = rows.query if rows.query.stride(2) == 1 else rows.query.contiguous()
        step.query = RowsArgs(query.data_ptr(), query.stride(0), query.stride(1))
        step.stored, step.num_texts = whole.data_ptr(), self._num_texts
        kept_blocks = self.steps[0]
        step.entry_table_offset, step.entry_tables = kept_blocks.table_offset, kept_blocks.tables
        out = query.new_empty(len(query), spec.num_heads, spec.head_dim)
        self._library.attend_compressed(args, self.steps[layer.group], step, out)
        del kept
        if compression is not None:
            compression.clear()
        return out

    def _describe_entries(
        self,
        args: CompressedLayerArgs,
        step: CompressedRowsArgs,
        compression: Compression,
        rows: torch.Tensor,
    ) -> list[torch.Tensor]:
        """Describe how entries are built and chosen; return the tensors that are pointed to."""
        at = args.head_dim
        entry_at = 0
        for name, parameters in compression.parameters.items():
            width = compression.contributions[name].values.shape[1]
            compressor = _compressor_args(parameters, at, at + width, entry_at)
            if entry_at == 0:
                args.attended = compressor
            else:
                args.indexed = compressor
            at += 2 * width
            entry_at += compressor.dim
        ends = self._ends_of(args.ratio)
        cosines, sines = compression.angles(rows, self._positions[ends] + 1 - args.ratio)
        args.rope_dim = 2 * cosines.shape[1]
        step.num_ends, step.end_rows = len(ends), ends.data_ptr()
        step.cosines, step.sines = cosines.data_ptr(), sines.data_ptr()
        kept = [ends, cosines, sines]
        if compression.index is not None:
            args.index_scale = compression.index_scale
            queries, weights = (part.contiguous() for part in compression.index)
            step.index_queries, step.index_weights = queries.data_ptr(), weights.data_ptr()
            kept += [queries, weights]
        return kept

    def _ends_of(self, ratio: int) -> torch.Tensor:
        if ratio not in self._ends:
            self._ends[ratio] = ((self._positions + 1) % ratio == 0).nonzero().flatten()
        return self._ends[ratio]


def _layer_args(
    layer: PagedLayer, compressed: CompressedSpec, block_size: int, scale: float
) -> CompressedLayerArgs:
    spec, place, pool = layer.spec, layer.place, layer.kv.keys
    assert place is not None
    return CompressedLayerArgs(
        rows=pool[:, place.rows_at :].data_ptr(),
        entries=pool[:, place.entries_at :].data_ptr(),
        sinks=None if layer.sinks is None else layer.sinks.data_ptr(),
        block_stride=pool.stride(0),
        num_heads=spec.num_heads,
        head_dim=spec.head_dim,
        block_size=block_size,
        window=compressed.window,
        is_bf16=pool.dtype == torch.bfloat16,
        ratio=compressed.ratio,
        num_series=compressed.num_series,
        row_width=compressed.row_width(spec.head_dim),
        entry_width=compressed.entry_width(spec.head_dim),
        num_index_heads=compressed.num_index_heads,
        num_chosen=compressed.num_chosen,
        scale=scale,
    )


def _compressor_args(
    parameters: Parameters, values_at: int, gates_at: int, entry_at: int
) -> CompressorArgs:
    biases, factors, epsilon = parameters
    addresses = (biases.data_ptr(), factors.data_ptr())
    return CompressorArgs(*addresses, epsilon, len(factors), values_at, gates_at, entry_at)

"""The CPU's fast backend: attends over the pool in place, without gathering.

The kernel's results for a token depend on its own text alone, so they are the same bits whatever
batch, chunk or step it is computed in.
"""

import torch

from worker_proc.attention.interface import PagedLayer, Rows, Scoring
from worker_proc.attention.layer_spec import LayerSpec
from worker_proc.inputs import StepInputs
from worker_proc.native.kernels import NATIVE_DTYPES, LayerArgs, NativeLibrary, StepArgs

MAX_HEAD_DIM = 512
MAX_HEADS_PER_KV_HEAD = 32
ITEM_TOKENS = 64
"""Tokens of one chunk that one thread takes at a time."""


def can_attend(specs: list[LayerSpec], dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether the kernel covers these layers."""
    return (
        device.type == "cpu"
        and dtype in NATIVE_DTYPES
        and all(
            max(spec.head_dim, spec.value_head_dim) <= MAX_HEAD_DIM
            and spec.num_heads // spec.num_kv_heads <= MAX_HEADS_PER_KV_HEAD
            for spec in specs
        )
    )


class NativeBackend:
    """Attention by the native kernel; see the module's description."""

    def __init__(self, library: NativeLibrary, block_size: int, dtype: torch.dtype) -> None:
        self._library = library
        self._block_size = block_size
        self._is_bf16 = dtype == torch.bfloat16
        self._layers: dict[PagedLayer, LayerArgs] = {}
        self._step = StepArgs()
        self._arrays: list[torch.Tensor] = []

    def pool_shapes(
        self, spec: LayerSpec, num_blocks: int
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return `[block, kv_head, dim, slot]` and, for values, `[block, kv_head, slot, dim]`."""
        heads, size = spec.num_kv_heads, self._block_size
        return (
            (num_blocks, heads, spec.head_dim, size),
            (num_blocks, heads, size, spec.value_head_dim),
        )

    def begin_step(self, inputs: StepInputs) -> None:
        """Lay out the step's segments and share its work out into items."""
        parts = inputs.parts
        tables: list[int] = []
        offsets: list[int] = []
        items: list[tuple[int, int]] = []
        for segment, part in enumerate(parts):
            offsets.append(len(tables))
            tables += part.request.block_ids[: (part.end - 1) // self._block_size + 1]
            items += [(segment, token) for token in range(0, part.num_tokens, ITEM_TOKENS)]
        items.sort(key=lambda item: parts[item[0]].num_tokens)
        columns = (
            inputs.first_rows,
            [part.num_tokens for part in parts],
            [part.start for part in parts],
            offsets,
            tables,
            [segment for segment, _ in items],
            [token for _, token in items],
        )
        self._arrays = [torch.tensor(column, dtype=torch.int32) for column in columns]
        self._arrays.append(inputs.slot_mapping)
        pointers = [array.data_ptr() for array in self._arrays]
        num_rows = len(inputs.slot_mapping)
        self._step = StepArgs(num_rows, len(items), ITEM_TOKENS, pointers[-1], *pointers[:-1])

    def attend(
        self,
        layer: PagedLayer,
        rows: Rows,
        scoring: Scoring,
    ) -> torch.Tensor:
        """Store the row's keys and values, and attend; see `AttentionBackend`."""
        known = self._layers.get(layer)
        if known is None:
            known = self._layers[layer] = self._describe(layer)
        spec = layer.spec
        out = rows.query.new_empty(len(rows.query), spec.num_heads, spec.value_head_dim)
        numbers = (scoring.scale, scoring.softcap or 0.0)
        self._library.attend(known, self._step, Rows(*map(_dense, rows)), numbers, out)
        return out

    def _describe(self, layer: PagedLayer) -> LayerArgs:
        spec, kv = layer.spec, layer.kv
        assert kv.keys.is_contiguous()
        assert kv.values.is_contiguous()
        return LayerArgs(
            kv.keys.data_ptr(),
            kv.values.data_ptr(),
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            spec.value_head_dim,
            self._block_size,
            spec.window or 0,
            self._is_bf16,
        )


def _dense(rows: torch.Tensor) -> torch.Tensor:
    return rows if rows.stride(2) == 1 else rows.contiguous()

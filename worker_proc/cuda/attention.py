"""Launches the attention kernels over tensors of one step."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton

from worker_proc.attention.interface import PagedLayer, Scoring
from worker_proc.cuda.attention_kernels import attend_kernel
from worker_proc.cuda.block_kernels import store_kernel
from worker_proc.cuda.split_kernels import combine_kernel
from worker_proc.kv.kv_groups import LayerSpec
from worker_proc.kv.kv_tensors import KVTensors
from worker_proc.request import ScheduledRequest

INTERPRETED_UNITS = 8
"""The number of multiprocessors that is assumed when the kernels are interpreted."""
MIN_TILE = 16
"""The smallest tile of a matrix product."""
PREFILL_ROWS = 64
"""The number of query rows of a prefill tile, over tokens and heads."""
MAX_TILE_KEYS = 64
WIDE_DIM = 128
"""Tiles of heads with more dimensions are narrower."""
TILE_SPLITS = 16
"""The number of splits that are summed at a time."""
STAGES = 3
"""The number of stages of the load pipeline."""
STAGES_OF_WHOLE_TILES = 2
"""Likewise for loops without masks: with less shared memory, more programs run at a time."""
MIN_SPLIT_TOKENS = 256
"""The least context of a split."""
MAX_PARTIAL_RESULTS = 4096
"""The maximum number of partial results for each head: parts of a step, times splits."""


class DeviceStep(NamedTuple):
    """The parts of a step, as arrays on the device; see block_kernels.py."""

    first_rows: torch.Tensor  # int32 [P + 1]
    starts: torch.Tensor  # int32 [P]
    table_rows: torch.Tensor  # int32 [P]
    kept_from: torch.Tensor  # int32 [P]
    num_rows: int
    num_decodes: int  # number of parts with one token
    num_splits: int  # number of splits of a decode's context

    @property
    def num_parts(self) -> int:
        return len(self.starts)


class PagedStep(NamedTuple):
    """A step over the KV of one layer."""

    step: DeviceStep
    table: torch.Tensor  # int32 [rows, blocks]: the block table of the layer's group
    kv: KVTensors


def choose_num_splits(
    num_parts: int, num_decodes: int, spec: LayerSpec, longest: int, num_units: int
) -> int:
    """Return the number of programs that share a context of `longest` tokens.

    It keeps the device's `num_units` multiprocessors busy, unless splits become too short. There is
    room for partial results of all parts, although only `num_decodes` of them have any.
    """
    wanted = 2 * num_units // max(num_decodes * spec.num_kv_heads, 1)
    return max(1, min(wanted, longest // MIN_SPLIT_TOKENS, MAX_PARTIAL_RESULTS // num_parts))


class Tiles(NamedTuple):
    """The numbers of query rows and keys that a program computes at a time."""

    decode_rows: int
    prefill_rows: int
    keys: int


def choose_tiles(spec: LayerSpec, dtype: torch.dtype) -> Tiles:
    """Return tiles that fit in a program's shared memory: narrow tiles for wide rows."""
    narrowing = (max(spec.head_dim, spec.value_head_dim) > WIDE_DIM) + (dtype == torch.float32)
    min_rows = max(MIN_TILE, triton.next_power_of_2(spec.num_heads // spec.num_kv_heads))
    prefill_rows = PREFILL_ROWS // 2 if narrowing == 2 else PREFILL_ROWS
    return Tiles(min_rows, max(prefill_rows, min_rows), MAX_TILE_KEYS >> narrowing)


def store(paged: PagedStep, key: torch.Tensor, value: torch.Tensor) -> None:
    """Store keys and values, `[T, kv_heads, dim]`, in their blocks."""
    step, table, kv = paged
    num_rows, num_kv_heads, head_dim = key.shape
    value_dim = value.shape[2]
    store_kernel[(num_rows,)](
        key,
        value,
        kv.keys,
        kv.values,
        table,
        *(step.first_rows, step.starts, step.table_rows, step.kept_from, step.num_parts),
        (key.stride(0), key.stride(1)),
        (value.stride(0), value.stride(1)),
        table.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        PADDED_HEADS=triton.next_power_of_2(num_kv_heads),
        HEAD_DIM=head_dim,
        PADDED_DIM=triton.next_power_of_2(head_dim),
        VALUE_DIM=value_dim,
        PADDED_VALUE_DIM=triton.next_power_of_2(value_dim),
        BLOCK_SIZE=kv.keys.shape[1],
    )


def attend(
    paged: PagedStep,
    query: torch.Tensor,
    spec: LayerSpec,
    scoring: Scoring,
    sinks: torch.Tensor | None = None,
    *,
    is_batch_invariant: bool = False,
) -> torch.Tensor:
    """Attend for `[T, num_heads, head_dim]` over stored KV; return `[T, num_heads, value_dim]`.

    `sinks` are logits, one for each head, that take a share of the softmax. If the result must not
    depend on the batch, prefill tiles also compute decodes, and one loop covers all keys, because a
    tile's shape and a loop without masks may change the last bits.
    """
    step = paged.step
    out = query.new_empty(step.num_rows, spec.num_heads, spec.value_head_dim)
    tiles = choose_tiles(spec, query.dtype)
    layer = _LayerAttention(paged, query, spec, scoring, sinks, out, tiles.keys, is_batch_invariant)
    if step.num_decodes and not is_batch_invariant:
        layer.launch(step.num_parts, tiles.decode_rows, step.num_splits, is_decode=True)
    if step.num_decodes < step.num_parts or is_batch_invariant:
        tile_tokens = tiles.prefill_rows // (spec.num_heads // spec.num_kv_heads)
        num_tiles = step.num_rows // tile_tokens + step.num_parts
        layer.launch(num_tiles, tiles.prefill_rows, 1, is_decode=False)
    return out


class _LayerAttention(NamedTuple):
    """The arguments of `attend`, its result, and the number of keys of a tile."""

    paged: PagedStep
    query: torch.Tensor
    spec: LayerSpec
    scoring: Scoring
    sinks: torch.Tensor | None
    out: torch.Tensor
    tile_keys: int
    is_batch_invariant: bool

    def launch(self, num_tiles: int, tile_rows: int, num_splits: int, *, is_decode: bool) -> None:
        """Attend with tiles of one kind, for the parts of the step that they compute."""
        (step, table, kv), query, spec, scoring, sinks, out, tile_keys, is_invariant = self
        heads, value_dim = spec.num_heads, spec.value_head_dim
        is_split = num_splits > 1
        shape = (step.num_parts, heads, num_splits) if is_split else (0, 0, 0)
        sums = query.new_empty(*shape, value_dim, dtype=torch.float32)
        stats = query.new_empty(*shape, 2, dtype=torch.float32)
        has_whole_tiles = not is_decode and not is_invariant
        sizes = {
            "NUM_HEADS": heads,
            "VALUE_DIM": value_dim,
            "PADDED_VALUE_DIM": max(MIN_TILE, triton.next_power_of_2(value_dim)),
            "HAS_SINKS": sinks is not None,
        }
        attend_kernel[(num_tiles, spec.num_kv_heads, num_splits)](
            *(query, kv.keys, kv.values, sinks, out, sums, stats, table),
            *(step.first_rows, step.starts, step.table_rows, step.num_parts),
            (query.stride(0), query.stride(1)),
            table.stride(0),
            scoring.scale,
            scoring.softcap or 0.0,
            **sizes,
            NUM_KV_HEADS=spec.num_kv_heads,
            HEAD_DIM=spec.head_dim,
            PADDED_DIM=max(MIN_TILE, triton.next_power_of_2(spec.head_dim)),
            BLOCK_SIZE=kv.keys.shape[1],
            WINDOW=spec.window or 0,
            HAS_SOFTCAP=scoring.softcap is not None,
            TILE_KEYS=tile_keys,
            IS_DECODE=is_decode,
            IS_SPLIT=is_split,
            MIN_TOKENS=1 if is_invariant else 2,
            HAS_WHOLE_TILES=has_whole_tiles,
            TILE_ROWS=tile_rows,
            TILE_TOKENS=1 if is_decode else tile_rows // (heads // spec.num_kv_heads),
            num_stages=STAGES_OF_WHOLE_TILES if has_whole_tiles else STAGES,
        )
        if is_split:
            combine_kernel[(step.num_parts, heads)](
                *(sums, stats, sinks, out, step.first_rows, num_splits),
                **sizes,
                TILE_SPLITS=TILE_SPLITS,
            )


class TritonAttention:
    """Attends by the engine's own kernels, which need no plan."""

    name = "Triton"

    def __init__(
        self,
        specs: Sequence[LayerSpec],
        device: torch.device,
        *,
        is_batch_invariant: bool = False,
    ) -> None:
        self.depends_on_batch = not is_batch_invariant
        self._spec = max(specs, key=lambda spec: spec.num_kv_heads)
        self._num_units = INTERPRETED_UNITS
        if device.type == "cuda":
            self._num_units = torch.cuda.get_device_properties(device).multi_processor_count

    def num_splits(self, num_parts: int, num_decodes: int, longest: int) -> int:
        """Return the number of programs that share each decode's context."""
        return choose_num_splits(num_parts, num_decodes, self._spec, longest, self._num_units)

    def begin_step(self, parts: Sequence[ScheduledRequest], first_rows: list[int]) -> None:
        """Do nothing: the kernels find their work in the step's arrays."""

    def begin_static_step(self, parts: Sequence[ScheduledRequest], size: int) -> None:
        """Do nothing, as in `begin_step`."""

    def attend(
        self, paged: PagedStep, query: torch.Tensor, layer: PagedLayer, scoring: Scoring
    ) -> torch.Tensor:
        """Return `[T, num_heads, value_dim]` for the queries of a step's rows."""
        exact = not self.depends_on_batch
        return attend(paged, query, layer.spec, scoring, layer.sinks, is_batch_invariant=exact)

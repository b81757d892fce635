"""The attention backend of CUDA devices: Triton kernels over block tables on the device."""

from collections.abc import Sequence

import torch

from worker_proc.attention.interface import PagedLayer, Rows, Scoring
from worker_proc.cuda.attention import (
    MAX_HEAD_DIM,
    MAX_HEADS_PER_KV_HEAD,
    DeviceStep,
    PagedStep,
    attend,
    choose_num_splits,
    store,
)
from worker_proc.cuda.block_tables import BlockTables
from worker_proc.inputs import StepInputs
from worker_proc.kv.kv_groups import LayerSpec
from worker_proc.kv.kv_tensors import Shapes
from worker_proc.mirror import ScheduledRequest

INTERPRETED_UNITS = 8  # of a processor, where the kernels are interpreted


def can_attend_by_triton(specs: Sequence[LayerSpec]) -> bool:
    """Return whether the kernels cover these layers."""
    return all(
        max(spec.head_dim, spec.value_head_dim) <= MAX_HEAD_DIM
        and spec.num_heads // spec.num_kv_heads <= MAX_HEADS_PER_KV_HEAD
        and not spec.is_chunked
        for spec in specs
    )


class TritonBackend:
    """Attention in place; a step sends its parts and new table entries in one copy."""

    name = "Triton"

    def __init__(
        self, specs: Sequence[LayerSpec], num_groups: int, block_size: int, device: torch.device
    ) -> None:
        self._block_size = block_size
        self._device = device
        self._spec = max(specs, key=lambda spec: spec.num_kv_heads)
        self._num_units = INTERPRETED_UNITS
        if device.type == "cuda":
            self._num_units = torch.cuda.get_device_properties(device).multi_processor_count
        self.tables = BlockTables(num_groups, device)
        self.step: DeviceStep | None = None
        """The present step."""
        self.rows: Sequence[int] = ()
        """The table row of each part of the present step."""

    def pool_shapes(self, spec: LayerSpec, num_blocks: int) -> Shapes:
        """Return `[block, slot, kv_head, dim]`, for keys and for values."""
        rows = (num_blocks, self._block_size, spec.num_kv_heads)
        return (*rows, spec.head_dim), (*rows, spec.value_head_dim)

    def num_splits(self, num_parts: int, num_decodes: int, longest: int) -> int:
        """Return over how many programs the contexts of decodes are divided."""
        return choose_num_splits(num_parts, num_decodes, self._spec, longest, self._num_units)

    def begin_step(self, inputs: StepInputs) -> None:
        parts = inputs.parts
        num_rows = inputs.input_ids.shape[1]
        columns, first_rows = self.upload(parts, [*inputs.first_rows, num_rows], len(parts))
        decodes = [part.end for part in parts if part.num_tokens == 1]
        num_splits = self.num_splits(len(parts), len(decodes), max(decodes, default=0))
        starts, table_rows, kept_from = columns
        by_part = (first_rows, starts, table_rows, kept_from)
        self.step = DeviceStep(*by_part, num_rows, len(decodes), num_splits)

    def upload(
        self, parts: Sequence[ScheduledRequest], first_rows: list[int], size: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Bring the tables up to date, and return what a `DeviceStep` holds of each part.

        That is `[3, size]`: starts, table rows and positions that KV is kept from. Columns after
        those of the parts write to the null block and attend to it.
        """
        rows, update = self.tables.assign(parts)
        self.rows = rows
        num_filled = size - len(parts)
        columns = (
            *(part.start for part in parts),
            *[0] * num_filled,
            *rows,
            *[self.tables.null_row] * num_filled,
            *(part.request.num_cached_tokens for part in parts),
            *[0] * num_filled,
        )
        packed = self._to_device([*columns, *first_rows, *update.places, *update.block_ids])
        sizes = [len(columns), len(first_rows), len(update.places), len(update.places)]
        by_part, on_device, places, block_ids = packed.split(sizes)
        if update.places:
            self.tables.tensor.view(-1).index_copy_(0, places.long(), block_ids)
        return by_part.view(3, size), on_device

    def _to_device(self, values: list[int]) -> torch.Tensor:
        if self._device.type == "cpu":
            return torch.tensor(values, dtype=torch.int32)
        host = torch.tensor(values, dtype=torch.int32, pin_memory=True)
        return host.to(self._device, non_blocking=True)

    def attend(self, layer: PagedLayer, rows: Rows, scoring: Scoring) -> torch.Tensor:
        if layer.spec.kv_source is None:
            store(self.place(layer), _dense(rows.key), _dense(rows.value))
        return self.attend_stored(layer, _dense(rows.query), scoring)

    def attend_stored(
        self, layer: PagedLayer, query: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        """Attend where the step's keys and values are stored already."""
        return attend(self.place(layer), query, layer.spec, scoring, layer.sinks)

    def place(self, layer: PagedLayer) -> PagedStep:
        """Return the present step over a layer's KV."""
        assert self.step is not None
        return PagedStep(self.step, self.tables.tensor[layer.group], layer.kv)


def _dense(rows: torch.Tensor) -> torch.Tensor:
    return rows if rows.stride(2) == 1 else rows.contiguous()

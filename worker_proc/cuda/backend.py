"""The attention backend of CUDA devices: keys and values in blocks, with tables on the device."""

from collections.abc import Sequence
from typing import Protocol

import torch

from worker_proc.attention.interface import PagedLayer, Rows, Scoring
from worker_proc.cuda.attention import DeviceStep, PagedStep, store
from worker_proc.cuda.block_tables import BlockTables
from worker_proc.inputs import StepInputs
from worker_proc.kv.kv_groups import LayerSpec
from worker_proc.kv.kv_tensors import Shapes
from worker_proc.request import ScheduledRequest


class StepAttention(Protocol):
    """An implementation of attention over stored keys and values."""

    @property
    def name(self) -> str:
        """The backend's name, as shown in the start line."""

    @property
    def depends_on_batch(self) -> bool:
        """True if a row's result may depend on other rows."""

    def num_splits(self, num_parts: int, num_decodes: int, longest: int) -> int:
        """Return the number of programs that share each decode's context."""

    def begin_step(self, parts: Sequence[ScheduledRequest], first_rows: list[int]) -> None:
        """Prepare a step; `first_rows` ends with the number of its rows."""

    def begin_static_step(self, parts: Sequence[ScheduledRequest], size: int) -> None:
        """Prepare a step of single tokens over static buffers, padded to `size` rows."""

    def attend(
        self, paged: PagedStep, query: torch.Tensor, layer: PagedLayer, scoring: Scoring
    ) -> torch.Tensor:
        """Return `[T, num_heads, value_dim]` for the queries of a step's rows."""


class CudaBackend:
    """Attention in place; a step sends its parts and new table entries in one copy."""

    def __init__(
        self, num_groups: int, block_size: int, device: torch.device, attention: StepAttention
    ) -> None:
        self._block_size = block_size
        self._device = device
        self.attention = attention
        self.name = attention.name
        self.depends_on_batch = attention.depends_on_batch
        self.tables = BlockTables(num_groups, device)
        self.step: DeviceStep | None = None
        """The current step."""
        self.rows: Sequence[int] = ()
        """The table row of each part of the current step."""

    def pool_shapes(self, spec: LayerSpec, num_blocks: int) -> Shapes:
        """Return `[block, slot, kv_head, dim]`, for keys and for values."""
        rows = (num_blocks, self._block_size, spec.num_kv_heads)
        return (*rows, spec.head_dim), (*rows, spec.value_head_dim)

    def begin_step(self, inputs: StepInputs) -> None:
        parts = inputs.parts
        num_rows = inputs.input_ids.shape[1]
        all_rows = [*inputs.first_rows, num_rows]
        columns, first_rows = self._upload(parts, all_rows, len(parts))
        self.attention.begin_step(parts, all_rows)
        decodes = [part.end for part in parts if part.num_tokens == 1]
        num_splits = self.attention.num_splits(len(parts), len(decodes), max(decodes, default=0))
        starts, table_rows, kept_from = columns
        by_part = (first_rows, starts, table_rows, kept_from)
        self.step = DeviceStep(*by_part, num_rows, len(decodes), num_splits)

    def begin_static_step(self, parts: Sequence[ScheduledRequest], size: int) -> torch.Tensor:
        """Prepare a step of single tokens over static buffers; return its `[3, size]` columns."""
        columns, _ = self._upload(parts, [], size)
        self.attention.begin_static_step(parts, size)
        return columns

    def _upload(
        self, parts: Sequence[ScheduledRequest], first_rows: list[int], size: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Update the tables, and return the columns and first rows of a `DeviceStep`.

        The columns are `[3, size]`: starts, table rows, and the first positions whose KV is kept.
        Padding columns write to the null block and attend to it.
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
        packed = self._to_device([*columns, *first_rows, *update.indices, *update.block_ids])
        sizes = [len(columns), len(first_rows), len(update.indices), len(update.indices)]
        by_part, on_device, indices, block_ids = packed.split(sizes)
        if update.indices:
            self.tables.tensor.view(-1).index_copy_(0, indices.long(), block_ids)
        return by_part.view(3, size), on_device

    def _to_device(self, values: list[int]) -> torch.Tensor:
        if self._device.type == "cpu":
            return torch.tensor(values, dtype=torch.int32)
        host = torch.tensor(values, dtype=torch.int32, pin_memory=True)
        return host.to(self._device, non_blocking=True)

    def attend(self, layer: PagedLayer, rows: Rows, scoring: Scoring) -> torch.Tensor:
        if layer.spec.kv_source is None:
            store(self.paged_step(layer), _dense(rows.key), _dense(rows.value))
        return self.attend_stored(layer, _dense(rows.query), scoring)

    def attend_stored(
        self, layer: PagedLayer, query: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        """Attend to keys and values of the step that are already stored."""
        return self.attention.attend(self.paged_step(layer), query, layer, scoring)

    def paged_step(self, layer: PagedLayer) -> PagedStep:
        """Return the current step over a layer's KV."""
        assert self.step is not None
        return PagedStep(self.step, self.tables.tensor[layer.group], layer.kv)


def _dense(rows: torch.Tensor) -> torch.Tensor:
    return rows if rows.stride(2) == 1 else rows.contiguous()

"""Block tables that stay on the device: a step sends only the new entries.

Each running request has a row. The rows are a cache of the mirror's tables: when all are taken, the
least recently used one is reassigned to the next request, and a request that has lost its row sends
its table again. The end of a request need therefore not be reported.
"""

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch

from worker_proc.request import ScheduledRequest

MIN_ROWS, MIN_BLOCKS = 16, 64


class Update(NamedTuple):
    """Entries that a step must write before it reads the tables."""

    indices: list[int]  # in the flattened tables
    block_ids: list[int]


class _Row:
    """A request's row, and the number of entries sent to it."""

    def __init__(self, index: int, tables: "list[array[int]]") -> None:
        self.index = index
        self.tables = tables
        """The request's own tables, which grow; keeping them alive keeps their identity unique."""
        self.num_sent = 0  # entries sent of each table


class BlockTables:
    """Tables of all KV groups, int32 `[groups, rows, blocks]`; the last row is always null."""

    def __init__(self, num_groups: int, device: torch.device) -> None:
        self._num_groups = num_groups
        self._device = device
        self._rows: dict[int, _Row] = {}  # by the identity of its tables; least recently used first
        self.tensor = torch.zeros(0, 0, 0, dtype=torch.int32, device=device)
        self.reserve(MIN_ROWS, MIN_BLOCKS)

    @property
    def null_row(self) -> int:
        """The row of padding tokens."""
        return self.tensor.shape[1] - 1

    def reserve(self, num_rows: int, num_blocks: int) -> None:
        """Make room for this many requests, and blocks of each; the tensor moves only then."""
        _, rows, blocks = self.tensor.shape
        if num_rows < rows and num_blocks <= blocks:
            return
        if num_blocks > blocks:
            # A multiple, since kernels are compiled for the alignment of a table's rows.
            num_blocks = -(-max(num_blocks, 2 * blocks) // MIN_BLOCKS) * MIN_BLOCKS
        shape = (self._num_groups, max(num_rows + 1, rows), max(num_blocks, blocks))
        self.tensor = torch.zeros(shape, dtype=torch.int32, device=self._device)
        self._rows.clear()

    def assign(self, parts: Sequence[ScheduledRequest]) -> tuple[list[int], Update]:
        """Return the row of each part, and the entries to write to the tables first."""
        max_blocks = max(len(part.request.block_tables[0]) for part in parts)
        _, rows, blocks = self.tensor.shape
        if len(parts) >= rows or max_blocks > blocks:
            self.reserve(max(len(parts), rows - 1), max(max_blocks, blocks))
        update = Update([], [])
        indices = []
        unknown = []
        for index, part in enumerate(parts):
            tables = part.request.block_tables
            row = self._rows.pop(id(tables), None)
            if row is None:
                unknown.append(index)
                indices.append(-1)
                continue
            self._rows[id(tables)] = row  # now it is the newest
            indices.append(row.index)
            if len(tables[0]) > row.num_sent:
                self._send(row, update)
        for index in unknown:
            tables = parts[index].request.block_tables
            row = self._rows[id(tables)] = _Row(self._free_row(), tables)
            indices[index] = row.index
            self._send(row, update)
        return indices, update

    def _free_row(self) -> int:
        """Return an unused row, or the least recently used one, which no part of this step has."""
        if len(self._rows) < self.null_row:
            # Rows are taken in order, and a freed row is reused at once.
            return len(self._rows)
        oldest = next(iter(self._rows))
        return self._rows.pop(oldest).index

    def _send(self, row: _Row, update: Update) -> None:
        _, num_rows, num_blocks = self.tensor.shape
        for group, table in enumerate(row.tables):
            first = (group * num_rows + row.index) * num_blocks
            update.indices.extend(range(first + row.num_sent, first + len(table)))
            update.block_ids.extend(table[row.num_sent :])
        row.num_sent = len(row.tables[0])

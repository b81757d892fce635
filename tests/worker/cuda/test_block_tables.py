"""The tables on the device equal those of the mirror, whatever a step sends."""

import random

import pytest
import torch

from protocol.sampling import SamplingParams
from worker_proc.cuda.block_tables import MIN_BLOCKS, MIN_ROWS, BlockTables
from worker_proc.request import MirroredRequest, ScheduledRequest

PARAMS = SamplingParams()


def part_of(tables: list[list[int]]) -> ScheduledRequest:
    request = MirroredRequest(0, [1], 1, PARAMS, tables, 0, 0)
    return ScheduledRequest(request, 0, 1, True)


def apply(tables: BlockTables, parts: list[ScheduledRequest]) -> int:
    """Write what a step sends, and check all rows; returns the number of entries sent."""
    rows, update = tables.assign(parts)
    indices = torch.tensor(update.indices, dtype=torch.long)
    assert len(set(update.indices)) == len(update.indices)
    tables.tensor.view(-1)[indices] = torch.tensor(update.block_ids, dtype=torch.int32)
    assert len(set(rows)) == len(rows)
    assert tables.null_row not in rows
    for row, part in zip(rows, parts, strict=True):
        for group, table in enumerate(part.request.block_tables):
            assert tables.tensor[group, row, : len(table)].tolist() == table
    assert not tables.tensor[:, tables.null_row].any()
    return len(update.indices)


@pytest.mark.parametrize("seed", range(4))
def test_any_sequence_of_steps_leaves_the_rows_right(seed: int) -> None:
    rng = random.Random(seed)
    tables = BlockTables(2, torch.device("cpu"))
    running: list[list[list[int]]] = []
    for step in range(300):
        while len(running) > rng.randrange(1, 40):
            running.pop(rng.randrange(len(running)))
        for _ in range(rng.randrange(4)):
            running.append([[rng.randrange(1, 99) for _ in range(3)] for _ in range(2)])
        if not running:
            continue
        for request in running:
            if rng.random() < 0.3:
                for table in request:
                    table.append(rng.randrange(1, 99))
        chosen = [request for request in running if rng.random() < 0.8] or running[:1]
        if step == 100:
            running[0] = [[7] * (MIN_BLOCKS + 1)] * 2
            chosen = [running[0]]
        apply(tables, [part_of(request) for request in chosen])


def test_a_steady_step_sends_nothing() -> None:
    tables = BlockTables(1, torch.device("cpu"))
    requests = [[[index + 1]] for index in range(MIN_ROWS)]
    parts = [part_of(request) for request in requests]
    assert apply(tables, parts) == MIN_ROWS
    assert apply(tables, parts) == 0
    requests[3][0].append(9)
    assert apply(tables, parts) == 1


def test_the_row_that_was_used_least_recently_is_given_away() -> None:
    tables = BlockTables(1, torch.device("cpu"))
    parts = [part_of([[index + 1]]) for index in range(MIN_ROWS)]
    apply(tables, parts)
    apply(tables, parts[1:])
    assert apply(tables, [part_of([[50]])]) == 1  # in the row of the first
    assert apply(tables, parts[1:]) == 0
    assert apply(tables, parts[:1]) == 1


def test_reserved_tables_do_not_move() -> None:
    tables = BlockTables(1, torch.device("cpu"))
    tables.reserve(100, 500)
    tensor = tables.tensor
    apply(tables, [part_of([[1] * 500]) for _ in range(100)])
    assert tables.tensor is tensor

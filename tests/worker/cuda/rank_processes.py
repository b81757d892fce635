"""Ranks of a test, in processes of their own, which torch.distributed needs."""

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.worker.cuda.interpreter import prepare_triton
from worker_proc.parallel.share import Share

prepare_triton()
from worker_proc.cuda.rank_group import RankGroup  # noqa: E402

TIMEOUT_S = 280.0
WIDTH = 6


def in_ranks(num_ranks: int, compute: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Return what `compute` returns in each of some processes, given its rank and arguments."""
    context = multiprocessing.get_context("spawn")
    pool = context.Pool(num_ranks)
    with pool:
        calls = [(rank, num_ranks, *arguments) for rank in range(num_ranks)]
        return pool.starmap_async(compute, calls, chunksize=1).get(TIMEOUT_S)


def sum_rows(rank: int, num_ranks: int, path: Path) -> dict[str, Any]:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    share = Share(rank, num_ranks)
    group = RankGroup(share, torch.device("cpu"), timeout_s=TIMEOUT_S, slot_bytes=4 * WIDTH * 2)
    group.join(path, [1, 2, 3])
    rows = rows_of(num_ranks)
    sums = [each[rank].clone() for each in rows]
    for each in sums:
        group.add(each)
    token_ids = torch.tensor([7, 8 + (rank == 1), 9])
    group.mark_differences(token_ids)
    group.mark_differences(token_ids[:0])
    group.join(path, [1, 2, 3])
    with pytest.raises(RuntimeError, match="another rank was replaced"):
        group.join(path, [1, 2, 4])
    columns = [group.gather(each[rank][:, :2]) for each in rows]
    return {"sums": sums, "columns": columns, "token_ids": token_ids.tolist()}


def rows_of(num_ranks: int) -> list[torch.Tensor]:
    """Return rows of all ranks, in steps of several sizes: one fits into a slot, and one does not.

    The sum of three such values depends on its order.
    """
    generator = torch.Generator().manual_seed(0)
    shapes = [(num_ranks, num_rows, WIDTH) for num_rows in (1, 3, 9)]
    return [(torch.randn(shape, generator=generator) * 1e3).bfloat16() for shape in shapes]

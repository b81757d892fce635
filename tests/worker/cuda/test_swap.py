"""Blocks are copied between device and host in one launch for each direction."""

from typing import Any

import pytest
import torch

from protocol.core_worker import BlockCopies
from tests.worker.cuda.interpreter import DEVICE, prepare_triton
from worker_proc.kv.kv_pool import KVPool

prepare_triton()
from tests.worker.cuda.variants import note_variants  # noqa: E402
from worker_proc.cuda import swap  # noqa: E402

WHOLE = [((6, 2, 4), (6, 2, 700)), ((6, 4), (6, 2))]
ODD = [((6, 3, 5), (6, 1)), ((6, 5), (6, 7))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shapes", [WHOLE, ODD], ids=["whole words", "odd sizes"])
def test_blocks_go_out_before_others_come_in(
    shapes: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU does the same. The tensors differ in size, and one is longer than a tile."""
    kernel, launches = swap.copy_blocks_kernel, []

    class Counted:
        def __getitem__(self, grid: object) -> object:
            launches.append(grid)
            return kernel[grid]

    monkeypatch.setattr(swap, "copy_blocks_kernel", Counted())
    pool = KVPool(shapes, 3, dtype, DEVICE, swap.copy_blocks)
    tensors = [tensor for pair in pool.tensors for tensor in (pair.keys, pair.values)]
    for tensor in tensors:
        tensor.copy_(torch.randn(tensor.shape))
    before = [tensor.clone() for tensor in tensors]
    variants = note_variants(monkeypatch)
    pool.swap(BlockCopies([1, 2], [2, 0]), BlockCopies())
    # Device block 3 is copied over host block 2, whose former contents are lost.
    pool.swap(BlockCopies([3], [2]), BlockCopies([5, 1], [2, 0]))
    assert launches == [(2, 4), (1, 4), (2, 4)]
    assert DEVICE.type == "cuda" or len(variants) == 1, (
        "one kernel is compiled, whatever the number of blocks"
    )
    for tensor, old in zip(tensors, before, strict=True):
        expected = torch.stack([old[0], old[2], old[2], old[3], old[4], old[3]])
        assert torch.equal(tensor, expected)
    pool.sleep()
    pool.swap(BlockCopies([1], [0]), BlockCopies([2], [0]))
    assert not any(tensor.any() for tensor in tensors)

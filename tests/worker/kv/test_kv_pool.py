"""The pool's memory is zeroed and can be released; blocks are copied where they belong."""

import pytest
import torch

from protocol.core_worker import BlockCopies
from worker_proc.kv.kv_pool import KVPool, copy_by_index
from worker_proc.kv.kv_tensors import DeviceMemory, HostMemory

CPU = torch.device("cpu")
SHAPES = [((6, 2, 3), (6, 4)), ((6, 5), (6, 5))]


def test_rows_are_copied_where_they_belong() -> None:
    source, target = torch.arange(24).view(6, 2, 2), torch.zeros(4, 2, 2, dtype=torch.long)
    copy_by_index([(source, target)], [5, 1], [0, 3])
    assert torch.equal(target, torch.stack([source[5], *target[1:3], source[1]]))
    assert not target[1:3].any()


def test_blocks_go_out_before_others_come_in() -> None:
    pool = KVPool(SHAPES, 3, torch.float32, CPU)
    tensors = [tensor for pair in pool.tensors for tensor in (pair.keys, pair.values)]
    for tensor in tensors:
        tensor.copy_(torch.randn(tensor.shape))
    before = [tensor.clone() for tensor in tensors]
    pool.swap(BlockCopies([1, 2], [2, 0]), BlockCopies())
    # Device block 3 is copied over host block 2, whose former contents are lost.
    pool.swap(BlockCopies([3], [2]), BlockCopies([5, 1], [2, 0]))
    for tensor, old in zip(tensors, before, strict=True):
        expected = torch.stack([old[0], old[2], old[2], old[3], old[4], old[3]])
        assert torch.equal(tensor, expected)


@pytest.mark.parametrize("on_host", [True, False])
def test_memory_comes_back_zeroed(on_host: bool) -> None:
    memory = (
        HostMemory((4, 5), torch.float32) if on_host else DeviceMemory((4, 5), torch.float32, CPU)
    )
    view = memory.tensor.view(-1)
    for _ in range(2):
        assert not memory.tensor.any()
        memory.tensor.fill_(3.0)
        memory.release()
        memory.restore()
    assert not view.any()
    assert memory.tensor.shape == (4, 5)


def test_the_first_copy_after_a_sleep_finds_zeros() -> None:
    pool = KVPool(SHAPES, 3, torch.float32, CPU)
    for pair in pool.tensors:
        pair.keys.fill_(1.0)
        pair.values.fill_(1.0)
    pool.swap(BlockCopies([1], [0]), BlockCopies())
    pool.sleep()
    pool.swap(BlockCopies(), BlockCopies([2], [0]))
    assert not any(pair.keys.any() or pair.values.any() for pair in pool.tensors)

"""Blocks are written beside the steps as they were, and a load ends whatever its store does."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from protocol.core_worker import BlocksLoaded, LoadBlocks, StoreBlocks
from scripts.testing import eventually
from tests.worker.offload.bench import NUM_BLOCKS, Bench, FakeDraftKV, key, state_key
from worker_proc.offload import load as load_module
from worker_proc.offload.drafts import DraftBlocks
from worker_proc.offload.memory import NoMemory
from worker_proc.offload.service import MAX_READERS


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Bench]:
    def make_bench(*names: str, num_writer_slots: int = 8) -> Bench:
        return Bench([tmp_path / name for name in names], num_writer_slots)

    return make_bench


def test_blocks_are_stored_as_they_were_and_loaded_where_they_are_wanted(
    make: Callable[..., Bench],
) -> None:
    bench = make("one")
    before = {number: bench.content(number) for number in (1, 2, 3)}
    bench.store(1, 2, 3)
    for tensor in bench.tensors:
        tensor.zero_()  # a step overwrites the blocks
    bench.wait_for(1, 2, 3)
    answer = bench.load([3, 1], [4, 5])
    assert (answer.req_id, answer.num_blocks) == (5, 2)
    assert answer.load_ns > 0
    assert [bench.content(block_id) for block_id in (4, 5)] == [before[3], before[1]]
    assert not any(any(bench.content(block_id)) for block_id in (0, 1, 2, 3, 6, 7))
    assert bench.service.deadline is None


def test_a_load_wakes_the_pool_and_blocks_of_one_that_sleeps_are_not_stored(
    make: Callable[..., Bench],
) -> None:
    bench = make("memory")
    before = bench.content(1)
    bench.store(1)
    bench.wait_for(1)
    bench.pool.is_asleep = True
    bench.store(2)
    assert bench.load([1], [3]).num_blocks == 1
    assert not bench.pool.is_asleep
    assert bench.content(3) == before
    assert key(2) not in bench.stores[0].index


def test_a_load_ends_at_the_first_block_that_is_missing(make: Callable[..., Bench]) -> None:
    bench = make("one")
    bench.store(1, 3)
    bench.wait_for(1, 3)
    before = [bench.content(block_id) for block_id in range(NUM_BLOCKS)]
    assert bench.load([1, 2, 3], [6, 7, 8]).num_blocks == 1
    assert [bench.content(block_id) for block_id in range(NUM_BLOCKS)] == [
        before[1] if block_id == 6 else content for block_id, content in enumerate(before)
    ]


def test_what_only_a_slower_store_has_is_copied_to_the_faster_one(
    make: Callable[..., Bench],
) -> None:
    slow = make("slow")
    slow.store(1)
    slow.wait_for(1)
    both = make("fast", "slow")
    assert both.load([1], [2]).num_blocks == 1
    assert both.content(2) == slow.content(1)
    assert key(1) in both.stores[0].index


def test_a_state_is_loaded_before_the_kv_up_to_it(make: Callable[..., Bench]) -> None:
    bench = make("one")
    before = bench.states[0][3].clone()
    stored = StoreBlocks([1, 2], [key(1), key(2)], [3], [state_key(2)])
    bench.service.store(stored)
    bench.states[0].zero_()  # a step overwrites the block
    bench.wait_for(1, 2)
    eventually(lambda: state_key(2) in bench.stores[0].index, "written")
    answer = bench.load_state(2, 5, [1, 2])
    assert (answer.num_blocks, answer.has_state) == (2, True)
    assert torch.equal(bench.states[0][5], before)
    assert int(bench.states[0].any(dim=1).sum()) == 1


@pytest.mark.parametrize("problem", ["missing", "damaged", "another"])
def test_without_its_state_no_kv_is_read(problem: str, make: Callable[..., Bench]) -> None:
    """`another`: the file of another position's state has its name."""
    bench = make("one")
    bench.service.store(StoreBlocks([1], [key(1)], [3, 4], [state_key(2), state_key(3)]))
    bench.wait_for(1)
    index = bench.stores[0].index
    eventually(lambda: state_key(2) in index and state_key(3) in index, "written")
    path, other = (bench.stores[0]._path(state_key(number)) for number in (2, 3))
    if problem == "missing":
        path.unlink()
    elif problem == "damaged":
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    else:
        path.write_bytes(other.read_bytes())
    bench.states[0].zero_()
    before = bench.content(6)
    answer = bench.load_state(2, 5, [1])
    assert (answer.num_blocks, answer.has_state) == (0, False)
    assert not bench.states[0].any()
    assert bench.content(6) == before
    assert state_key(2) not in index


def test_the_draft_models_blocks_are_written_and_read_with_the_models(
    make: Callable[..., Bench],
) -> None:
    """It writes those that it has computed, of its own group; a damaged one is left out."""
    bench = make("one")
    bench.draft_kv.filled = {1, 2, 4, 7, 8}
    drafts = bench.draft_tensors[0]
    before = drafts.clone()
    bench.store(1, 2, 3)
    bench.service.store(StoreBlocks([4], [state_key(4)]))
    index = bench.stores[0].index
    names = [
        DraftBlocks(bench.memory, bench.draft_kv, 0, "one draft model").name(key(i))
        for i in (1, 2, 3)
    ]
    assert None not in names
    bench.wait_for(1, 2, 3)
    eventually(lambda: names[0] in index and names[1] in index, "written")
    drafts.zero_()
    path = bench.stores[0]._path(names[1] or b"")
    path.write_bytes(path.read_bytes()[:-1])
    assert bench.load([1, 2, 3], [6, 7, 8]).num_blocks == 3
    assert torch.equal(drafts[6], before[1])
    assert not drafts[[number for number in range(NUM_BLOCKS) if number != 6]].any()
    assert bench.draft_kv.filled == {1, 2, 4, 6}
    assert names[1] not in index


def test_blocks_of_another_draft_model_have_other_names() -> None:
    names = {
        DraftBlocks(NoMemory(1), FakeDraftKV(), group, layout).name(one)
        for layout in ("one", "another")
        for group, one in ((0, key(1)), (1, state_key(1)))
    }
    assert len(names | {key(1), state_key(1)}) == 6


def test_a_store_that_hangs_costs_the_load_its_time_and_writes_to_no_block(
    make: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make("one")
    bench.store(1, 2)
    bench.wait_for(1, 2)
    monkeypatch.setattr(load_module, "LOAD_TIMEOUT_S", 0.2)
    goes_on, read = threading.Event(), bench.stores[0].read

    def hang_at_second(name: bytes, block: object) -> bool:
        if name == key(2):
            assert goes_on.wait(10.0)
        return read(name, block)  # type: ignore[arg-type]

    monkeypatch.setattr(bench.stores[0], "read", hang_at_second)
    assert bench.load([1, 2], [6, 7]).num_blocks == 1
    before = bench.content(7)
    goes_on.set()
    eventually(lambda: not _threads("troika-load"), "the thread has ended")
    assert bench.content(7) == before
    assert bench.load([2], [7]).num_blocks == 1  # its slot is free again


def test_after_an_adoption_no_load_of_before_writes(
    make: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make("one")
    bench.store(1)
    bench.wait_for(1)
    goes_on, read = threading.Event(), bench.stores[0].read

    def hang(name: bytes, block: object) -> bool:
        assert goes_on.wait(10.0)
        return read(name, block)  # type: ignore[arg-type]

    monkeypatch.setattr(bench.stores[0], "read", hang)
    before = bench.content(6)
    assert bench.service.load(LoadBlocks(5, [6], [key(1)])) is None
    bench.service.begin_adoption()
    goes_on.set()
    eventually(lambda: not _threads("troika-load"), "the thread has ended")
    assert bench.content(6) == before
    assert bench.service.take_results() == []


def test_more_loads_than_readers_are_answered_at_once(
    make: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make("one")
    bench.store(1)
    bench.wait_for(1)
    goes_on = threading.Event()
    monkeypatch.setattr(bench.stores[0], "read", lambda *_: not goes_on.wait(10.0))
    for _ in range(MAX_READERS):
        assert bench.service.load(LoadBlocks(5, [6], [key(1)])) is None
    assert bench.service.load(LoadBlocks(6, [7], [key(1)])) == BlocksLoaded(6, 0)
    goes_on.set()
    eventually(lambda: not _threads("troika-load"), "the threads have ended")
    assert len(bench.service.take_results()) == MAX_READERS


def test_a_store_that_fails_or_hangs_leaves_the_other_one_its_slots(
    make: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench = make("good", "bad", num_writer_slots=4)
    goes_on = threading.Event()

    def hang_and_fail(*_: object) -> bool:
        assert goes_on.wait(10.0)
        raise OSError("the disk is gone")

    monkeypatch.setattr(bench.stores[1], "write", hang_and_fail)
    good = bench.stores[0].index
    for number in range(8):

        def is_written(number: int = number) -> bool:
            bench.store(number)  # again, until there is a slot
            return key(number) in good

        eventually(is_written, "written")
    goes_on.set()
    eventually(lambda: "the disk is gone" in caplog.text, "the line")
    assert caplog.text.count("cannot be written") == 1


def _threads(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == name]

"""The core reads blocks where that is quicker, and depends on none of them."""

import random

import pytest

from core_proc.kv import prefix_lookup
from core_proc.kv.load_costs import LoadCosts
from core_proc.kv.offload import MAX_LOADS, MIN_LOAD_TOKENS
from core_proc.kv.tables import Tables
from core_proc.request import Request, RequestStatus
from protocol.core_worker import BlocksLoaded, LoadBlocks, ModelRunnerOutput, StoreBlocks
from protocol.message import encode
from protocol.transport.channel import MAX_FRAME_BYTES
from tests.core.fake_store import FakeStore
from tests.core.harness import PLAIN_TOKEN
from tests.core.store_bench import (
    BLOCK,
    PROMPT,
    Bench,
    check_that_a_load_waits_for_the_end_of_another,
    filled_store,
)


@pytest.fixture
def filled() -> FakeStore:
    return filled_store()


def test_blocks_are_stored_once_and_read_by_the_next_core(filled: FakeStore) -> None:
    bench = Bench(filled)
    bench.add("a", PROMPT, 2)
    assert bench.step() == {}
    assert bench.requests["a"].status is RequestStatus.WAITING_FOR_REMOTE_KV
    bench.transfer()
    bench.answer()
    assert bench.step() == {"a": 3}
    assert bench.offload.num_loaded_tokens == 6 * BLOCK
    bench.run()
    bench.transfer()
    assert bench.num_stored == 0


def test_what_is_cached_already_is_not_read(filled: FakeStore) -> None:
    bench = Bench(filled)
    bench.add("head", PROMPT[: 2 * BLOCK + 1], 2)
    bench.step()
    bench.add("a", PROMPT, 2)
    bench.step()
    bench.transfer()
    (load,) = bench.loads
    assert len(load.block_ids) == 4
    held = set(bench.requests["a"].block_tables[0])
    assert set(load.block_ids) < held
    bench.answer()
    assert bench.step()["a"] == 3
    bench.run()


@pytest.mark.parametrize("most", [0, 1, 5])
def test_blocks_that_do_not_come_are_computed(filled: FakeStore, most: int) -> None:
    bench = Bench(filled)
    bench.add("a", PROMPT, 2)
    bench.step()
    bench.transfer()
    bench.answer(most)
    assert bench.step() == {"a": len(PROMPT) - most * BLOCK}
    bench.run()


def test_few_tokens_are_computed_at_once(filled: FakeStore) -> None:
    bench = Bench(filled)
    bench.add("a", PROMPT[: MIN_LOAD_TOKENS - 1], 2)
    assert bench.step() == {"a": MIN_LOAD_TOKENS - 1}


def test_requests_queued_after_a_load_are_not_delayed(filled: FakeStore) -> None:
    bench = Bench(filled)
    bench.add("a", PROMPT, 2)
    bench.add("b", 20, 2)
    assert bench.step() == {"b": 20}


def test_loads_have_a_limit_and_wait_for_a_place(filled: FakeStore) -> None:
    bench = Bench(filled, seqs=2 * MAX_LOADS)
    for number in range(MAX_LOADS + 1):
        bench.add(str(number), PROMPT, 2)
    bench.step()
    bench.transfer()
    assert len(bench.loads) == MAX_LOADS
    last = bench.requests[str(MAX_LOADS)]
    assert last.status is RequestStatus.WAITING_FOR_REMOTE_KV
    assert not last.block_tables
    bench.answer()
    granted = bench.step()
    assert granted == {"0": 3, str(MAX_LOADS): 3}  # the last one hits what was read
    while bench.loads:
        bench.answer()
    bench.run()


def test_a_request_without_a_place_is_not_looked_up_in_every_step(
    filled: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(filled, seqs=2 * MAX_LOADS)
    for number in range(MAX_LOADS + 1):
        bench.add(str(number), PROMPT, 2)
    bench.step()
    bench.transfer()
    looked_up: list[Request] = []
    find = bench.scheduler.kv.find_cached_prefix
    monkeypatch.setattr(
        bench.scheduler.kv,
        "find_cached_prefix",
        lambda request: looked_up.append(request) or find(request),
    )
    for _ in range(5):
        assert bench.step() == {}
    assert looked_up == []
    bench.add("behind", 20, 2)
    assert bench.step() == {"behind": 20}  # it has no stored blocks, and is not delayed
    bench.answer()
    bench.step()
    assert bench.requests[str(MAX_LOADS)] in looked_up


@pytest.mark.parametrize("ends", ["abort", "lose"])
def test_a_request_without_a_place_may_end_or_lose_its_worker(filled: FakeStore, ends: str) -> None:
    bench = Bench(filled, seqs=2 * MAX_LOADS)
    for number in range(MAX_LOADS + 1):
        bench.add(str(number), PROMPT, 2)
    bench.step()
    bench.transfer()
    if ends == "abort":
        bench.abort(str(MAX_LOADS))
    else:
        bench.lose_worker()
        bench.loads.clear()
        bench.step()
        bench.transfer()
    while bench.loads:
        bench.answer()
        bench.step()
        bench.transfer()
    bench.run()
    assert len(bench.finished) == MAX_LOADS + (ends == "lose")


def test_a_load_leaves_the_running_requests_their_next_blocks(filled: FakeStore) -> None:
    bench = Bench(filled, blocks=8)
    bench.add("running", BLOCK, 40)
    bench.step()
    bench.add("a", PROMPT, 2)
    for _ in range(20):
        assert bench.step().get("running") == 1
        bench.transfer()
    assert bench.loads == []


def test_a_block_that_one_rank_has_lost_is_stored_again(filled: FakeStore) -> None:
    """The index, which is that of the first rank, names it."""
    bench = Bench(filled)
    bench.add("a", PROMPT, 2)
    bench.step()
    bench.transfer()
    load = bench.loads.pop()
    assert filled.read(bench.worker, load, 1000) == 6
    bench.scheduler.blocks_loaded(BlocksLoaded(load.req_id, 2, 1000))
    bench.step()
    bench.transfer()
    assert bench.num_stored == 1
    bench.run()


def test_a_load_keeps_no_slot_from_requests_that_run(filled: FakeStore) -> None:
    check_that_a_load_waits_for_the_end_of_another(Bench(filled, seqs=1), PROMPT)


def _serve(bench: Bench) -> list[str]:
    """Run to the end, with loads answered between steps; returns the names as they begin."""
    begun: dict[str, None] = {}
    for _ in range(10_000):
        if not bench.scheduler.has_unfinished:
            return list(begun)
        begun.update(dict.fromkeys(bench.step()))
        bench.transfer()
        while bench.loads:
            bench.answer()
    raise AssertionError("requests do not end")


@pytest.mark.parametrize("seqs", [1, 4, 3 * MAX_LOADS])
def test_requests_with_stored_blocks_run_in_the_order_of_the_policy(seqs: int) -> None:
    names = [str(number) for number in range(60)]
    prompts = {name: [1000 * int(name) + i for i in range(len(PROMPT))] for name in names}
    first = Bench()
    for name in names:
        first.add(name, prompts[name], 2)
    _serve(first)
    assert first.num_stored == 6 * len(names)

    bench = Bench(first.store, seqs=seqs, policy="priority")
    for name in random.Random(seqs).sample(names, len(names)):
        bench.add(name, prompts[name], 2, priority=int(name))
    assert _serve(bench) == names
    assert bench.offload.num_loaded_tokens == 6 * BLOCK * len(names)


def test_one_that_comes_later_and_is_more_important_gets_the_next_place(filled: FakeStore) -> None:
    bench = Bench(filled, seqs=3 * MAX_LOADS, policy="priority")
    for number in range(2 * MAX_LOADS):
        bench.add(str(number), PROMPT, 2, priority=5)
    bench.step()
    bench.add("urgent", PROMPT, 2)
    bench.step()
    bench.transfer()
    bench.answer()
    assert bench.step() == {"0": 3, "urgent": 3}
    _serve(bench)


def test_an_important_request_with_stored_blocks_takes_a_slot(filled: FakeStore) -> None:
    bench = Bench(filled, seqs=4, policy="priority", preempt_for_priority=True)
    for number in range(4):
        bench.add(str(number), 20, 200, priority=5)
    bench.step()
    bench.add("urgent", PROMPT, 2, priority=0)
    bench.step()
    bench.transfer()
    assert [load.req_id for load in bench.loads] == [bench.requests["urgent"].req_id]
    for _ in range(5):  # its slot is kept while its blocks are read
        assert len(bench.step()) == 3
    bench.answer()
    assert bench.step()["urgent"] == 3
    assert bench.scheduler.num_preemptions == 1
    bench.run()


def test_slots_are_kept_for_requests_that_load(filled: FakeStore) -> None:
    bench = Bench(filled, seqs=2)
    for name in ("a", "b"):
        bench.add(name, PROMPT, 2)
    bench.add("behind", PROMPT, 2)  # it would be computed
    assert bench.step() == {}
    bench.transfer()
    bench.abort("b")
    bench.add("c", 20, 2)
    assert bench.step() == {}  # the one before it begins to load
    bench.transfer()
    assert len(bench.loads) == 3
    _serve(bench)
    assert set(bench.finished) == {"a", "behind", "c"}


def test_a_step_looks_up_few_of_the_requests_that_wait_for_a_place(
    filled: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(filled, seqs=10_000)
    num_requests = 4 * 2**14 // len(PROMPT)
    for number in range(num_requests):
        bench.add(str(number), PROMPT, 2)
    kv, num_tokens = bench.scheduler.kv, 0
    find = kv.find_cached_prefix

    def count(request: Request) -> Tables:
        nonlocal num_tokens
        num_tokens += request.num_tokens
        return find(request)

    monkeypatch.setattr(kv, "find_cached_prefix", count)
    most = 0
    while True:
        num_tokens = 0
        assert bench.step() == {}
        most = max(most, num_tokens)
        if not bench.scheduler.is_preparing:
            break
    assert 0 < most <= 2**14 + (MAX_LOADS + 1) * len(PROMPT)
    bench.add("behind", 20, 2)
    assert bench.step() == {"behind": 20}
    _serve(bench)


def test_a_block_that_is_overwritten_meanwhile_is_not_stored() -> None:
    bench = Bench(blocks=8)
    bench.add("a", PROMPT, 1)
    bench.step()
    assert set(bench.finished) == {"a"}
    bench.add("b", 6 * BLOCK + 1, 1)
    bench.step()  # takes the blocks of the first
    (message,) = bench.scheduler.take_transfers()
    assert isinstance(message, StoreBlocks)
    assert set(message.keys) == set(bench.requests["b"].block_hashes)


def test_a_preempted_request_is_read_again(filled: FakeStore) -> None:
    bench = Bench(filled)
    bench.add("a", PROMPT, 40)
    bench.step()
    bench.transfer()
    bench.answer()
    for _ in range(20):
        bench.step()
    bench.transfer()
    bench.lose_worker()
    bench.step()
    assert bench.requests["a"].status is RequestStatus.WAITING_FOR_REMOTE_KV
    bench.transfer()
    bench.answer()
    assert bench.requests["a"].status is RequestStatus.PREEMPTED
    bench.run()


def test_nothing_is_kept_of_requests_that_end_while_they_wait_for_a_place(
    filled: FakeStore,
) -> None:
    bench = Bench(filled, seqs=2 * MAX_LOADS)
    for number in range(MAX_LOADS + 300):
        bench.add(str(number), PROMPT, 2)
    for number in range(300):
        bench.step()
        bench.abort(str(MAX_LOADS + number))
    loads = bench.scheduler.loads
    assert not loads._aside
    assert len(loads._rows) < 100
    bench.transfer()
    while bench.loads:
        bench.answer()
        bench.step()
        bench.transfer()
    bench.run()
    assert len(bench.finished) == MAX_LOADS


def test_a_lost_worker_ends_its_loads_and_answers_that_come_late_are_ignored(
    filled: FakeStore,
) -> None:
    bench = Bench(filled)
    bench.add("a", PROMPT, 2)
    bench.step()
    bench.transfer()
    late = bench.loads.pop()
    bench.lose_worker()
    bench.scheduler.blocks_loaded(BlocksLoaded(late.req_id, 6, 1))
    bench.step()
    bench.transfer()
    bench.answer()
    assert bench.step() == {"a": 3}


def test_a_reset_of_the_prefix_cache_forgets_the_stores(filled: FakeStore) -> None:
    bench = Bench(filled)
    bench.offload.clear()
    bench.add("a", PROMPT, 2)
    assert bench.step() == {"a": len(PROMPT)}


def _step(costs: LoadCosts, num_tokens: int, num_prompt_tokens: int, ns: int) -> None:
    costs.sent(num_tokens, num_prompt_tokens)
    costs.step_ended(ModelRunnerOutput(0, [], forward_ns=ns))


def test_slow_loads_are_given_up_but_tried_now_and_then() -> None:
    costs = LoadCosts()
    assert costs.try_load()  # nothing is known
    _step(costs, 100, 100, 100_000)
    _step(costs, 64, 4, 900_000_000)  # it has mostly decoded
    costs.loaded(1000, 500_000)
    assert costs.try_load()
    for _ in range(20):
        costs.loaded(1000, 50_000_000)
    assert [costs.try_load() for _ in range(32)].count(True) == 2
    for _ in range(20):
        costs.loaded(1000, 500_000)
    assert costs.try_load()


def test_a_load_of_more_blocks_than_a_message_holds_is_cut(
    filled: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = prefix_lookup.MAX_LOADED_BLOCKS
    assert len(encode(LoadBlocks(1, [2**31 - 1] * most, [bytes(33)] * most))) <= MAX_FRAME_BYTES
    monkeypatch.setattr(prefix_lookup, "MAX_LOADED_BLOCKS", 4)
    bench = Bench(filled)
    bench.add("a", PROMPT, 2)
    bench.step()
    bench.transfer()
    assert len(bench.loads[0].keys) == 4
    bench.answer()
    assert bench.step() == {"a": 2 * BLOCK + 3}
    bench.run()
    assert bench.outputs["a"] == [PLAIN_TOKEN] * 2

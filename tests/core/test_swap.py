"""Preemption by swap: KV is copied to the host and back, and no token changes."""

import pytest

from core_proc.kv import swap
from core_proc.kv.swap import Swapper
from core_proc.options import SchedulerOptions
from core_proc.request import Request
from core_proc.scheduling import step
from protocol.model_facts import KVGroup
from protocol.sampling import SamplingParams
from tests.core.harness import PLAIN_TOKEN, Harness

BLOCK = 16


def _three(**options: object) -> Harness:
    """Three requests in memory that holds two of them to their ends."""
    bench = Harness(blocks=7, num_host_blocks=8, **options)  # type: ignore[arg-type]
    for name in "abc":
        bench.add(name, 30, 8)
    return bench


def test_a_swapped_request_continues_where_it_stopped() -> None:
    bench = _three()
    bench.steps(3)
    assert bench.step() == {"a": 1, "b": 1}
    assert bench.preempted == ["c"]
    assert len(bench.sent[-1].swap_out.host_block_ids) == 2
    bench.steps(4)
    assert bench.step() == {"c": 1}, "nothing is computed again"
    new = bench.sent[-1].scheduled_new_reqs[0]
    assert new.num_computed_tokens == new.num_cached_tokens == 32
    assert len(bench.sent[-1].swap_in.host_block_ids) == 2
    bench.run()
    assert bench.outputs == dict.fromkeys("abc", [PLAIN_TOKEN] * 8)
    assert bench.worker.total_scheduled == 3 * (30 + 8 - 1)
    assert bench.scheduler.swapper.num_free_blocks == 8


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("caching", [False, True])
def test_late_tokens_are_kept(depth: int, caching: bool) -> None:
    bench = _three(depth=depth, caching=caching)
    bench.overlap()
    assert bench.scheduler.swapper.num_swapped_out > 0
    assert bench.outputs == dict.fromkeys("abc", [PLAIN_TOKEN] * 8)
    if not caching:
        assert bench.worker.total_scheduled == 3 * (30 + 8 - 1)


def test_whatever_costs_less_is_done() -> None:
    for cost, swapped in ((15.9, 1), (16.1, 0)):
        bench = _three(swap_cost_tokens=cost)
        bench.steps(4)
        assert bench.preempted == ["c"]
        assert bench.scheduler.swapper.num_swapped_out == swapped
        bench.run()
        assert bench.outputs == dict.fromkeys("abc", [PLAIN_TOKEN] * 8)


def test_without_room_on_the_host_a_victim_is_computed_again() -> None:
    bench = Harness(blocks=7, num_host_blocks=1)
    for name in "abc":
        bench.add(name, 30, 8)
    bench.run()
    assert bench.scheduler.num_preemptions == 1
    assert bench.scheduler.swapper.num_swapped_out == 0
    assert bench.outputs == dict.fromkeys("abc", [PLAIN_TOKEN] * 8)


def test_what_the_prefix_cache_still_has_is_not_copied_back() -> None:
    bench = Harness(blocks=9, num_host_blocks=8, caching=True)
    bench.add("a", 64, 4)
    bench.add("b", 62, 4)
    bench.steps(2)
    assert bench.preempted == ["b"]
    bench.abort("a")
    assert bench.step() == {"b": 1}
    assert len(bench.sent[-1].swap_out.host_block_ids) == 0
    new, swap_in = bench.sent[-1].scheduled_new_reqs[0], bench.sent[-1].swap_in
    assert new.num_computed_tokens == 62
    assert len(swap_in.device_block_ids) == 1, "three of four blocks were still cached"
    assert swap_in.device_block_ids[0] == new.block_ids[0][3]


def test_an_abort_gives_the_hosts_blocks_back() -> None:
    bench = _three()
    bench.steps(4)
    assert bench.scheduler.swapper.num_free_blocks == 6
    bench.abort("c")
    assert bench.scheduler.swapper.num_free_blocks == 8


@pytest.mark.parametrize("how", ["lose", "reset", "sleep"])
def test_host_copies_are_void_when_the_worker_or_the_weights_change(how: str) -> None:
    bench = _three()
    bench.steps(4)
    assert bench.requests["c"].swapped_out is not None
    if how == "lose":
        bench.lose_worker()
    elif how == "reset":
        assert bench.scheduler.reset_prefix_cache(reset_running_requests=True)
    else:
        assert bench.scheduler.sleep()
        bench.step()
        bench.worker.sleep()
        bench.scheduler.resume()
    assert bench.requests["c"].swapped_out is None
    assert bench.scheduler.swapper.num_free_blocks == 8
    bench.run()
    assert bench.outputs == dict.fromkeys("abc", [PLAIN_TOKEN] * 8)


def test_only_what_the_windows_still_see_is_copied() -> None:
    groups = (KVGroup(None), KVGroup(window=16, max_blocks=4))
    bench = Harness(blocks=16, num_host_blocks=16, budget=32, kv_groups=groups)
    bench.add("a", 62, 40)
    bench.add("b", 62, 40)
    while not bench.scheduler.num_preemptions:
        assert bench.step()
    num_copied = len(bench.sent[-1].swap_out.host_block_ids)
    assert num_copied < 2 * -(-bench.requests["b"].num_tokens // BLOCK)
    bench.run()
    assert bench.worker.total_scheduled == 2 * (62 + 39)
    assert bench.outputs == dict.fromkeys("ab", [PLAIN_TOKEN] * 40)


def test_a_host_block_that_is_read_in_this_step_is_written_in_the_next() -> None:
    """Swap-outs come first, and must not overwrite host blocks that the step swaps in."""
    swapper = Swapper(SchedulerOptions(num_host_blocks=1))
    first, second = (Request(i, [1], SamplingParams()) for i in range(2))
    first.block_tables, first.num_computed_tokens = [[5]], 1
    swapper.take_out(first)
    swapper.take_copies()
    swapper.bring_in(first, 0)
    second.block_tables, second.num_computed_tokens = [[7]], 1
    assert not swapper.prefers(second, 1)
    swapper.take_copies()
    assert swapper.prefers(second, 1)


def with_three_preempted() -> Harness:
    """Preempt three requests, of two blocks each, after one step."""
    bench = Harness(blocks=64, num_host_blocks=32)
    for name in "abc":
        bench.add(name, 32, 4)
    bench.step()
    for name in "abc":
        bench.scheduler.preempt(bench.requests[name])
    return bench


def test_a_step_copies_no_more_blocks_than_its_message_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(swap, "MAX_COPIES", 3)
    bench = with_three_preempted()
    assert bench.scheduler.swapper.num_swapped_out == 1
    bench.run()
    assert bench.outputs == dict.fromkeys("abc", [PLAIN_TOKEN] * 4)


def test_a_step_copies_back_no_more_blocks_than_its_message_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = with_three_preempted()
    num_ids = 33 + 64 + 3 + 2 * 2  # tokens, parameters, blocks, and pairs of blocks
    monkeypatch.setattr(step, "_MAX_NEW_IDS", 3 * num_ids - 5)
    bench.step()
    assert len(bench.sent[-1].swap_in.host_block_ids) == 4
    bench.run()
    assert bench.outputs == dict.fromkeys("abc", [PLAIN_TOKEN] * 4)

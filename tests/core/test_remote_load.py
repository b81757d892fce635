"""Remote KV: it is stored in the prefix cache, and its request waits for it."""

import pytest

from core_proc.request import RequestStatus
from tests.core.harness import Harness


def _bench(**options: object) -> Harness:
    return Harness(caching=True, **options)  # type: ignore[arg-type]


def _load(bench: Harness, name: str, num_tokens: int) -> list[int]:
    """Begin a load, and write its KV into the fake worker's memory."""
    request = bench.requests[name]
    assert bench.scheduler.loads.hold(request, [[]], num_tokens)
    tables = request.block_tables
    bench.worker.write_from_outside(request.token_ids[:num_tokens].tolist(), tables)
    return tables[0]


def _end(bench: Harness, name: str, num_tokens: int) -> None:
    bench.scheduler.loads.end(bench.requests[name], num_tokens)


def test_a_loading_request_keeps_its_place_holds_its_blocks_and_hits_them() -> None:
    bench = _bench()
    bench.add("a", 50)
    table = _load(bench, "a", 32)
    bench.add("b", 10)
    assert bench.step() == {"b": 10}
    assert bench.queue == ["a"]
    assert bench.requests["a"].status is RequestStatus.WAITING_FOR_REMOTE_KV
    _end(bench, "a", 32)
    assert bench.step() == {"b": 1, "a": 18}
    assert bench.requests["a"].block_tables[0][:2] == table
    bench.run()


def test_a_failed_load_is_computed_instead() -> None:
    bench = _bench()
    bench.add("a", 50)
    _load(bench, "a", 32)
    _end(bench, "a", 0)
    assert bench.step() == {"a": 50}


def test_blocks_of_an_aborted_load_are_held_until_its_writer_is_done() -> None:
    bench = _bench(blocks=4)
    bench.add("a", 40, 2)
    _load(bench, "a", 32)
    bench.abort("a")
    bench.add("b", 30, 2)
    assert bench.step() == {}
    assert bench.num_free == 1
    assert not bench.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert not bench.scheduler.sleep()
    _end(bench, "a", 32)
    assert bench.step() == {"b": 30}


def test_a_load_without_room_changes_nothing() -> None:
    bench = _bench(blocks=6)
    bench.add("a", 60, 2)
    bench.step()
    bench.add("b", 40, 2)
    assert not bench.scheduler.loads.hold(bench.requests["b"], [[]], 32)
    assert bench.requests["b"].status is RequestStatus.WAITING
    bench.run()
    assert set(bench.finished) == {"a", "b"}


@pytest.mark.parametrize("aborted", [False, True])
def test_a_load_into_a_lost_pool_is_void(aborted: bool) -> None:
    bench = _bench()
    bench.add("a", 50)
    _load(bench, "a", 32)
    if aborted:
        bench.abort("a")
    bench.lose_worker()
    _end(bench, "a", 32)
    assert bench.step() == ({} if aborted else {"a": 50})

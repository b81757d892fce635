"""An error of one request ends that request, and nothing else."""

from operator import attrgetter
from typing import Any

import pytest

from core_proc.request import Request
from tests.core.harness import PLAIN_TOKEN, Harness


def _fail_for(bench: Harness, monkeypatch: pytest.MonkeyPatch, method: str, name: str) -> None:
    """Make a method of the KV manager raise for one request."""
    kv = bench.scheduler.kv
    original = getattr(kv, method)

    def broken(request: Request, *args: Any, **options: Any) -> Any:
        if request is bench.requests[name]:
            raise RuntimeError("broken on purpose")
        return original(request, *args, **options)

    monkeypatch.setattr(kv, method, broken)


@pytest.mark.parametrize("method", ["find_cached_prefix", "admit", "grow", "_extend_hashes"])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_request_that_cannot_be_scheduled_fails_alone(
    method: str, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Harness(caching=True, depth=depth, budget=40)
    for name in "abc":
        bench.add(name, 20, 30)
    _fail_for(bench, monkeypatch, method, "b")
    bench.overlap()
    failures = bench.scheduler.take_failures()
    assert [failure.request for failure in failures] == [bench.requests["b"]]
    assert failures[0].error == "RuntimeError: broken on purpose"
    assert bench.outputs["a"] == bench.outputs["c"] == [PLAIN_TOKEN] * 30
    assert bench.num_free == bench.scheduler.kv.pool.num_usable
    assert bench.scheduler.take_failures() == []


def test_a_failed_requests_blocks_are_not_hits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its grant was withdrawn, so the contents of its new blocks were never computed."""
    bench = Harness(caching=True, budget=32)
    prompt = list(range(100, 180))
    bench.add("a", prompt, 4)
    bench.step()
    monkeypatch.setattr(bench.scheduler._grants, "grant", _raise)
    bench.step()
    monkeypatch.undo()
    assert len(bench.scheduler.take_failures()) == 1
    bench.add("again", prompt, 4)
    assert bench.step() == {"again": 32}
    assert bench.requests["again"].num_cached_tokens == 32, "only the tokens of the first step"
    bench.run()


def _raise(*args: object) -> None:
    raise RuntimeError("broken on purpose")


def test_an_external_failure_ends_a_request_in_any_state() -> None:
    bench = Harness(seqs=1)
    bench.add("runs", 10)
    bench.add("waits", 10)
    bench.step()
    for name in ("runs", "waits"):
        bench.scheduler.fail_request(bench.requests[name].req_id, "no grammar")
    bench.scheduler.fail_request(77, "unknown")
    failures = bench.scheduler.take_failures()
    assert [(f.request.req_id, f.error) for f in failures] == [(0, "no grammar"), (1, "no grammar")]
    bench.run()
    assert bench.num_free == bench.scheduler.kv.pool.num_usable


def _break_hashing(
    bench: Harness, monkeypatch: pytest.MonkeyPatch, name: str, num_blocks: int
) -> None:
    """Make hashing fail for one request once it has this number of full blocks."""
    original = bench.scheduler.kv._extend_hashes

    def broken(request: Request, num_full: int) -> None:
        if num_full >= num_blocks and request is bench.requests[name]:
            raise RuntimeError("broken on purpose")
        original(request, num_full)

    monkeypatch.setattr(bench.scheduler.kv, "_extend_hashes", broken)


@pytest.mark.parametrize("max_tokens", range(10, 16))
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_fault_that_strikes_at_the_end_spoils_nothing(
    depth: int, max_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks are freed even if they cannot be hashed any more."""
    bench = Harness(caching=True, depth=depth, budget=64)
    bench.add("a", 20, 30)
    bench.add("b", 20, max_tokens)
    _break_hashing(bench, monkeypatch, "b", 2)
    bench.overlap()
    assert bench.outputs["a"] == [PLAIN_TOKEN] * 30
    assert bench.num_free == bench.scheduler.kv.pool.num_usable


@pytest.mark.parametrize(("blocks", "lengths"), [(8, (29, 33, 30)), (7, (31, 20, 30))])
def test_a_fault_that_strikes_at_a_preemption_hits_the_victim_alone(
    blocks: int, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Harness(caching=True, depth=2, budget=200, blocks=blocks)
    for name, length in zip("abc", lengths, strict=True):
        bench.add(name, length, 30)
    _break_hashing(bench, monkeypatch, "c", 2)
    bench.overlap()
    assert {f.request for f in bench.scheduler.take_failures()} <= {bench.requests["c"]}
    assert bench.outputs["a"] == bench.outputs["b"] == [PLAIN_TOKEN] * 30


def test_a_stretched_grant_is_guarded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Harness(caching=True, budget=64, max_num_scheduled_tokens=16, elastic_token_budget=True)
    bench.add("a", 60, 4)
    monkeypatch.setattr(bench.scheduler.kv, "may_read_cache", lambda request: False)
    _break_hashing(bench, monkeypatch, "a", 2)
    bench.run()
    assert [f.request for f in bench.scheduler.take_failures()] == [bench.requests["a"]]


def test_an_admission_that_fails_leaves_others_their_cached_blocks() -> None:
    shared = list(range(10, 58))
    bench = Harness(caching=True)
    bench.add("a", [*shared, 1], 30)
    bench.step()

    def broken(request: Request) -> None:
        if request is bench.requests["b"]:
            raise RuntimeError("broken on purpose")

    bench.scheduler.policy.admitted = broken  # type: ignore[method-assign]
    bench.add("b", [*shared, 3], 30)
    bench.step()
    assert [f.request for f in bench.scheduler.take_failures()] == [bench.requests["b"]]
    bench.run()
    assert bench.outputs["a"] == [PLAIN_TOKEN] * 30


def test_broken_books_end_the_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is not one of a request, and the next core starts with consistent state."""
    bench = Harness()
    bench.add("a", 20)

    def broken(*args: object, **options: object) -> None:
        raise AssertionError("block 3 was free already")

    monkeypatch.setattr(bench.scheduler.kv, "admit", broken)
    with pytest.raises(AssertionError, match="block 3"):
        bench.step()


@pytest.mark.parametrize("method", ["swapper.bring_in", "policy.admitted", "queues.start"])
def test_a_swapped_request_that_fails_on_its_way_back_leaves_no_copies(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Harness(blocks=7, num_host_blocks=8)
    for name in "abc":
        bench.add(name, 30, 8)
    bench.steps(4)
    assert bench.requests["c"].swapped_out is not None
    original = attrgetter(method)(bench.scheduler)

    def broken(request: Request, *args: int) -> None:
        original(request, *args)
        raise RuntimeError("broken on purpose")

    part, name = method.split(".")
    monkeypatch.setattr(getattr(bench.scheduler, part), name, broken)
    bench.run()
    assert [f.request for f in bench.scheduler.take_failures()] == [bench.requests["c"]]
    assert all(not step.swap_in.device_block_ids for step in bench.sent)
    assert bench.scheduler.swapper.num_free_blocks == 8

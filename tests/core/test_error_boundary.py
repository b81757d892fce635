"""What fails for one request ends that request, and nothing else."""

from typing import Any

import pytest

from core_proc.request import Request
from tests.core.harness import PLAIN_TOKEN, Harness


def _fail_for(bench: Harness, monkeypatch: pytest.MonkeyPatch, method: str, name: str) -> None:
    """Make a method of the KV manager raise whenever it is about one request."""
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


def test_a_failed_requests_blocks_are_no_hits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its grant was withdrawn, so nobody computed what its new blocks were to hold."""
    bench = Harness(caching=True, budget=32)
    prompt = list(range(100, 180))
    bench.add("a", prompt, 4)
    bench.step()
    monkeypatch.setattr(bench.scheduler, "_grant", _raise)
    bench.step()
    monkeypatch.undo()
    assert len(bench.scheduler.take_failures()) == 1
    bench.add("again", prompt, 4)
    assert bench.step() == {"again": 32}
    assert bench.requests["again"].num_cached_tokens == 32, "only what the first step computed"
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

"""A step costs what has changed: requests that cannot be admitted are not looked at in vain."""

import random
import sys
from types import FrameType
from typing import Any

import pytest

from core_proc.kv.kv_cache import KVCacheManager
from core_proc.kv.tables import Tables
from core_proc.policy import Priority
from core_proc.request import Request
from core_proc.scheduling.admission import Admission
from core_proc.scheduling.priority_preemption import PriorityPreemption
from protocol.api_core import PauseMode
from protocol.model_facts import KVGroup
from tests.core.harness import PLAIN_TOKEN, Harness


def count_searches(bench: Harness, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    searches: list[int] = []
    real = KVCacheManager.find_cached_prefix

    def find(kv: KVCacheManager, request: Request) -> Tables:
        searches.append(request.req_id)
        return real(kv, request)

    monkeypatch.setattr(KVCacheManager, "find_cached_prefix", find)
    return searches


def test_a_blocked_request_costs_no_search_until_something_is_freed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Harness(blocks=9, caching=True, max_model_len=128)
    searches = count_searches(bench, monkeypatch)
    bench.add("a", 32, max_tokens=40)
    bench.add("b", 112, max_tokens=8)
    bench.steps(20)
    assert len(searches) == 2
    bench.abort("a")
    assert "b" in bench.step()
    assert len(searches) <= 3


def test_a_blocked_request_is_admitted_as_soon_as_others_have_cached_enough_of_its_prefix() -> None:
    """Nothing is freed for that: a block that is being filled becomes one that can be shared."""
    bench = Harness(blocks=4, caching=True)
    bench.add("a", list(range(100, 120)), max_tokens=13)
    bench.add("b", [*range(100, 120), *[PLAIN_TOKEN] * 12, 99], max_tokens=4)
    assert [list(granted) for granted in bench.steps(13)] == [["a"]] * 12 + [["a", "b"]]


def test_a_blocked_request_that_comes_to_ask_for_less_is_admitted() -> None:
    """A smaller share may fit, as no room is reserved for the whole prompt."""
    bench = Harness(
        blocks=4,
        budget=64,
        scheduler_reserve_full_isl=False,
        long_prefill_token_threshold_adaptive=True,
    )
    bench.add("a", 17, max_tokens=8)
    bench.step()
    bench.add("b", 40, max_tokens=1)
    assert bench.step() == {"a": 1}
    for name in "cde":
        bench.add(name, 40, max_tokens=1)
    assert bench.step() == {"a": 1, "b": 15}


def test_a_refused_request_of_a_windowed_model_costs_no_search_while_others_decode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The windows of those that decode free a block now and then, which is not enough."""
    groups = (KVGroup(), KVGroup(window=32, max_blocks=7))
    bench = Harness(blocks=48, budget=64, caching=True, max_model_len=512, kv_groups=groups)
    bench.add("a", 200, max_tokens=150)
    bench.steps(6)
    searches = count_searches(bench, monkeypatch)
    bench.add("b", 450, max_tokens=8)
    bench.steps(80)
    assert bench.queue == ["b"]
    assert len(searches) <= 2
    bench.abort("a")
    assert "b" in bench.step()


def test_a_request_that_cannot_preempt_enough_costs_no_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Harness(blocks=30, caching=True, policy="priority", preempt_for_priority=True)
    bench.add("important", 200, max_tokens=150, priority=0)
    bench.add("lesser", 32, max_tokens=40, priority=5)
    bench.steps(2)
    searches = count_searches(bench, monkeypatch)
    ranks: list[int] = []
    real = Priority.rank

    def rank(policy: Priority, request: Request) -> int:
        ranks.append(request.req_id)
        return real(policy, request)

    monkeypatch.setattr(Priority, "rank", rank)
    bench.add("urgent", 400, max_tokens=8, priority=1)
    bench.steps(30)
    assert bench.scheduler.num_preemptions == 0
    assert len(searches) <= 2
    assert len(ranks) <= 6
    bench.abort("important")
    assert bench.step()["urgent"] == 400


def test_the_front_under_a_pause_costs_no_look_at_all_that_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Harness(seqs=4)
    bench.add("a", 10, 20)
    bench.step()
    bench.scheduler.pause(PauseMode.PAUSED_NEW)
    for number in range(500):
        bench.add(f"new{number}", 10, 20)
    looks: list[int] = []
    real = Request.has_begun

    def has_begun(request: Request) -> bool:
        looks.append(request.req_id)
        return real(request)

    monkeypatch.setattr(Request, "has_begun", has_begun)
    bench.steps(5)
    assert len(looks) < 50


def test_a_client_that_leaves_costs_one_pass_over_the_running_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Harness(blocks=1024, seqs=200)
    for number in range(200):
        bench.add(str(number), 10, 100)
    bench.step()
    running = bench.scheduler.running
    lines: list[int] = []

    def trace(frame: FrameType, _event: str, _arg: object) -> Any:
        lines.append(frame.f_lineno)
        return trace

    sys.settrace(trace)
    for number in range(1, 200):
        bench.abort(str(number))
    sys.settrace(None)
    assert len(lines) < 200 * 200
    assert len(running) == 200, "the list that a caller holds is not changed"
    assert [request.req_id for request in bench.scheduler.running] == [0]
    bench.run()


@pytest.mark.parametrize("seed", range(12))
def test_what_is_kept_of_a_refusal_changes_no_decision(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decisions() -> list[dict[str, int]]:
        rng = random.Random(seed)
        windows = KVGroup(window=40, max_blocks=40)
        is_priority = rng.random() < 0.5
        bench = Harness(
            blocks=rng.randrange(20, 40),
            caching=True,
            depth=rng.choice([1, 2]),
            budget=rng.choice([16, 64, 512]),
            watermark=rng.choice([0.0, 0.1]),
            scheduler_reserve_full_isl=rng.random() < 0.7,
            kv_groups=rng.choice([(KVGroup(),), (windows,), (KVGroup(), windows)]),
            policy="priority" if is_priority else "fcfs",
            preempt_for_priority=is_priority,
            max_model_len=128,
        )
        heads = [[1000 * n + i for i in range(96)] for n in range(3)]
        made = []
        for number in range(60):
            if rng.random() < 0.5:
                tail = [rng.randrange(3, 900) for _ in range(rng.randrange(1, 31))]
                bench.add(
                    str(number),
                    rng.choice(heads)[: rng.randrange(0, 96)] + tail,
                    max_tokens=rng.randrange(1, 50),
                    priority=rng.randrange(3),
                )
            if bench.requests and rng.random() < 0.1:
                bench.abort(rng.choice(list(bench.requests)))
            made.append(bench.step())
        return made

    kept = decisions()
    monkeypatch.setattr(Admission, "_current_refusal", lambda *_: None)
    monkeypatch.setattr(PriorityPreemption, "_is_futile", lambda *_: False)
    assert decisions() == kept


def test_a_request_that_may_not_begin_yet_costs_no_search_however_it_could_preempt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The prompt before it takes all tokens of each step, so its admission is not tried."""
    bench = Harness(
        blocks=400,
        budget=16,
        caching=True,
        policy="priority",
        preempt_for_priority=True,
        max_num_partial_prefills=1,
    )
    bench.add("lesser", 10, max_tokens=200, priority=5)
    bench.step()
    bench.add("important", 1000, max_tokens=8, priority=0)
    bench.step()
    searches = count_searches(bench, monkeypatch)
    bench.add("urgent", 400, max_tokens=8, priority=1)
    bench.steps(40)
    assert bench.queue == ["urgent"]
    assert len(searches) <= 2

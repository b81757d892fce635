"""KV events: a reader that applies them in order always has the pool's set of hashes."""

import random
from typing import Any

import pytest

from core_proc.kv import event_recorder
from core_proc.kv.event_recorder import group_key
from core_proc.scheduler import Scheduler
from protocol.kv_events import AllBlocksCleared, BlocksRemoved, BlocksStored, KVEvent
from protocol.model_facts import KVGroup
from tests.core.harness import Harness


class Router:
    """Builds the contents from events alone."""

    def __init__(self) -> None:
        self.keys: set[bytes] = set()

    def apply(self, events: list[KVEvent]) -> None:
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.keys.clear()
                continue
            keys = {group_key(block_hash, event.group) for block_hash in event.block_hashes}
            assert len(keys) == len(event.block_hashes)
            if isinstance(event, BlocksStored):
                assert not keys & self.keys
                assert len(event.token_ids) == event.block_size * len(keys)
                self.keys |= keys
            elif isinstance(event, BlocksRemoved):
                assert keys <= self.keys
                self.keys -= keys


def _cached(scheduler: Scheduler) -> set[bytes]:
    pool = scheduler.kv.pool
    return {key for i in range(pool.num_blocks) if (key := pool.hash_of(i)) is not None}


def _bench(**options: Any) -> Harness:
    return Harness(caching=True, enable_kv_events=True, **options)


@pytest.mark.parametrize("seed", range(10))
def test_events_describe_exactly_the_cached_blocks(seed: int) -> None:
    rng = random.Random(seed)
    groups = rng.choice([(KVGroup(),), (KVGroup(), KVGroup(window=20, max_blocks=6))])
    bench = _bench(blocks=30, budget=48, kv_groups=groups, depth=rng.choice([1, 2]))
    router, late = Router(), Router()
    prompts = [[rng.randrange(50)] * rng.randrange(1, 90) for _ in range(6)]
    for step in range(150):
        if rng.random() < 0.5:
            salt = rng.choice(["", "s"])
            bench.add(f"r{step}", rng.choice(prompts), rng.randrange(1, 20), salt=salt)
        if rng.random() < 0.03:
            bench.scheduler.reset_prefix_cache(reset_running_requests=True)
        if bench.fill() or bench.num_in_flight:
            bench.update()
        events = bench.scheduler.kv.take_events()
        router.apply(events)
        assert router.keys == _cached(bench.scheduler)
        late.keys.clear()
        late.apply(list(bench.scheduler.kv.snapshot_events()))
        assert late.keys == router.keys


def test_a_prompts_blocks_are_one_event_with_the_fields_a_router_needs() -> None:
    bench = _bench()
    prompt = list(range(100, 140))
    bench.add("a", prompt, 1, salt="pepper", adapter_id=4)
    bench.step()
    hashes = bench.requests["a"].block_hashes
    expected = BlocksStored(hashes, None, prompt[:32], 16, 0, "pepper", 4)
    assert bench.scheduler.kv.take_events() == [expected]
    assert bench.scheduler.kv.take_events() == []
    bench.add("b", [*prompt[:16], *range(16)], 1, salt="pepper", adapter_id=4)
    bench.step()
    (event,) = bench.scheduler.kv.take_events()
    assert isinstance(event, BlocksStored)
    assert event.parent_hash == hashes[0]


def test_without_the_option_nothing_is_recorded() -> None:
    bench = Harness(caching=True)
    bench.add("a", 40, 1)
    bench.step()
    assert bench.scheduler.kv.take_events() == list(bench.scheduler.kv.snapshot_events()) == []


def test_long_runs_are_few_events_for_any_number_of_groups() -> None:
    for groups in ((KVGroup(),), (KVGroup(), KVGroup(), KVGroup(window=40, max_blocks=300))):
        bench = _bench(blocks=1024, kv_groups=groups)
        bench.add("a", 128 * 16, 1)
        bench.step()
        events = bench.scheduler.kv.take_events()
        assert len(events) == len(groups)


def test_a_reader_that_takes_nothing_for_long_gets_a_new_beginning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(event_recorder, "_MAX_UNTAKEN", 50)
    bench = _bench(blocks=12)
    for index in range(40):
        bench.add(f"r{index}", 60, 1)
        bench.step()
    assert len(bench.scheduler.kv._recorder._records) <= 51  # type: ignore[union-attr]
    router = Router()
    router.apply(bench.scheduler.kv.take_events())
    assert router.keys == _cached(bench.scheduler)

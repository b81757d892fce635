"""State blocks of recurrent layers: one for each running request, at its end and after losses."""

import logging
from typing import Any

import pytest

from core_proc.options import SchedulerOptions
from core_proc.stats import StatsLine, scheduler_stats
from protocol.config.settings import configure
from protocol.core_worker import NULL_BLOCK
from protocol.model_facts import KVGroup, ModelFacts
from tests.core.harness import PLAIN_TOKEN, Harness
from tests.core.state_bench import (
    FULL,
    STATES,
    WINDOW,
    cached,
    make,
    sent_table,
    state_table,
    states,
)


def test_a_table_that_grows_twice_in_a_step_keeps_the_snapshot_before_it() -> None:
    """A step that stretches a chunk moves the request's block twice: the worker gets its end."""
    bench = make(
        5, budget=64, long_prefill_token_threshold=40, elastic_token_budget=True, spacing=64
    )
    bench.add("a", 264)
    assert bench.step() == {"a": 64}
    assert bench.step() == {"a": 64}
    (appended,) = bench.sent[-1].scheduled_cached_reqs.new_block_ids
    assert appended[-1] == state_table(bench, "a")[4:]
    bench.scheduler.preempt(bench.requests["a"])
    bench.run()  # from the snapshot, which the worker checks


@pytest.mark.parametrize("groups", [(FULL,), (FULL, WINDOW), ()])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_a_request_has_one_block_which_moves_along(groups: tuple[KVGroup, ...], depth: int) -> None:
    bench = make(4, groups=groups, depth=depth, caching=False, budget=40)
    bench.add("a", 100, 60)
    bench.step()
    own = sent_table(bench)[-1]
    assert sent_table(bench) == [NULL_BLOCK, NULL_BLOCK, own]
    while bench.requests["a"].block_tables:
        table = state_table(bench, "a")
        assert table == [NULL_BLOCK] * (len(table) - 1) + [own]
        assert states(bench).usage == 0.25
        bench.fill()
        bench.update()
    assert bench.outputs["a"] == [PLAIN_TOKEN] * 60
    assert states(bench).usage == 0.0


def test_a_request_is_admitted_for_each_block_and_none_is_preempted() -> None:
    bench = make(2)
    for name in "abc":
        bench.add(name, 40, 10)
    assert [sorted(granted) for granted in bench.steps(12)] == [["a", "b"]] * 10 + [["c"]] * 2
    bench.run()
    assert bench.scheduler.num_preemptions == 0


def test_an_urgent_request_takes_the_place_of_one_that_holds_the_block() -> None:
    bench = make(2, policy="priority", preempt_for_priority=True)
    bench.add("lesser", 20, 30, priority=5)
    bench.add("equal", 20, 30)
    bench.step()
    bench.add("urgent", 20, 5)
    assert bench.step().keys() == {"equal", "urgent"}
    assert bench.preempted == ["lesser"]
    bench.run()
    assert bench.outputs["lesser"] == [PLAIN_TOKEN] * 30


def test_prompts_share_a_step_with_no_more_than_can_be_admitted() -> None:
    """The adaptive threshold is a share of the step for each prompt that may take part in it."""
    bench = make(2, budget=60, long_prefill_token_threshold_adaptive=True)
    for name in "abcdef":
        bench.add(name, 100, 5)
    assert bench.step() == {"a": 30, "b": 30}


def test_a_preempted_request_continues_from_its_last_snapshot() -> None:
    bench = make(9)
    bench.add("a", 150, 60)
    bench.steps(50)
    assert len(bench.outputs["a"]) == 50
    bench.scheduler.preempt(bench.requests["a"])
    assert states(bench).usage == 0.0
    assert bench.step() == {"a": 200 - 192}
    bench.run()
    assert bench.outputs["a"] == [PLAIN_TOKEN] * 60


def test_a_request_that_ends_leaves_its_snapshot() -> None:
    """It may end with the step that has written the snapshot."""
    bench = make(4)
    prompt = list(range(100, 140))
    bench.add("a", prompt, 1)
    bench.step()
    assert "a" in bench.finished
    bench.add("b", prompt, 1)
    assert bench.step() == {"b": 8}


def test_a_failed_request_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = make(4)
    prompt = list(range(100, 140))
    bench.add("a", prompt, 5)
    bench.step()
    bench.scheduler.fail_request(bench.requests["a"].req_id, "its logits are not numbers")
    bench.add("b", prompt, 1)
    bench.step()
    assert cached(bench, "b") == 0
    assert states(bench).pool.num_free == 4


def test_a_state_that_cannot_be_hashed_is_dropped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench = make(4)
    bench.add("a", 40, 12)
    bench.step()

    def broken(*_: object) -> None:
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(bench.scheduler.kv, "_extend_hashes", broken)
    with caplog.at_level(logging.ERROR):
        bench.steps(3)
    assert [record.getMessage() for record in caplog.records] == [
        "states of request 0 are not cached"
    ]
    assert states(bench).pool.num_free == 3
    monkeypatch.undo()
    bench.run()
    assert bench.outputs["a"] == [PLAIN_TOKEN] * 12


def test_a_reset_forgets_the_states() -> None:
    bench = make(4, groups=())
    prompt = list(range(100, 140))
    bench.add("a", prompt, 20)
    bench.steps(2)
    assert not bench.scheduler.reset_prefix_cache()
    assert bench.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert bench.step() == {"a": 42}
    bench.run()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_lost_worker_takes_its_states_with_it(depth: int) -> None:
    bench = make(3, depth=depth, budget=50)
    for name in "abcd":
        bench.add(name, 60, 30)
    for _ in range(7):
        bench.fill()
        bench.update()
    bench.fill()
    bench.lose_worker()
    assert states(bench).pool.num_free == 3
    bench.overlap()
    assert bench.outputs == dict.fromkeys("abcd", [PLAIN_TOKEN] * 30)


def test_a_model_without_attention_needs_no_kv_blocks() -> None:
    bench = make(3, groups=(), blocks=2, max_model_len=4096)
    for name in "abcd":
        bench.add(name, 2000, 30)
    bench.run()
    assert bench.outputs == dict.fromkeys("abcd", [PLAIN_TOKEN] * 30)
    assert bench.scheduler.num_preemptions == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_groups": (STATES, FULL)}, "at the end"),
        ({"kv_groups": (FULL, STATES, STATES)}, "only one"),
        ({"num_state_blocks": 1}, "num_state_blocks 1 must be at least 2"),
        ({"kv_groups": (FULL,)}, "num_state_blocks needs a state group"),
        ({"mamba_block_size": 24}, "mamba_block_size 24 must be a multiple of block_size 16"),
    ],
)
def test_options_that_contradict_a_state_group_are_refused(
    options: dict[str, Any], message: str
) -> None:
    usual: dict[str, Any] = {"kv_groups": (FULL, STATES), "num_state_blocks": 9}
    SchedulerOptions(**usual)
    with pytest.raises(ValueError, match=message):
        SchedulerOptions(**(usual | options))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 512),
        ({"block_size": 48}, 528),
        ({"block_size": 1024}, 1024),
        ({"mamba_block_size": 96}, 96),
    ],
)
def test_the_default_spacing_is_a_multiple_of_the_block_size(
    settings: dict[str, Any], expected: int
) -> None:
    config = configure(**settings)
    facts = ModelFacts("m", 9, 99, config.cache.block_size, 9, [], num_state_blocks=9)
    facts.kv_groups.append(STATES)
    assert SchedulerOptions.combine(config, facts, 0.0).mamba_block_size == expected


def test_the_statistics_have_the_share_of_blocks_that_requests_hold() -> None:
    """Snapshots are not counted."""
    bench = make(4)
    bench.add("a", 100, 20)
    bench.steps(3)
    stats = scheduler_stats(bench.scheduler)
    assert stats.state_cache_usage == 0.25
    line = StatsLine(1.0, 0.0).render(stats, 1.0)
    assert line is not None
    assert "KV cache usage: 2.7%, State cache usage: 25.0%, Prefix" in line
    assert scheduler_stats(Harness().scheduler).state_cache_usage is None

"""Slots and memory: admission, waiting, refusal, and nothing is left behind."""

import pytest

from tests.core.harness import Harness


def test_finished_ids_are_sent_once_and_slots_are_reused() -> None:
    bench = Harness(seqs=4)
    for name in "abcdef":
        bench.add(name, 10, 2)
    assert bench.steps(2) == [dict.fromkeys("abcd", 10), dict.fromkeys("abcd", 1)]
    assert bench.step() == {"e": 10, "f": 10}
    assert bench.notices == ["a", "b", "c", "d"]
    assert bench.step() == {"e": 1, "f": 1}
    assert bench.notices == []
    assert bench.step() == {}
    assert bench.notices == ["e", "f"]


def test_the_front_waiter_that_does_not_fit_stops_admission() -> None:
    """The small request behind it would fit all the time."""
    bench = Harness(blocks=6)
    bench.add("a", 40, 3)
    assert bench.step() == {"a": 40}
    bench.add("b", 64, 5)
    bench.add("c", 10, 5)
    assert bench.steps(2) == [{"a": 1}, {"a": 1}]
    assert bench.step() == {"b": 64, "c": 10}
    assert bench.step() == {"b": 1}
    assert bench.preempted == ["c"]
    assert bench.steps(3) == [{"b": 1}] * 3
    assert bench.step() == {"c": 11}
    bench.run()
    assert {name: len(tokens) for name, tokens in bench.outputs.items()} == {"a": 3, "b": 5, "c": 5}


def test_reserving_the_whole_input_prevents_thrashing() -> None:
    """Without it `b` is admitted and preempted by turns, and its chunks are wasted."""
    bench = Harness(blocks=6, budget=32, scheduler_reserve_full_isl=False)
    bench.add("a", 30, 6)
    assert bench.step() == {"a": 30}
    bench.add("b", 70, 5)
    assert bench.steps(5) == [{"a": 1, "b": 31}, {"a": 1}] * 2 + [{"a": 1, "b": 31}]
    bench.run()
    assert bench.scheduler.num_preemptions == 2

    bench = Harness(blocks=6, budget=32)
    bench.add("a", 30, 6)
    assert bench.step() == {"a": 30}
    bench.add("b", 70, 5)
    assert bench.steps(5) == [{"a": 1}] * 5
    assert bench.steps(3) == [{"b": 32}, {"b": 32}, {"b": 6}]
    bench.run()
    assert bench.scheduler.num_preemptions == 0
    assert {name: len(tokens) for name, tokens in bench.outputs.items()} == {"a": 6, "b": 5}


def test_a_hundred_requests_leave_no_state() -> None:
    bench = Harness()
    for i in range(100):
        bench.add(str(i), 10, 3)
    assert [bool(grants) for grants in bench.steps(22)] == [True] * 21 + [False]
    assert bench.scheduler.running == []
    assert bench.queue == []
    assert bench.scheduler.schedule() is None
    assert bench.num_free == 255
    assert bench.worker.mirror == {}


def test_a_request_that_can_never_fit_is_refused_and_blocks_no_other() -> None:
    """vLLM admits it, and it waits for ever with all requests behind it."""
    bench = Harness(blocks=3)
    with pytest.raises(ValueError, match="max_tokens lets request 0 outgrow the whole KV cache"):
        bench.add("a", 40)
    bench.add("b", 4, 2)
    bench.run()
    assert bench.finished == {"b": "length"}


def test_what_just_fits_runs_alone_to_its_end() -> None:
    bench = Harness(blocks=6)
    bench.add("a", 60, 21)
    bench.run()
    assert len(bench.outputs["a"]) == 21


@pytest.mark.parametrize(
    ("length", "max_tokens", "outputs", "field"),
    [
        (0, 1, [], "prompt_token_ids"),
        (100, 1, [], "output_token_ids"),
        (10, 2, [5, 5], "output_token_ids"),
        (60, 30, [], "max_tokens"),
    ],
)
def test_what_could_never_run_is_refused_by_the_field_at_fault(
    length: int, max_tokens: int, outputs: list[int], field: str
) -> None:
    bench = Harness(blocks=6, max_model_len=100)
    with pytest.raises(ValueError, match=field):
        bench.add("a", length, max_tokens, outputs=outputs)
    assert not bench.scheduler.has_unfinished


def test_watermark_holds_blocks_back_only_while_something_runs() -> None:
    bench = Harness(blocks=10, watermark=0.4)
    bench.add("a", 96, 2)
    assert bench.step() == {"a": 96}
    bench.add("b", 16, 2)
    assert bench.step() == {"a": 1}
    assert bench.step() == {"b": 16}

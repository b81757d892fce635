"""Steps in flight share the decoding requests, so that each stage computes another one."""

from itertools import pairwise

import pytest

from tests.core.harness import PLAIN_TOKEN, Harness


@pytest.mark.parametrize("is_elastic", [False, True])
def test_steps_in_flight_share_the_requests(is_elastic: bool) -> None:
    """No request is in two of them, and all steps have as many."""
    bench = Harness(depth=2, pipeline_parallel_size=2, elastic_token_budget=is_elastic)
    for name in "abcdef":
        bench.add(name, 3, max_tokens=50)
    bench.step()  # all prompts at once
    assert bench.fill() == [dict.fromkeys("abc", 1), dict.fromkeys("def", 1)]
    for _ in range(10):
        for expected in ("abc", "def"):
            bench.update()
            assert bench.fill() == [dict.fromkeys(expected, 1)]


@pytest.mark.parametrize("num_stages", [2, 3, 5])
def test_requests_come_and_go(num_stages: int) -> None:
    """Each is computed to its end, however many there are, and never twice at the same time."""
    bench = Harness(depth=num_stages, pipeline_parallel_size=num_stages, seqs=8, budget=32)
    for number in range(30):
        bench.add(f"r{number}", 1 + number % 7, max_tokens=2 + number * 5 % 23)
    num_steps = 0
    while bench.scheduler.has_unfinished:
        bench.fill()
        sampling = [request for _, part in bench.scheduler.in_flight for request in part]
        if len(bench.scheduler.running) > 1:
            assert len(set(sampling)) == len(sampling)
        bench.update()
        num_steps += 1
        assert num_steps < 2000
    for number in range(30):
        assert bench.outputs[f"r{number}"] == [PLAIN_TOKEN] * (2 + number * 5 % 23)


def test_no_request_waits_for_more_than_the_steps_in_flight() -> None:
    """The stages do not divide the number of requests."""
    bench = Harness(depth=3, pipeline_parallel_size=3)
    for name in "abcdefg":
        bench.add(name, 2, max_tokens=90)
    bench.step()
    steps = bench.fill()
    for _ in range(60):
        bench.update()
        steps += bench.fill()
    for name in "abcdefg":
        computed = [number for number, step in enumerate(steps) if name in step]
        assert all(after - before == 3 for before, after in pairwise(computed))


def test_a_single_request_is_scheduled_ahead_of_its_token() -> None:
    bench = Harness(depth=2, pipeline_parallel_size=2)
    bench.add("a", 3, max_tokens=9)
    assert bench.fill() == [{"a": 3}, {"a": 1}]
    bench.update()
    assert bench.fill() == [{"a": 1}]


def test_chunks_of_a_prompt_follow_each_other() -> None:
    bench = Harness(depth=2, pipeline_parallel_size=2, budget=16)
    bench.add("short", 2, max_tokens=40)
    bench.step()
    bench.add("long", 60, max_tokens=4)
    assert [step["long"] for step in bench.fill()] == [15, 16]
    bench.update()
    assert bench.fill() == [{"short": 1, "long": 15}]


def test_steps_in_flight_share_the_requests_with_drafts() -> None:
    """One with drafts in a step is in no other step until it is known which of them are right."""
    guesses = {name: {1: [PLAIN_TOKEN, PLAIN_TOKEN], 4: [8]} for name in "abcd"}
    bench = Harness(
        depth=2,
        pipeline_parallel_size=2,
        num_speculative_tokens=2,
        adaptive_speculation=False,
        guesses=guesses,
    )
    for name in "abcd":
        bench.add(name, 3, max_tokens=9)
    bench.step()
    assert bench.fill() == [dict.fromkeys("ab", 3), dict.fromkeys("cd", 3)]
    for expected in ("ab", "cd"):
        bench.update()
        assert bench.fill() == [dict.fromkeys(expected, 2)]
    bench.overlap()
    assert all(tokens == [PLAIN_TOKEN] * 9 for tokens in bench.outputs.values())


def test_a_single_request_with_drafts_waits_for_its_tokens() -> None:
    bench = Harness(
        depth=2,
        pipeline_parallel_size=2,
        num_speculative_tokens=2,
        adaptive_speculation=False,
        guesses={"a": {1: [PLAIN_TOKEN, 8]}},
    )
    bench.add("a", 3, max_tokens=9)
    bench.step()
    assert bench.fill() == [{"a": 3}]
    bench.update()
    assert bench.fill() == [{"a": 1}, {"a": 1}]


def test_without_stages_every_step_has_all_requests() -> None:
    bench = Harness(depth=2)
    for name in "abcd":
        bench.add(name, 3)
    bench.step()
    assert bench.fill() == [dict.fromkeys("abcd", 1)] * 2

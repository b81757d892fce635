"""First come, first served when memory runs out: the victim, and how it resumes."""

from tests.core.harness import PLAIN_TOKEN, Harness


def test_the_last_is_preempted_and_continues_with_its_outputs() -> None:
    bench = Harness(blocks=7)
    for name in "abc":
        bench.add(name, 30, 8)
    assert bench.step() == dict.fromkeys("abc", 30)
    assert bench.steps(2) == [dict.fromkeys("abc", 1)] * 2
    assert bench.step() == {"a": 1, "b": 1}
    assert bench.preempted == ["c"]
    assert bench.steps(4) == [{"a": 1, "b": 1}] * 4
    assert bench.step() == {"c": 33}
    (resumed,) = bench.sent[-1].scheduled_new_reqs
    assert (len(resumed.token_ids) // 4, resumed.num_prompt_tokens) == (33, 30)
    assert bench.steps(5) == [{"c": 1}] * 4 + [{}]
    assert bench.outputs == dict.fromkeys("abc", [PLAIN_TOKEN] * 8)


def test_a_preempted_request_comes_back_before_later_arrivals() -> None:
    bench = Harness(blocks=7)
    for name in "abc":
        bench.add(name, 30, 8)
    bench.steps(3)
    bench.add("d", 10, 6)
    assert bench.step() == {"a": 1, "b": 1}
    assert bench.queue == ["c", "d"]
    bench.steps(4)
    assert bench.step() == {"c": 33, "d": 10}
    bench.run()
    assert {name: len(tokens) for name, tokens in bench.outputs.items()} == {
        **dict.fromkeys("abc", 8),
        "d": 6,
    }


def test_no_request_is_admitted_in_a_step_that_preempted() -> None:
    """The newcomer would fit."""
    bench = Harness(blocks=8)
    for name, length in (("a", 30), ("b", 30), ("c", 40)):
        bench.add(name, length)
    bench.steps(3)
    bench.add("d", 1, 2)
    assert bench.step() == {"a": 1, "b": 1}
    assert bench.preempted == ["c"]
    assert bench.num_free == 1, "d would have fitted"


def test_a_resumed_request_hits_its_own_blocks() -> None:
    bench = Harness(blocks=9, caching=True)
    bench.add("a", 64, 4)
    bench.add("b", 62, 4)
    assert bench.step() == {"a": 64, "b": 62}
    assert bench.step() == {"a": 1}
    assert bench.preempted == ["b"]
    assert bench.steps(2) == [{"a": 1}] * 2
    assert bench.step() == {"b": 63 - 48}
    assert bench.requests["b"].num_cached_tokens == 0, "the hits of its first life count"
    bench.run()
    assert bench.outputs == dict.fromkeys("ab", [PLAIN_TOKEN] * 4)

"""Several steps in flight: what is granted ahead, late and wasted.

A request continues from tokens that are still pending, so the tables differ from those of an engine
that waits for them; the tokens computed in total are the same.
"""

import pytest

from protocol.sampling import SamplingParams
from tests.core.harness import EOS, PLAIN_TOKEN, Harness, preempt_in_flight


def test_a_prompt_of_several_chunks_that_is_preempted_in_flight_is_owed_nothing() -> None:
    """The first request continues at once and takes the memory of the second's next chunk."""
    bench = Harness(blocks=11, budget=100, depth=3)
    bench.add("a", 80)
    bench.add("b", 80)
    assert bench.schedule() == {"a": 80, "b": 20}
    assert bench.schedule() == {"a": 1}
    assert bench.preempted == ["b"]
    assert bench.requests["b"].num_late_tokens == 0
    bench.abort("a")
    assert bench.schedule() == {"b": 80}, "it comes back while its old chunk is in flight"
    assert [bench.update() for _ in range(3)] == [{}, {}, {"b": PLAIN_TOKEN}]


def test_the_late_token_of_a_preempted_request_is_delivered_and_kept() -> None:
    bench = Harness(blocks=11, budget=160, depth=2, script={"b": [42]})
    bench.add("a", 80)
    bench.add("b", 80)
    assert bench.schedule() == {"a": 80, "b": 80}
    assert bench.schedule() == {"a": 1}
    assert bench.preempted == ["b"]
    assert bench.update() == {"a": PLAIN_TOKEN, "b": 42}
    assert bench.requests["b"].output_token_ids == [42]
    bench.abort("a")
    assert bench.schedule() == {"b": 81}
    bench.overlap()
    assert bench.outputs["b"] == [42] + [PLAIN_TOKEN] * 7


def test_three_steps_in_flight_leave_no_bubble_and_compute_no_more() -> None:
    """vLLM sends empty steps until the first token is back; Troika decodes on from it."""
    bench = Harness(depth=3, seqs=2, budget=10)
    bench.add("a", 12, 4)
    bench.add("b", 12, 4)
    assert bench.fill() == [{"a": 10}, {"a": 2, "b": 8}, {"a": 1, "b": 4}]
    assert bench.schedule() == {}, "the pipe is full"
    assert bench.update() == {}
    assert bench.schedule() == {"a": 1, "b": 1}
    assert bench.update() == {"a": PLAIN_TOKEN}
    bench.overlap()
    assert bench.outputs == dict.fromkeys("ab", [PLAIN_TOKEN] * 4)
    assert bench.worker.total_scheduled == 2 * (12 + 4 - 1)


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_a_length_stop_wastes_nothing(max_tokens: int) -> None:
    """Pending tokens count towards the length, so the step after the last is never sent."""
    bench = Harness(depth=2)
    bench.add("a", 10, max_tokens)
    bench.overlap()
    assert bench.worker.total_scheduled == 10 + max_tokens - 1
    assert len(bench.outputs["a"]) == max_tokens


def test_a_stop_token_wastes_one_decode_and_its_output_is_dropped() -> None:
    bench = Harness(depth=2, script={"a": [7, 42, 9]})
    bench.add("a", 10, params=SamplingParams(stop_token_ids=[42]))
    assert bench.fill() == [{"a": 10}, {"a": 1}]
    assert bench.update() == {"a": 7}
    assert bench.schedule() == {"a": 1}
    assert bench.update() == {"a": 42}
    assert bench.num_free == 255, "although one decode is under way"
    assert bench.update() == {}
    assert bench.worker.total_scheduled == 10 + 2
    assert bench.outputs["a"] == [7, 42]
    bench.step()
    assert bench.notices == ["a"]


def test_an_abort_frees_at_once_and_ignores_both_pending_tokens() -> None:
    bench = Harness(depth=2)
    bench.add("a", 10)
    bench.fill()
    assert bench.abort("a")
    assert bench.num_free == 255
    assert bench.update() == {}
    assert bench.update() == {}
    bench.step()
    assert bench.notices == ["a"]
    assert bench.scheduler.schedule() is None


def test_a_late_token_can_finish_a_preempted_request() -> None:
    bench = Harness(blocks=8, depth=2, script={"b": [42, 43, EOS]})
    preempt_in_flight(bench)
    bench.update()
    assert bench.finished == {"b": "stop"}
    assert bench.scheduler.num_waiting == 0
    bench.update()
    bench.schedule()
    assert bench.notices == [], "the worker has forgotten it already"


def test_who_waits_for_its_last_token_is_named_with_zero() -> None:
    bench = Harness(depth=2)
    bench.add("a", 10, 1)
    bench.add("b", 10, 5)
    bench.schedule()
    assert bench.schedule() == {"b": 1}
    assert bench.sent[-1].num_scheduled_tokens == {0: 0}


def test_nothing_is_sent_while_all_wait_for_their_last_tokens() -> None:
    bench = Harness(depth=2)
    bench.add("a", 10, 1)
    bench.schedule()
    assert bench.scheduler.schedule() is None
    assert len(bench.scheduler.in_flight) == 1

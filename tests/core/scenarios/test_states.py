"""Pauses, resets, sleep, and requests that are blocked until another event."""

import pytest

from core_proc.request import RequestStatus
from protocol.api_core import PauseMode
from tests.core.harness import PLAIN_TOKEN, Harness

GRAMMAR = RequestStatus.WAITING_FOR_GRAMMAR


def test_a_pause_of_new_ones_lets_the_running_ones_decode() -> None:
    bench = Harness()
    bench.add("a", 10)
    bench.step()
    bench.scheduler.pause(PauseMode.PAUSED_NEW)
    bench.add("b", 10)
    assert bench.steps(2) == [{"a": 1}] * 2
    assert bench.queue == ["b"]
    bench.scheduler.resume()
    assert bench.step() == {"a": 1, "b": 10}


def test_a_pause_of_all_stops_everything_and_loses_nothing() -> None:
    bench = Harness()
    bench.add("a", 10)
    bench.step()
    bench.scheduler.pause(PauseMode.PAUSED_ALL)
    bench.add("b", 10)
    assert bench.steps(2) == [{}, {}]
    assert len(bench.sent) == 1
    assert bench.scheduler.has_unfinished
    bench.scheduler.resume()
    assert bench.step() == {"a": 1, "b": 10}
    bench.run()
    assert bench.outputs == dict.fromkeys("ab", [PLAIN_TOKEN] * 8)


def test_requests_that_end_during_a_pause_are_still_reported() -> None:
    """Slots of the worker become free, whatever the core waits for."""
    bench = Harness()
    bench.add("a", 10)
    bench.add("b", 10)
    bench.step()
    bench.scheduler.pause(PauseMode.PAUSED_ALL)
    bench.abort("a")
    assert bench.step() == {}
    assert bench.notices == ["a"]
    assert list(bench.worker.mirror) == [1]


def test_steps_in_flight_bring_their_tokens_during_a_pause() -> None:
    bench = Harness(depth=2)
    bench.add("a", 10)
    bench.fill()
    bench.scheduler.pause(PauseMode.PAUSED_ALL)
    assert [bench.update(), bench.update()] == [{"a": PLAIN_TOKEN}] * 2
    assert bench.schedule() == {}


def test_a_reset_of_the_cache_is_refused_while_blocks_are_held_or_preempts_their_holders() -> None:
    bench = Harness(caching=True)
    bench.add("a", 40)
    bench.add("b", 40)
    bench.step()
    assert not bench.scheduler.reset_prefix_cache()
    assert bench.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert bench.queue == ["a", "b"]
    assert bench.step() == {"a": 41, "b": 41}
    assert bench.preempted == ["a", "b"]
    bench.run()
    assert bench.outputs == dict.fromkeys("ab", [PLAIN_TOKEN] * 8)


def test_after_a_reset_nothing_of_the_old_contents_is_hit() -> None:
    bench = Harness(caching=True)
    bench.add("a", list(range(40)), 1)
    bench.run()
    assert bench.scheduler.reset_prefix_cache()
    bench.add("b", list(range(40)), 1)
    assert bench.step() == {"b": 40}


def test_a_request_that_waits_for_its_grammar_keeps_its_place_and_blocks_no_other() -> None:
    bench = Harness(seqs=2)
    bench.add("g", 10, blocked=GRAMMAR)
    bench.add("a", 10)
    assert bench.step() == {"a": 10}
    bench.add("b", 10)
    bench.scheduler.unblock(bench.requests["g"].req_id)
    assert bench.queue == ["g", "b"]
    assert bench.step() == {"a": 1, "g": 10}
    assert bench.queue == ["b"]


@pytest.mark.parametrize("ends", ["abort", "fail"])
def test_a_blocked_request_can_end_before_it_ever_ran(ends: str) -> None:
    """A grammar that cannot be compiled fails its own request only."""
    bench = Harness()
    request = bench.add("g", 10, blocked=GRAMMAR)
    if ends == "abort":
        assert bench.abort("g")
        assert request.status is RequestStatus.FINISHED_ABORTED
    else:
        bench.scheduler.fail_request(request.req_id, "no such rule")
        (failure,) = bench.scheduler.take_failures()
        assert (failure.request, failure.error) == (request, "no such rule")
        assert request.status is RequestStatus.FINISHED_ERROR
        assert bench.scheduler.take_failures() == []
    assert bench.queue == []
    bench.scheduler.unblock(request.req_id)
    assert bench.step() == {}


def test_sleep_gives_up_all_kv_and_resume_computes_it_again() -> None:
    bench = Harness(caching=True)
    bench.add("a", list(range(40)))
    bench.add("b", 10, blocked=GRAMMAR)
    bench.steps(2)
    bench.scheduler.sleep()
    assert bench.scheduler.pause_mode is PauseMode.PAUSED_ALL
    assert bench.num_free == 255
    assert bench.step() == {}
    assert bench.preempted == ["a"]
    assert bench.worker.mirror == {}
    bench.scheduler.resume()
    assert bench.step() == {"a": 42}
    bench.scheduler.unblock(bench.requests["b"].req_id)
    bench.run()
    assert bench.outputs == dict.fromkeys("ab", [PLAIN_TOKEN] * 8)


def test_a_pause_of_new_requests_admits_those_that_have_run_before() -> None:
    """Requests that were preempted, lost with the worker, or begun in an earlier core, run."""
    bench = Harness(policy="priority")
    bench.add("a", 10, priority=5)
    bench.step()
    bench.scheduler.pause(PauseMode.PAUSED_NEW)
    bench.add("new", 10, priority=0)
    bench.add("resent", 10, outputs=[7, 7], priority=9)
    assert bench.step() == {"a": 1, "resent": 12}
    bench.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert bench.step() == {"a": 12, "resent": 13}
    bench.lose_worker()
    assert bench.step() == {"a": 13, "resent": 14}
    assert bench.queue == ["new"]

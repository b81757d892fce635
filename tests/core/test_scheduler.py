"""One step at a time: who gets which tokens, who waits, what ends a request, what is sent."""

import pytest

from core_proc.options import SchedulerOptions
from core_proc.request import TRANSITIONS, Request, RequestStatus
from core_proc.scheduler import Scheduler
from protocol.core_worker import ModelRunnerOutput
from protocol.sampling import SamplingParams
from tests.core.harness import EOS, PLAIN_TOKEN, Harness


def test_all_that_fit_start_together_in_order_of_arrival() -> None:
    bench = Harness()
    names = [str(i) for i in range(10)]
    for name in names:
        bench.add(name, 10)
    first, second = bench.steps(2)
    assert list(first.items()) == [(name, 10) for name in names]
    assert second == dict.fromkeys(names, 1)


def test_the_threshold_cuts_long_prompts() -> None:
    bench = Harness(budget=1024, long_prefill_token_threshold=400)
    for name in "abc":
        bench.add(name, 800)
    assert bench.steps(4) == [
        {"a": 400, "b": 400, "c": 224},
        {"a": 400, "b": 400, "c": 224},
        {"a": 1, "b": 1, "c": 352},
        {"a": 1, "b": 1, "c": 1},
    ]


def test_the_threshold_holds_for_a_request_alone() -> None:
    bench = Harness(budget=100, long_prefill_token_threshold=16)
    bench.add("long", 50, 2)
    bench.add("s1", 10, 2)
    bench.add("s2", 10, 2)
    assert bench.steps(5) == [
        {"long": 16, "s1": 10, "s2": 10},
        {"long": 16, "s1": 1, "s2": 1},
        {"long": 16},
        {"long": 2},
        {"long": 1},
    ]


def test_the_adaptive_threshold_is_a_fair_share_of_the_budget() -> None:
    bench = Harness(
        budget=120, long_prefill_token_threshold=16, long_prefill_token_threshold_adaptive=True
    )
    for name in "abc":
        bench.add(name, 100, 1)
    assert bench.step() == {"a": 40, "b": 40, "c": 40}


@pytest.mark.parametrize(
    ("chunked", "second"),
    [(True, {"a": 1, "b": 576, "c": 10}), (False, {"a": 1, "b": 800, "c": 10})],
)
def test_slots_bound_admission_with_and_without_chunks(
    chunked: bool, second: dict[str, int]
) -> None:
    bench = Harness(budget=1024, seqs=3, enable_chunked_prefill=chunked)
    for name, length in zip("abcd", (800, 800, 10, 10), strict=True):
        bench.add(name, length)
    assert bench.step() == ({"a": 800, "b": 224} if chunked else {"a": 800})
    assert bench.step() == second


def test_without_chunks_a_prompt_beyond_the_budget_still_runs() -> None:
    bench = Harness(budget=64, enable_chunked_prefill=False)
    bench.add("a", 100, 1)
    assert bench.steps(2) == [{"a": 64}, {"a": 36}]


def test_newcomers_join_running_requests_within_the_budget() -> None:
    bench = Harness(budget=64)
    bench.add("a", 60, 4)
    assert bench.step() == {"a": 60}
    bench.add("b", 100, 2)
    bench.add("c", 5, 2)
    assert bench.steps(4) == [
        {"a": 1, "b": 63},
        {"a": 1, "b": 37, "c": 5},
        {"a": 1, "b": 1, "c": 1},
        {},
    ]
    assert sorted(bench.notices) == ["a", "b", "c"]


def test_a_small_budget_is_handed_out_in_order() -> None:
    bench = Harness(budget=10)
    for name in "abc":
        bench.add(name, 25, 2)
    assert bench.steps(10) == [
        {"a": 10},
        {"a": 10},
        {"a": 5, "b": 5},
        {"a": 1, "b": 9},
        {"b": 10},
        {"b": 1, "c": 9},
        {"b": 1, "c": 9},
        {"c": 7},
        {"c": 1},
        {},
    ]


def test_max_num_scheduled_tokens_replaces_the_budget() -> None:
    bench = Harness(budget=64, max_num_scheduled_tokens=16)
    bench.add("a", 40)
    bench.add("b", 5)
    assert bench.steps(4) == [{"a": 16}, {"a": 16}, {"a": 8, "b": 5}, {"a": 1, "b": 1}]


def test_finished_ids_are_told_once_and_slots_are_reused() -> None:
    bench = Harness(seqs=4)
    for name in "abcdef":
        bench.add(name, 10, 2)
    assert bench.steps(2) == [dict.fromkeys("abcd", 10), dict.fromkeys("abcd", 1)]
    assert bench.step() == {"e": 10, "f": 10}
    assert bench.notices == ["a", "b", "c", "d"]
    assert bench.step() == {"e": 1, "f": 1}
    assert bench.notices == []


def test_the_front_waiter_that_does_not_fit_stops_admission() -> None:
    bench = Harness(blocks=6)
    bench.add("a", 40, 3)
    assert bench.step() == {"a": 40}
    bench.add("b", 64, 5)
    bench.add("c", 10, 5)
    assert bench.steps(2) == [{"a": 1}, {"a": 1}]
    assert bench.step() == {"b": 64, "c": 10}
    assert bench.step() == {"b": 1}
    assert bench.preempted == ["c"]


def test_watermark_holds_blocks_back_only_while_something_runs() -> None:
    bench = Harness(blocks=10, watermark=0.4)
    bench.add("a", 96, 2)
    assert bench.step() == {"a": 96}
    bench.add("b", 16, 2)
    assert bench.step() == {"a": 1}
    assert bench.step() == {"b": 16}


@pytest.mark.parametrize(
    ("tokens", "params", "kept", "reason", "stop_token_id"),
    [
        ([10, 42, 12], {"stop_token_ids": [42]}, 2, "stop", 42),
        ([10, 42], {"stop_token_ids": [42], "max_tokens": 2}, 2, "stop", 42),
        ([10, EOS, 12], {}, 2, "stop", None),
        ([10, EOS, 12], {"ignore_eos": True, "max_tokens": 3}, 3, "length", None),
        ([EOS, 5], {"ignore_eos": True, "stop_token_ids": [EOS]}, 1, "stop", EOS),
        ([EOS, EOS, EOS, EOS], {"min_tokens": 3}, 3, "stop", None),
        ([1, 1, 1], {"max_tokens": 2}, 2, "length", None),
    ],
)
def test_what_ends_a_request(
    tokens: list[int],
    params: dict[str, object],
    kept: int,
    reason: str,
    stop_token_id: int | None,
) -> None:
    bench = Harness(script={"a": tokens})
    request = bench.add("a", 5, params=SamplingParams(**params))  # type: ignore[arg-type]
    bench.run()
    assert bench.outputs["a"] == tokens[:kept]
    assert bench.finished["a"] == reason
    assert request.stop_token_id == stop_token_id


def test_the_model_length_ends_a_request_with_its_last_token_delivered() -> None:
    bench = Harness(max_model_len=40)
    bench.add("a", 36)
    bench.run()
    assert len(bench.outputs["a"]) == 4
    assert bench.finished["a"] == "length"


def test_abort_works_in_every_state_and_only_once() -> None:
    bench = Harness(seqs=1)
    bench.add("run", 10)
    bench.step()
    bench.add("wait", 10)
    assert bench.abort("run")
    assert bench.abort("wait")
    assert bench.num_free == 1023
    assert not bench.abort("run")
    assert bench.scheduler.abort_request(99) is None
    assert bench.step() == {}
    assert bench.notices == ["run"], "the worker never knew the other one"
    assert bench.scheduler.schedule() is None


def test_block_tables_travel_as_additions() -> None:
    bench = Harness()
    bench.add("a", 15, 20)
    bench.steps(3)
    grown = [step.scheduled_cached_reqs for step in bench.sent]
    assert bench.sent[0].scheduled_new_reqs[0].block_ids == [[1]]
    assert [rows.req_ids for rows in grown] == [[], [], [0]]
    assert grown[2].new_block_ids == [[[2]]]


def test_a_steady_step_names_nobody() -> None:
    bench = Harness()
    for name in "abc":
        bench.add(name, 20)
    bench.steps(2)
    step = bench.sent[-1]
    assert step.num_scheduled_tokens == {}
    assert step.scheduled_cached_reqs.req_ids == []
    assert step.total_num_scheduled_tokens == 3


def test_who_gets_nothing_of_the_budget_is_named_with_zero() -> None:
    """With more requests than tokens the fair share is 0, that is, no limit: one takes all."""
    bench = Harness(budget=2, long_prefill_token_threshold_adaptive=True)
    bench.add("a", 10)
    bench.add("b", 10)
    assert bench.step() == {"a": 1, "b": 1}
    bench.add("c", 10)
    assert bench.step() == {"a": 2}
    assert bench.sent[-1].num_scheduled_tokens == {0: 2, 1: 0}


def test_a_hundred_requests_leave_nothing_behind() -> None:
    bench = Harness()
    for i in range(100):
        bench.add(str(i), 10, 3)
    assert [bool(grants) for grants in bench.steps(22)] == [True] * 21 + [False]
    assert bench.scheduler.running == []
    assert bench.num_free == 1023
    assert bench.worker.mirror == {}


def test_outputs_of_an_earlier_life_stay_outputs() -> None:
    bench = Harness()
    request = bench.add("a", 10, 5, outputs=[7, 8, 9])
    assert bench.step() == {"a": 13}
    (new,) = bench.sent[0].scheduled_new_reqs
    assert (len(new.token_ids), new.num_prompt_tokens) == (13, 10)
    bench.run()
    assert request.output_token_ids == [7, 8, 9, PLAIN_TOKEN, PLAIN_TOKEN]
    assert bench.finished["a"] == "length"


@pytest.mark.parametrize(
    ("length", "max_tokens", "outputs", "field"),
    [
        (0, 1, [], "prompt_token_ids"),
        (100, 1, [], "output_token_ids"),
        (10, 2, [5, 5], "output_token_ids"),
        (60, 30, [], "max_tokens"),
    ],
)
def test_what_could_never_run_is_refused(
    length: int, max_tokens: int, outputs: list[int], field: str
) -> None:
    bench = Harness(blocks=6, max_model_len=100)
    with pytest.raises(ValueError, match=field):
        bench.add("a", length, max_tokens, outputs=outputs)
    assert not bench.scheduler.has_unfinished


def test_what_just_fits_runs_alone_to_its_end() -> None:
    bench = Harness(blocks=6)
    bench.add("a", 60, 21)
    bench.run()
    assert len(bench.outputs["a"]) == 21


def test_a_taken_id_is_refused() -> None:
    scheduler = Scheduler(SchedulerOptions())
    scheduler.add_request(Request(1, [5], SamplingParams()))
    with pytest.raises(ValueError, match="req_id 1"):
        scheduler.add_request(Request(1, [5], SamplingParams()))


@pytest.mark.parametrize(
    "config",
    [
        {"policy": "lottery"},
        {"num_blocks": 1},
        {"block_size": 0},
        {"max_num_seqs": 0},
        {"max_num_batched_tokens": 0},
        {"max_model_len": 1},
        {"watermark": 1.0},
        {"long_prefill_token_threshold": -1},
        {"max_steps_in_flight": 0},
    ],
)
def test_a_value_out_of_bounds_is_named(config: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(config))):
        Scheduler(SchedulerOptions(**config))  # type: ignore[arg-type]


def test_only_listed_transitions_are_possible() -> None:
    for status, allowed in TRANSITIONS.items():
        for target in RequestStatus:
            request = Request(0, [1], SamplingParams())
            request.status = status
            if target in allowed:
                request.become(target)
                continue
            with pytest.raises(AssertionError, match="cannot go"):
                request.become(target)


def test_an_output_of_another_step_is_refused() -> None:
    scheduler = Scheduler(SchedulerOptions())
    scheduler.add_request(Request(0, [1], SamplingParams()))
    scheduler.schedule()
    with pytest.raises(AssertionError, match="step 1, due is 0"):
        scheduler.update_from_output(ModelRunnerOutput(1, [5]))
    with pytest.raises(AssertionError, match="2 tokens, 1 requests sampled"):
        scheduler.update_from_output(ModelRunnerOutput(0, [5, 6]))
    assert len(scheduler.update_from_output(ModelRunnerOutput(0, [5]))) == 1
    with pytest.raises(AssertionError, match="none is due"):
        scheduler.update_from_output(ModelRunnerOutput(1, [5]))

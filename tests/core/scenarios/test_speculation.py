"""Several tokens of a request in one step: drafts of the worker that it verifies."""

import pytest

from tests.core.harness import EOS, PLAIN_TOKEN, Harness

SPECULATIVE = 3


def decoding(bench: Harness, prompt: int = 10, max_tokens: int = 20) -> None:
    """Run request a to its first output."""
    bench.add("a", prompt, max_tokens)
    assert bench.step() == {"a": prompt}


def test_right_drafts_are_kept_and_wrong_ones_do_not_count_as_computed() -> None:
    bench = Harness(
        num_speculative_tokens=SPECULATIVE,
        script={"a": [1, 1, 3, 9]},
        guesses={"a": {1: [1, 3, 4]}},
    )
    decoding(bench)
    request = bench.requests["a"]
    assert (request.num_computed_tokens, request.num_tokens) == (10, 11)
    assert bench.schedule() == {"a": 4}
    assert request.num_computed_tokens == 14
    bench.update()
    assert bench.outputs["a"] == [1, 1, 3, 9]
    assert (request.num_computed_tokens, request.num_tokens) == (13, 14)
    assert bench.scheduler.speculation.num_accepted_tokens == 2
    assert bench.scheduler.speculation.accepted_per_position == [1, 1, 0]
    assert bench.step() == {"a": 1}


def test_a_step_whose_drafts_are_all_wrong_brings_one_token() -> None:
    bench = Harness(num_speculative_tokens=SPECULATIVE, guesses={"a": {1: [1, 1, 1]}})
    decoding(bench)
    assert bench.step() == {"a": 4}
    assert bench.outputs["a"] == [PLAIN_TOKEN] * 2
    assert bench.requests["a"].num_computed_tokens == 11


def test_a_step_whose_drafts_are_all_right_brings_one_token_more() -> None:
    bench = Harness(num_speculative_tokens=SPECULATIVE, guesses={"a": {1: [PLAIN_TOKEN] * 3}})
    decoding(bench)
    assert bench.step() == {"a": 4}
    assert bench.outputs["a"] == [PLAIN_TOKEN] * 5
    assert bench.requests["a"].num_computed_tokens == 14
    assert bench.step() == {"a": 1}


def test_the_budget_cuts_drafts_in_order_of_admission() -> None:
    """The step of 6 goes to both, and first to the drafts of the first."""
    bench = Harness(
        num_speculative_tokens=SPECULATIVE,
        budget=6,
        guesses={name: {1: [PLAIN_TOKEN] * 3} for name in "ab"},
    )
    bench.add("a", 3)
    bench.add("b", 3)
    assert bench.step() == {"a": 3, "b": 3}
    assert bench.step() == {"a": 4, "b": 2}
    assert bench.outputs == {"a": [PLAIN_TOKEN] * 5, "b": [PLAIN_TOKEN] * 3}


def test_drafts_come_only_after_the_prompt_is_computed() -> None:
    bench = Harness(
        num_speculative_tokens=SPECULATIVE, budget=50, guesses={"a": {1: [PLAIN_TOKEN] * 3}}
    )
    bench.add("a", 80, 20)
    assert bench.steps(3) == [{"a": 50}, {"a": 30}, {"a": 4}]


def test_no_draft_is_verified_that_could_only_be_cut() -> None:
    """vLLM computes 4 tokens here and throws 2 of them away."""
    bench = Harness(num_speculative_tokens=SPECULATIVE, guesses={"a": {1: [PLAIN_TOKEN] * 3}})
    decoding(bench, max_tokens=3)
    assert bench.step() == {"a": 2}
    assert bench.outputs["a"] == [PLAIN_TOKEN] * 3
    assert bench.finished == {"a": "length"}


def test_drafts_end_with_the_longest_context() -> None:
    bench = Harness(
        num_speculative_tokens=SPECULATIVE,
        max_model_len=16,
        guesses={"a": {1: [PLAIN_TOKEN] * 3, 5: [PLAIN_TOKEN] * 3}},
    )
    decoding(bench)
    assert bench.steps(2) == [{"a": 4}, {"a": 1}]
    assert bench.finished == {"a": "length"}
    assert bench.requests["a"].num_tokens == 16


def test_tokens_after_a_stop_are_cut() -> None:
    bench = Harness(
        num_speculative_tokens=SPECULATIVE,
        script={"a": [7, 7, EOS, 7, 7]},
        guesses={"a": {1: [7, EOS, 7]}},
    )
    decoding(bench)
    bench.step()
    assert bench.outputs["a"] == [7, 7, EOS]
    assert bench.finished == {"a": "stop"}


def test_no_request_is_preempted_for_drafts() -> None:
    bench = Harness(
        blocks=5,  # 4 to use, all taken by two requests of 31 tokens
        num_speculative_tokens=SPECULATIVE,
        guesses={name: {1: [PLAIN_TOKEN] * 3} for name in "ab"},
    )
    bench.add("a", 30, 2)
    bench.add("b", 30, 2)
    bench.step()
    assert bench.num_free == 0
    bench.run()
    assert bench.scheduler.num_preemptions == 0


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_a_request_with_drafts_sits_out_until_its_tokens_are_known(depth: int) -> None:
    """The others do not, as long as those with drafts are the minority."""
    guesses = {"a": {1: [PLAIN_TOKEN] * 3, 5: [PLAIN_TOKEN]}}
    bench = Harness(num_speculative_tokens=SPECULATIVE, depth=depth, guesses=guesses)
    for name in "abc":
        bench.add(name, 10, 20)
    assert bench.step() == {"a": 10, "b": 10, "c": 10}
    grants = [{"a": 4, "b": 1, "c": 1}, {"b": 1, "c": 1}]
    assert bench.fill() == [*grants, *grants[1:] * 2][:depth]
    bench.update()
    assert bench.outputs["a"] == [PLAIN_TOKEN] * 5
    assert bench.schedule() == {"a": 2, "b": 1, "c": 1}


@pytest.mark.parametrize("depth", [2, 4])
def test_no_step_is_sent_without_most_of_the_requests(depth: int) -> None:
    """It would take the time of a step, and the requests with drafts would be half as fast."""
    guesses = {name: {1: [1, 1]} for name in "ab"}
    bench = Harness(num_speculative_tokens=SPECULATIVE, depth=depth, guesses=guesses)
    for name in "abc":
        bench.add(name, 10, 20)
    bench.step()
    assert bench.fill() == [{"a": 3, "b": 3, "c": 1}]
    bench.update()
    assert bench.fill() == [{"a": 1, "b": 1, "c": 1}] * depth


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_without_drafts_steps_overlap_as_without_speculation(depth: int) -> None:
    bench = Harness(num_speculative_tokens=SPECULATIVE, depth=depth)
    decoding(bench)
    assert bench.fill() == [{"a": 1}] * depth


def test_drafts_of_a_preempted_request_come_late_and_are_not_trusted() -> None:
    bench = Harness(
        depth=2,
        num_speculative_tokens=SPECULATIVE,
        guesses={"a": {1: [PLAIN_TOKEN, PLAIN_TOKEN, 1]}},
    )
    decoding(bench)
    bench.schedule()
    assert bench.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert bench.schedule() == {}, "its next position is not known yet"
    bench.update()
    assert bench.outputs["a"] == [PLAIN_TOKEN] * 4
    bench.update()
    assert bench.schedule() == {"a": 14}

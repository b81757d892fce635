"""Limits on prompts that are computed over several steps, and the elastic budget."""

import pytest

from core_proc.options import SchedulerOptions
from core_proc.scheduling import step
from protocol.sampling import SamplingParams
from tests.core.harness import Harness


def _mean_ttft(num_prompts: int, length: int, **options: object) -> float:
    """Return the mean number of tokens computed before a prompt's first token."""
    bench = Harness(budget=64, **options)  # type: ignore[arg-type]
    names = [f"p{i}" for i in range(num_prompts)]
    for name in names:
        bench.add(name, length, 1)
    clock, first_at = 0, {}
    while len(first_at) < num_prompts:
        clock += sum(bench.step().values())
        first_at |= {name: clock for name in bench.finished if name not in first_at}
    return sum(first_at.values()) / num_prompts


def test_a_limit_on_partial_prefills_brings_first_tokens_sooner_at_equal_work() -> None:
    unlimited = _mean_ttft(8, 400, long_prefill_token_threshold=8)
    limited = _mean_ttft(8, 400, long_prefill_token_threshold=32, max_num_partial_prefills=2)
    assert unlimited == 8 * 400, "all share each step, and all come last"
    assert limited < 0.65 * unlimited


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_no_more_prompts_are_begun_than_the_limit_allows(limit: int) -> None:
    bench = Harness(budget=64, long_prefill_token_threshold=8, max_num_partial_prefills=limit)
    for name in "abcde":
        bench.add(name, 40, 3)
    while bench.scheduler.has_unfinished:
        bench.step()
        begun = [r for r in bench.scheduler.running if r.num_output_tokens == 0]
        assert len(begun) <= limit
    assert set(bench.finished) == set("abcde")


def test_a_prompt_that_fits_whole_is_not_partial() -> None:
    bench = Harness(budget=64, long_prefill_token_threshold=16, max_num_partial_prefills=1)
    bench.add("long", 100, 2)
    bench.add("short", 10, 2)
    bench.add("long too", 100, 2)
    bench.add("behind", 10, 2)
    assert bench.step() == {"long": 16, "short": 10}
    assert bench.queue == ["long too", "behind"], "the front waits, and others behind it"


def test_short_prompts_overtake_long_ones_that_may_not_begin() -> None:
    bench = Harness(budget=64, long_prefill_token_threshold=16, max_long_partial_prefills=1)
    for name, length in (("long", 100), ("long too", 100), ("short", 10), ("third", 90)):
        bench.add(name, length, 20)
    assert bench.step() == {"long": 16, "short": 10}
    assert bench.queue == ["long too", "third"]
    bench.steps(5)
    assert bench.step() == {"long": 4, "short": 1, "long too": 16}
    bench.run()
    assert set(bench.finished) == {"long", "short", "long too", "third"}


def test_a_preempted_or_aborted_prompt_makes_room_for_the_next() -> None:
    bench = Harness(budget=16, long_prefill_token_threshold=8, max_num_partial_prefills=1)
    bench.add("a", 40)
    bench.add("b", 40)
    assert bench.step() == {"a": 8}
    bench.abort("a")
    assert bench.step() == {"b": 8}


def test_a_limit_on_long_ones_needs_to_know_what_is_long() -> None:
    with pytest.raises(ValueError, match="long_prefill_token_threshold"):
        SchedulerOptions(max_long_partial_prefills=1)


def test_an_elastic_budget_ignores_the_threshold_while_no_request_waits() -> None:
    bench = Harness(budget=64, long_prefill_token_threshold=16, elastic_token_budget=True, seqs=2)
    bench.add("a", 150, 20)
    assert bench.step() == {"a": 64}
    bench.add("b", 100, 2)
    assert bench.step() == {"a": 48, "b": 16}, "what b leaves, a gets"
    bench.add("c", 10, 2)
    assert bench.step() == {"a": 16, "b": 16}, "c waits for a slot, so the threshold holds"
    bench.run()
    assert {name: len(tokens) for name, tokens in bench.outputs.items()} == {
        "a": 20,
        "b": 2,
        "c": 2,
    }


def test_an_elastic_budget_grows_to_the_workers_limit_while_no_request_waits() -> None:
    bench = Harness(budget=64, max_num_scheduled_tokens=16, elastic_token_budget=True)
    bench.add("a", 90, 2)
    assert bench.step() == {"a": 64}
    bench.add("b", 90, 2)
    assert bench.step() == {"a": 16}, "b waits"
    assert bench.step() == {"a": 10, "b": 54}
    bench.run()


def test_a_stretched_step_never_preempts() -> None:
    bench = Harness(
        blocks=4, budget=64, long_prefill_token_threshold=16, elastic_token_budget=True,
        scheduler_reserve_full_isl=False,
    )  # fmt: skip
    bench.add("a", 40, 1)
    bench.add("b", 40, 1)
    assert bench.step() == {"a": 16, "b": 16}, "two more blocks for a are not there"
    assert bench.scheduler.num_preemptions == 0
    bench.run()
    assert bench.finished == {"a": "length", "b": "length"}


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_samples_stay_in_the_mirrors_order_when_a_step_is_stretched(depth: int) -> None:
    """A prompt completed by the elastic budget samples before those admitted after it."""
    bench = Harness(
        budget=64, depth=depth, long_prefill_token_threshold=16, elastic_token_budget=True,
        script={name: [ord(name)] * 4 for name in "abc"},
    )  # fmt: skip
    for name, length in (("a", 30), ("b", 5), ("c", 20)):
        bench.add(name, length, 4)
    bench.overlap()
    assert bench.outputs == {name: [ord(name)] * 4 for name in "abc"}


def test_a_request_stays_as_long_as_its_prompt_is() -> None:
    """Late outputs do not make a short prompt a long one."""
    bench = Harness(
        depth=3, budget=20, long_prefill_token_threshold=12, max_long_partial_prefills=1
    )
    first = bench.add("x", 12, 40)
    bench.schedule()
    bench.schedule()
    bench.add("y", 200, 4)
    bench.schedule()
    bench.scheduler.preempt(first)
    for _ in range(3):
        bench.update()
    bench.step()
    assert bench.requests["x"] in bench.scheduler.running
    bench.overlap()


def test_a_withdrawn_grant_gives_its_share_of_scored_tokens_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(step, "_MAX_SCORED_TOKENS", 40)
    scored = step.ScheduledStep(100, 0)
    params = SamplingParams(max_tokens=4, prompt_logprobs=0)
    request = Harness().add("a", 60, params=params)
    scored.grant(request, 30)
    assert scored.limit(request, 60) == 10
    scored.withdraw(request)
    assert scored.limit(request, 60) == 40

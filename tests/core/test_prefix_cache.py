"""What a request computes when others have computed its prefix before."""

import pytest

from protocol.sampling import SamplingParams
from tests.core.harness import PLAIN_TOKEN, Harness


def test_identical_prompts_of_one_step_share_blocks() -> None:
    bench = Harness(caching=True)
    prompt = list(range(100))
    bench.add("a", prompt)
    bench.add("b", prompt)
    assert bench.steps(2) == [{"a": 100, "b": 4}, {"a": 1, "b": 1}]


@pytest.mark.parametrize(("length", "computed"), [(96, 1), (40, 8), (33, 1), (16, 1), (15, 15)])
def test_a_repeated_prompt_computes_what_no_full_block_holds(length: int, computed: int) -> None:
    bench = Harness(caching=True)
    bench.add("a", list(range(length)), 1)
    bench.step()
    bench.add("b", list(range(length)), 3)
    assert bench.step() == {"b": computed}
    bench.run()
    assert bench.requests["b"].num_cached_tokens == length - computed


def test_a_fully_cached_prompt_computes_one_token_and_writes_no_kv() -> None:
    bench = Harness(caching=True)
    bench.add("a", list(range(32)), 1)
    bench.step()
    bench.add("b", list(range(32)), 3)
    bench.step()
    (new,) = bench.sent[-1].scheduled_new_reqs
    assert (new.num_computed_tokens, new.num_cached_tokens) == (31, 32)
    assert len(new.block_ids[0]) == 2
    assert bench.step() == {"b": 1}


def test_chunked_prompts_are_shared_as_far_as_they_are_scheduled() -> None:
    bench = Harness(caching=True, budget=64)
    prompt = list(range(100))
    bench.add("a", prompt)
    bench.add("b", prompt)
    assert bench.steps(2) == [{"a": 64}, {"a": 36, "b": 4}]


def test_a_block_filled_by_a_decode_is_a_hit_in_the_same_step() -> None:
    bench = Harness(caching=True)
    prompt = list(range(15))
    bench.add("a", prompt)
    bench.step()
    bench.add("b", [*prompt, PLAIN_TOKEN, 5])
    assert bench.step() == {"a": 1, "b": 1}


def test_salt_and_prompt_logprobs_keep_requests_from_hits() -> None:
    bench = Harness(caching=True)
    prompt = list(range(33))
    logprobs = SamplingParams(max_tokens=1, prompt_logprobs=0)
    for name, salt, params, computed in (
        ("a", "x", None, 33),
        ("b", "y", None, 33),
        ("c", "x", None, 1),
        ("d", "x", logprobs, 33),
        ("e", "x", None, 1),
    ):
        bench.add(name, prompt, 1, salt=salt, params=params)
        assert bench.step() == {name: computed}
    assert bench.scheduler.num_prefix_queries == 4 * 33
    assert bench.scheduler.num_prefix_hits == 2 * 32


def test_the_next_turn_of_a_chat_hits_its_history() -> None:
    bench = Harness(caching=True)
    prompt = list(range(300))
    bench.add("a", prompt, 4)
    bench.run()
    bench.add("b", [*prompt, *bench.outputs["a"], *range(5000, 5040)], 1)
    assert bench.step() == {"b": 344 - 288}


def test_the_cache_is_emptied_only_while_nobody_runs() -> None:
    bench = Harness(caching=True)
    bench.add("a", list(range(40)))
    bench.step()
    assert not bench.scheduler.kv.reset_prefix_cache()
    bench.abort("a")
    assert bench.scheduler.kv.reset_prefix_cache()
    bench.add("b", list(range(40)))
    assert bench.step() == {"b": 40}

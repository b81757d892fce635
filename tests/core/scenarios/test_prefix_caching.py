"""What a request computes if its prefix was computed before."""

import pytest

from core_proc.invariants import check_blocks
from core_proc.kv.kv_cache import KVCacheManager
from core_proc.options import SchedulerOptions
from core_proc.request import Request
from protocol.sampling import SamplingParams
from tests.core.harness import PLAIN_TOKEN, Harness


def test_identical_prompts_of_one_step_share_blocks() -> None:
    """The worker writes all KV of a step before any request attends."""
    bench = Harness(caching=True)
    prompt = list(range(100))
    bench.add("a", prompt)
    bench.add("b", prompt)
    assert bench.steps(2) == [{"a": 100, "b": 4}, {"a": 1, "b": 1}]


@pytest.mark.parametrize(("length", "computed"), [(96, 1), (40, 8), (33, 1), (16, 1), (15, 15)])
def test_a_repeated_prompt_computes_what_no_full_block_holds(length: int, computed: int) -> None:
    """If full blocks hold the whole prompt, one token is computed; in vLLM the last block."""
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


def test_salt_and_prompt_logprobs_keep_requests_from_hits() -> None:
    """A request with prompt logprobs does not read the cache, is not counted, but fills it."""
    bench = Harness(caching=True)
    prompt = list(range(33))
    logprobs = SamplingParams(max_tokens=1, prompt_logprobs=0)
    for name, salt, params, computed in (
        ("a", "x", None, 33),
        ("b", "y", None, 33),
        ("c", "x", None, 1),
        ("d", "x", logprobs, 33),
        ("e", "x", None, 1),
        ("f", "z", logprobs, 33),
        ("g", "z", None, 1),
    ):
        bench.add(name, prompt, 1, salt=salt, params=params)
        assert bench.step() == {name: computed}
    assert bench.scheduler.num_prefix_queries == 5 * 33
    assert bench.scheduler.num_prefix_hits == 3 * 32


def test_adapters_do_not_share() -> None:
    bench = Harness(caching=True)
    prompt = list(range(33))
    for name, adapter_id, computed in (("a", 0, 33), ("b", 1, 33), ("c", 2, 33), ("d", 1, 1)):
        bench.add(name, prompt, 1, adapter_id=adapter_id)
        assert bench.step() == {name: computed}


def test_the_next_turn_of_a_chat_hits_its_history() -> None:
    """The outputs of the first turn are cached too."""
    bench = Harness(caching=True)
    prompt = list(range(300))
    bench.add("a", prompt, 4)
    bench.run()
    bench.add("b", [*prompt, *bench.outputs["a"], *range(5000, 5040)], 1)
    assert bench.step() == {"b": 344 - 288}
    bench.add("c", prompt, 1)
    assert bench.step() == {"c": 12}


def test_a_block_filled_by_a_decode_is_a_hit_in_the_same_step() -> None:
    bench = Harness(caching=True)
    prompt = list(range(15))
    bench.add("a", prompt)
    bench.step()
    bench.add("b", [*prompt, PLAIN_TOKEN, 5])
    assert bench.step() == {"a": 1, "b": 1}


def _tables(bench: Harness, name: str) -> list[int]:
    return list(bench.requests[name].block_tables[0])


def test_hits_reuse_blocks_and_eviction_follows_the_free_queue() -> None:
    """Freed blocks with content go to the back, tail first; those without to the front."""
    bench = Harness(blocks=11, caching=True)
    free_ids = bench.scheduler.kv.pool.free_ids
    prompt = list(range(100, 155))
    bench.add("a", prompt, 1)
    bench.schedule()
    assert _tables(bench, "a") == [1, 2, 3, 4]
    bench.update()
    assert free_ids() == [4, 5, 6, 7, 8, 9, 10, 3, 2, 1]

    bench.add("b", [*prompt[:48], 7, 7, 7, 7, 7], 1)
    assert bench.schedule() == {"b": 5}
    assert _tables(bench, "b") == [1, 2, 3, 4]
    bench.update()

    bench.add("c", list(range(500, 650)), 1)
    assert bench.schedule() == {"c": 150}
    assert _tables(bench, "c") == [4, 5, 6, 7, 8, 9, 10, 3, 2, 1]
    bench.update()
    bench.add("d", prompt, 1)
    assert bench.schedule() == {"d": 55}


def test_a_refusal_changes_nothing_although_hits_exist() -> None:
    kv = KVCacheManager(SchedulerOptions(num_blocks=5))
    first = Request(0, list(range(32)), SamplingParams())
    other = Request(1, list(range(900, 916)), SamplingParams())
    for request in (first, other):
        assert kv.admit(request, [[]], start=0, num_tokens=request.num_tokens)
        request.num_computed_tokens = request.num_tokens
    kv.free(first)
    free = kv.pool.free_ids()

    big = Request(2, [*range(32), *[5] * 32], SamplingParams())
    hits = kv.find_cached_prefix(big)
    assert hits == [[1, 2]]
    assert not kv.admit(big, hits, start=32, num_tokens=big.num_tokens)
    assert kv.pool.free_ids() == free
    assert [kv.pool.ref_count(block_id) for block_id in (1, 2)] == [0, 0]
    assert big.block_tables == []
    check_blocks(kv, [other])

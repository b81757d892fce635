"""Block tables and the prefix cache, without a scheduler."""

import pytest

from core_proc.kv.kv_cache import KVCacheManager
from core_proc.options import SchedulerOptions
from core_proc.request import Request
from protocol.sampling import SamplingParams

BLOCK = 16


def _manager(num_blocks: int = 11, caching: bool = True) -> KVCacheManager:
    options = SchedulerOptions(
        num_blocks=num_blocks, block_size=BLOCK, enable_prefix_caching=caching
    )
    return KVCacheManager(options)


def _request(tokens: list[int]) -> Request:
    return Request(tokens[0], tokens, SamplingParams())


def _admit(kv: KVCacheManager, request: Request) -> int:
    """Admit with all tokens and return the number of cached blocks."""
    hits = kv.find_cached_prefix(request)
    assert kv.admit(request, hits, start=0, num_tokens=request.num_tokens)
    request.num_computed_tokens = request.num_tokens
    return len(hits[0])


def test_hits_in_the_free_queue_use_up_free_blocks() -> None:
    kv = _manager(num_blocks=4)
    first = _request(list(range(48)))
    _admit(kv, first)
    kv.free(first)
    again = _request(list(range(48)))
    hits = kv.find_cached_prefix(again)
    assert len(hits[0]) == 3
    assert not kv.admit(again, hits, start=47, num_tokens=48, headroom=1)
    assert kv.admit(again, hits, start=47, num_tokens=48, headroom=0)


def test_reserved_tokens_must_fit_but_take_no_blocks() -> None:
    kv = _manager(num_blocks=4)
    request = _request(list(range(64)))
    assert not kv.admit(request, [[]], start=0, num_tokens=16, num_reserved=64)
    assert kv.admit(request, [[]], start=0, num_tokens=16, num_reserved=48)
    assert kv.num_free_blocks == 2


def test_a_block_is_cached_only_with_all_tokens_before_it() -> None:
    """The same second block after a different first one is not a hit."""
    kv = _manager()
    _admit(kv, _request([1] * 16 + [2] * 16))
    assert kv.find_cached_prefix(_request([3] * 16 + [2] * 16)) == [[]]
    assert len(kv.find_cached_prefix(_request([1] * 16 + [4] * 16))[0]) == 1


def test_blocks_filled_by_outputs_are_cached_once_their_ids_are_known() -> None:
    kv = _manager()
    request = _request([1] * 15)
    _admit(kv, request)
    kv.grow(request, 16)
    assert request.num_hashed_blocks == 0
    request.token_ids.append(9)
    kv.grow(request, 17)
    assert len(kv.find_cached_prefix(_request([1] * 15 + [9]))[0]) == 1


def test_growth_that_does_not_fit_changes_nothing() -> None:
    kv = _manager(num_blocks=3)
    request = _request([1] * 16)
    _admit(kv, request)
    assert kv.grow(request, 48) is None
    assert kv.grow(request, 32) == [[2]]
    assert kv.grow(request, 32) == []


def test_reset_is_refused_while_blocks_are_held() -> None:
    kv = _manager()
    request = _request([1] * 16)
    _admit(kv, request)
    assert not kv.reset_prefix_cache()
    kv.free(request)
    assert kv.reset_prefix_cache()
    assert kv.find_cached_prefix(_request([1] * 16)) == [[]]


@pytest.mark.parametrize(("num_held", "usage"), [(0, 0.0), (5, 0.5), (10, 1.0)])
def test_usage_is_the_held_share(num_held: int, usage: float) -> None:
    kv = _manager()
    kv.pool.allocate(num_held)
    assert kv.usage == usage


def test_without_caching_nothing_is_remembered() -> None:
    kv = _manager(caching=False)
    request = _request([1] * 32)
    _admit(kv, request)
    kv.free(request)
    assert kv.find_cached_prefix(_request([1] * 32)) == [[]]
    assert kv.pool.free_ids()[:2] == [2, 1]

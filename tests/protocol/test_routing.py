"""The choice of a replica, and the index of prefixes: properties of pure functions."""

import random
from collections.abc import Sequence

import pytest

from protocol.client.packed_prompt import PackedPrompt
from protocol.client.prefix_index import PIECE_TOKENS, PrefixIndex, piece_names
from protocol.client.routing import CachedPrefix, Load, choose
from protocol.config import RoutingPolicy
from protocol.message import pack_token_ids

CACHE_TOKENS = 100 * PIECE_TOKENS
IDLE = Load(0, 0, 0)
NOTHING = CachedPrefix()


def prompt(*seeds: int) -> list[int]:
    """Return a piece of 64 tokens for each seed."""
    return [token for seed in seeds for token in range(seed, seed + PIECE_TOKENS)]


def chosen(policy: RoutingPolicy, loads: Sequence[Load], cached: CachedPrefix = NOTHING) -> int:
    serving = range(len(loads))
    return choose(policy, serving, loads.__getitem__, cached, random.Random(1))


def test_least_loaded_of_two_is_chosen() -> None:
    loads = [Load(3, 0, 0), Load(2, 0, 0)]
    assert chosen(RoutingPolicy.LEAST_TOKENS, loads) == 1
    assert chosen(RoutingPolicy.LEAST_TOKENS, [IDLE, Load(0, 0, 1)]) == 0


@pytest.mark.parametrize(("waiting", "expected"), [(0, 1), (900, 1), (1100, 0)])
def test_cached_prefix_counts_as_much_as_waiting_tokens(waiting: int, expected: int) -> None:
    loads = [IDLE, Load(0, waiting, 0)]
    cached = CachedPrefix(1000, [1])
    assert chosen(RoutingPolicy.PREFIX_AWARE, loads, cached) == expected
    assert chosen(RoutingPolicy.LEAST_TOKENS, [IDLE, Load(0, 1, 0)], cached) == 0


def test_few_replicas_are_compared_however_many_there_are() -> None:
    asked: list[int] = []

    def load_of(replica: int) -> Load:
        asked.append(replica)
        return IDLE

    cached = CachedPrefix(64, range(500))
    choose(RoutingPolicy.PREFIX_AWARE, range(1000), load_of, cached, random.Random(1))
    assert len(asked) <= 6


def test_longest_prefix_is_found_with_its_holders() -> None:
    index = PrefixIndex()
    index.add(0, piece_names(prompt(1, 2)), CACHE_TOKENS)
    index.add(1, piece_names(prompt(1, 2, 3)), CACHE_TOKENS)
    assert index.find(piece_names(prompt(1, 2, 3, 4))) == CachedPrefix(3 * PIECE_TOKENS, [1])
    assert index.find(piece_names(prompt(1, 2, 9))) == CachedPrefix(2 * PIECE_TOKENS, [0, 1])
    assert index.find(piece_names(prompt(9))) == CachedPrefix()
    index.forget(1)
    assert index.find(piece_names(prompt(1, 2, 3))) == CachedPrefix(2 * PIECE_TOKENS, [0])


def test_index_is_bounded_and_keeps_whole_prefixes() -> None:
    index, rng = PrefixIndex(), random.Random(3)
    capacity = 8
    for _ in range(300):
        seeds = [rng.randrange(3) for _ in range(rng.randrange(1, 6))]
        names = piece_names(prompt(*seeds))
        index.add(0, names, capacity * PIECE_TOKENS)
        assert len(index) <= capacity
        # A piece is known only with all before it.
        parts = [names[: end + 1] for end in range(len(names))]
        known = [index.find(part).num_tokens == len(part) * PIECE_TOKENS for part in parts]
        assert known == sorted(known, reverse=True)


def test_names_depend_on_salt_and_all_tokens_before_and_not_on_the_form() -> None:
    ids = prompt(1, 2)
    assert piece_names(ids) == piece_names(PackedPrompt(pack_token_ids(ids), 1000))
    assert piece_names(ids, "a") != piece_names(ids, "b")
    assert piece_names(prompt(3, 2))[1] != piece_names(ids)[1]
    assert piece_names(ids[:63]) == []

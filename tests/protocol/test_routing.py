"""The choice of a replica, and the index of prefixes: properties of pure functions."""

import random
from collections import OrderedDict
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest

from protocol.adapters import Adapter
from protocol.client.hash_ring import HashRing
from protocol.client.packed_prompt import PackedPrompt
from protocol.client.prefix_index import PrefixIndex, name_of, piece_names, piece_tokens
from protocol.client.routing import Candidate, Load, Router, cheapest
from protocol.config import RoutingPolicy
from protocol.kv_events import prefix_hash, prefix_root
from protocol.message import pack_token_ids

PIECE = 64
IDLE = Load(0, 0, 0)
BUSY = Load(0, 5000, 0)
PREFIX_AWARE = RoutingPolicy.PREFIX_AWARE


def prompt(*seeds: int) -> list[int]:
    """Return a piece of 64 tokens for each seed."""
    return [token for seed in seeds for token in range(seed, seed + PIECE)]


def names_of(*seeds: int) -> list[bytes]:
    return piece_names(prompt(*seeds), PIECE)


class FakeReplica:
    def __init__(self, load: Load = IDLE) -> None:
        self.now = load
        self.serves = True
        self.num_asked = 0

    def load(self) -> Load:
        self.num_asked += 1
        return self.now


def chosen(routed: Router, *arguments: Any, **options: Any) -> int | None:
    found = routed.choose(*arguments, **options)
    return None if found is None else found.number


def router(
    replicas: Sequence[FakeReplica], policy: RoutingPolicy = PREFIX_AWARE, seed: int = 1
) -> Router:
    routed = Router(policy, replicas, random.Random(seed))
    for number in range(len(replicas)):
        routed.homes.add(number, f"tcp://10.0.0.{number}:7000")
    return routed


def replicas(*loads: Load) -> list[FakeReplica]:
    return [FakeReplica(load) for load in loads]


def test_least_loaded_of_two_is_chosen() -> None:
    least = RoutingPolicy.LEAST_TOKENS
    assert chosen(router(replicas(Load(3, 0, 0), Load(2, 0, 0)), least)) == 1
    assert chosen(router(replicas(IDLE, Load(0, 0, 1)), least)) == 0


@pytest.mark.parametrize(("waiting", "expected"), [(0, 1), (900, 1), (1100, 0)])
def test_cached_prefix_counts_as_much_as_waiting_tokens(waiting: int, expected: int) -> None:
    assert (
        cheapest([Candidate(0, IDLE), Candidate(1, Load(0, waiting, 0), 1000)]).number == expected
    )


def test_replicas_take_turns_and_those_that_do_not_serve_are_left_out() -> None:
    fleet = replicas(IDLE, IDLE, BUSY)
    routed = router(fleet, RoutingPolicy.ROUND_ROBIN)
    assert [chosen(routed) for _ in range(4)] == [0, 1, 2, 0]
    fleet[1].serves = False
    assert [chosen(routed) for _ in range(3)] == [2, 0, 2]
    for one in fleet:
        one.serves = False
    assert chosen(routed) is None


def test_few_replicas_are_compared_however_many_there_are() -> None:
    fleet = replicas(*[IDLE] * 1000)
    routed = router(fleet)
    for number in range(500):
        routed.index.add(number, names_of(1, 2), 9)
    routed.choose(names_of(1, 2, 3), PIECE)
    assert sum(one.num_asked for one in fleet) <= 8


def test_each_candidate_is_credited_with_its_own_cached_prefix() -> None:
    """All have 30 pieces of the prompt, and one that has a long queue has 31."""
    shared = range(0, 3000, 100)
    for seed in range(20):
        routed = router(replicas(IDLE, IDLE, BUSY, IDLE), seed=seed)
        for number in range(4):
            routed.index.add(number, names_of(*shared), 99)
        names = names_of(*shared, 9999)
        routed.index.add(2, names, 99)
        assert chosen(routed, names, PIECE) != 2
        # A replica without any of it is chosen only past a queue that is longer than the prefix.
        routed.index.forget(0)
        routed.index.forget(1)
        routed.index.forget(2)
        assert chosen(routed, names, PIECE) == 3


def test_half_of_a_prefix_elsewhere_is_seen_if_the_holder_of_all_is_busy() -> None:
    fleet = replicas(*[Load(0, 900, 0)] * 50)
    routed = router(fleet)
    names = names_of(*range(40))
    routed.index.add(7, names, 99)
    routed.index.add(8, names[:25], 99)
    fleet[7].now = BUSY
    assert chosen(routed, names, PIECE) == 8


def test_shorter_prefix_counts_if_the_holder_of_the_longest_does_not_serve() -> None:
    fleet = replicas(*[IDLE] * 50)
    routed = router(fleet)
    routed.index.add(7, names_of(1, 2, 3), 99)
    routed.index.add(8, names_of(1, 2), 99)
    assert chosen(routed, names_of(1, 2, 3), PIECE) == 7
    fleet[7].serves = False
    assert chosen(routed, names_of(1, 2, 3), PIECE) == 8


def test_requests_of_a_session_go_to_one_replica_and_come_back_with_it() -> None:
    sessions = [f"s{number}" for number in range(300)]
    fleet = replicas(*[IDLE] * 5)

    def homes(seed: int = 1) -> list[int | None]:
        routed = router(fleet, seed=seed)
        found = [routed.home(session, [], 0) for session in sessions]
        return [None if one is None else one.number for one in found]

    before = homes()
    assert homes(seed=2) == before, "as in another API process"
    assert all(before.count(number) > 30 for number in range(5))
    fleet[3].serves = False
    after = homes()
    assert 3 not in after
    assert all(new == old for old, new in zip(before, after, strict=True) if old != 3)
    fleet[3].serves = True
    assert homes() == before
    for one in fleet:
        one.serves = False
    assert set(homes()) == {None}


def test_a_new_replica_becomes_the_home_of_its_share_and_all_other_sessions_stay() -> None:
    sessions = [f"s{number}" for number in range(600)]
    before, after = (
        [router(replicas(*[IDLE] * count)).home(session, [], 0) for session in sessions]
        for count in (5, 6)
    )
    moved = [new for old, new in zip(before, after, strict=True) if old != new]
    assert {one.number for one in moved if one is not None} == {5}
    assert 60 < len(moved) < 140


def test_processes_that_have_seen_replicas_join_in_another_order_agree() -> None:
    addresses = [f"tcp://10.0.0.{number}:7000" for number in range(5)]
    one, other = HashRing(), HashRing()
    for number, address in enumerate(addresses):
        one.add(number, address)
    # Here the first address was that of a replica that has left, and the rest joined in reverse.
    other.add(0, "tcp://10.0.0.99:7000")
    for number, address in enumerate(reversed(addresses), 1):
        other.add(number, address)
    other.remove(0)
    for session in (f"s{number}" for number in range(300)):
        assert [addresses[number] for number in one.of(session)] == [
            addresses[5 - number] for number in other.of(session)
        ]


def test_only_replicas_that_may_compute_it_get_a_request() -> None:
    routed = router(replicas(IDLE, BUSY, IDLE))
    assert chosen(routed, may=lambda number: number == 1) == 1
    assert chosen(routed, may=lambda number: False) is None


def test_cached_lengths_are_those_of_each_replica() -> None:
    index = PrefixIndex()
    index.add(0, names_of(1, 2), 99)
    index.add(1, names_of(1, 2, 3), 99)

    def lengths(*seeds: int) -> tuple[int, int, int]:
        names = names_of(*seeds)
        longest = index.longest(names, lambda number: True)
        return longest, index.num_cached(0, names), index.num_cached(1, names)

    assert lengths(1, 2, 3, 4) == (3, 2, 3)
    assert lengths(1, 2, 9) == (2, 2, 2)
    assert lengths(9) == (0, 0, 0)
    index.remove(1, names_of(1, 2, 3)[2:])
    assert lengths(1, 2, 3) == (2, 2, 2)
    index.forget(1)
    assert lengths(1, 2, 3) == (2, 2, 0)
    index.forget(0)
    assert len(index) == 0


def test_index_is_bounded_and_keeps_whole_prefixes() -> None:
    index, rng = PrefixIndex(), random.Random(3)
    most = 8
    for _ in range(300):
        names = names_of(*(rng.randrange(3) for _ in range(rng.randrange(1, 6))))
        index.add(0, names, most)
        assert len(index) <= most
        # A piece is known only with all before it.
        known = [bool(index.holders(name)) for name in names]
        assert known == sorted(known, reverse=True)


def test_holders_are_those_of_a_plain_index() -> None:
    """Names are added, removed, displaced and forgotten in any order."""
    index, rng, most = PrefixIndex(), random.Random(5), 12
    plain: dict[int, OrderedDict[bytes, None]] = {number: OrderedDict() for number in range(6)}
    every = [names_of(*seeds) for seeds in product(range(3), repeat=3)]
    for _ in range(2000):
        number, names = rng.randrange(6), rng.choice(every)
        known = plain[number]
        action = rng.random()
        if action < 0.8:
            index.add(number, names, most)
            for name in reversed(names):
                known[name] = None
                known.move_to_end(name)
            while len(known) > most:
                known.popitem(last=False)
        elif action < 0.98:
            index.remove(number, names[1:])
            for name in names[1:]:
                known.pop(name, None)
        else:
            index.forget(number)
            known.clear()
        for name in names:
            expected = [each for each, known in plain.items() if name in known]
            assert sorted(index.holders(name)) == expected
    assert len(index) == sum(map(len, plain.values()))


def test_names_depend_on_salt_adapter_and_all_tokens_before_and_not_on_the_form() -> None:
    ids = prompt(1, 2)
    names = piece_names(ids, PIECE)
    assert names == piece_names(PackedPrompt(pack_token_ids(ids), 1000), PIECE)
    assert piece_names(ids, PIECE, "a") != piece_names(ids, PIECE, "b")
    assert piece_names(ids, PIECE, "", Adapter("a", "/a", b"a" * 32))[0] != names[0]
    assert names_of(3, 2)[1] != names[1]
    assert piece_names(ids[:63], PIECE) == []


@pytest.mark.parametrize("block_size", [16, 24, 64, 100])
def test_pieces_end_where_blocks_of_the_core_do(block_size: int) -> None:
    ids = list(range(1000))
    prefix = prefix_hash(prefix_root("salt"))
    blocks = []
    for end in range(block_size, len(ids) + 1, block_size):
        prefix.update(pack_token_ids(ids[end - block_size : end]))
        blocks.append(name_of(prefix.digest()))
    each = piece_tokens(block_size) // block_size
    assert piece_names(ids, piece_tokens(block_size), "salt") == blocks[each - 1 :: each]


def test_requests_of_each_kind_take_turns_among_themselves() -> None:
    routed = router(replicas(*[IDLE] * 4), RoutingPolicy.ROUND_ROBIN)
    found = []
    for _ in range(6):
        assert chosen(routed, may=lambda number: number == 0, kind="prefill") == 0
        found.append(chosen(routed, may=lambda number: number > 0))
    assert found == [1, 2, 3, 1, 2, 3]

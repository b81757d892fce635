"""Shares of places and turns: no client can take what others need."""

import pytest

from protocol.fairness.account import Account
from protocol.fairness.shares import Shares, has_share, largest_share
from protocol.fairness.turns import Turns

A, A2, B = Account("a"), Account("a", "second"), Account("b")


def fill(shares: Shares, account: Account) -> int:
    """Take all places that an account can get; returns their number."""
    number = 0
    while shares.has_room(account):
        shares.enter(account)
        number += 1
    return number


@pytest.mark.parametrize("num_places", [1, 2, 3, 8, 64, 128])
def test_each_account_leaves_room_for_others(num_places: int) -> None:
    shares = Shares(num_places)
    first = fill(shares, A)
    assert first == -(-num_places // 3)
    tenants = sum(fill(shares, Account("a", str(i))) for i in range(1000))
    assert first + tenants <= -(-num_places // 2)
    others = [fill(shares, Account(str(i))) for i in range(1000)]
    assert first + tenants + sum(others) <= num_places
    assert others == sorted(others, reverse=True), "later ones find less"
    if num_places >= 8:
        assert min(others[:2]) >= 1


def test_places_that_are_left_can_be_taken_again() -> None:
    shares = Shares(12)
    number = fill(shares, A)
    assert number
    for _ in range(number):
        shares.leave(A)
    assert fill(shares, A2) == number
    shares.clear()
    assert fill(shares, B) == number


def test_origins_and_their_tenants_come_in_turns() -> None:
    turns: Turns[int] = Turns()
    for i in range(3):
        turns.put(A, i)
    turns.put(A2, 10)
    turns.put(B, 20)
    turns.put(B, 21)
    taken = []
    while (each := turns.take()) is not None:
        taken.append(each)
    assert taken == [(A, 0), (B, 20), (A2, 10), (B, 21), (A, 1), (A, 2)]


def test_a_client_that_arrives_comes_before_the_one_that_had_the_last_turn() -> None:
    turns: Turns[int] = Turns()
    turns.put(A, 1)
    turns.put(A, 2)
    assert turns.take() == (A, 1)
    turns.put(B, 3)
    turns.put(A2, 4)
    assert turns.take() == (B, 3)
    assert turns.take() == (A2, 4)
    assert turns.take() == (A, 2)


def test_an_account_that_may_not_have_its_turn_delays_no_other() -> None:
    turns: Turns[int] = Turns()
    turns.put(A, 1)
    turns.put(B, 2)
    assert turns.take(lambda account: account != A) == (B, 2)
    assert turns.take(lambda account: account != A) is None
    assert turns.take() == (A, 1)


def test_items_that_are_not_kept_are_gone() -> None:
    turns: Turns[int] = Turns()
    for i in range(4):
        turns.put(A, i)
    turns.put(B, 5)
    turns.keep(lambda item: item == 2)
    assert turns.take() == (A, 2)
    assert turns.take() is None


@pytest.mark.parametrize("limit", [1, 2, 8, 9, 10, 90, 16384])
def test_the_largest_share_is_what_one_client_gets_alone(limit: int) -> None:
    held = 0
    while held < limit and has_share(held, limit - held):
        held += 1
    assert held == largest_share(limit)
    assert has_share(1, limit - 1, held - 1), "also with one step after the first"
    assert not has_share(1, limit - 1, held)

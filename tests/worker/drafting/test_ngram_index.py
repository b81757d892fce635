"""Drafts repeat what followed earlier: a pure function of the ids, not of how they arrived."""

import random
import tracemalloc

import pytest

from worker_proc.drafting.ngram_index import MAX_CANDIDATES, NgramIndex

NUM_DRAFTS = 5
MIN_NGRAM, MAX_NGRAM = 2, 4
MAX_BYTES_PER_TOKEN = 200


def propose(token_ids: list[int], num_drafts: int = NUM_DRAFTS) -> list[int]:
    index = NgramIndex()
    index.extend(token_ids, len(token_ids))
    return index.propose(token_ids, num_drafts)


def searched(token_ids: list[int], num_drafts: int = NUM_DRAFTS) -> list[int]:
    """The definition: search the whole text, and continue in a loop at its end."""
    length = len(token_ids)
    pair = token_ids[-MIN_NGRAM:]
    ends = [end for end in range(length - 1, 1, -1) if token_ids[end - MIN_NGRAM : end] == pair][
        :MAX_CANDIDATES
    ]
    for size in range(min(MAX_NGRAM, length - 1), MIN_NGRAM - 1, -1):
        for end in ends:
            if end >= size and token_ids[end - size : end] == token_ids[-size:]:
                period = length - end
                return [token_ids[end + place % period] for place in range(num_drafts)]
    return []


@pytest.mark.parametrize("vocab_size", [1, 2, 3, 8, 40])
def test_guesses_are_those_of_a_search(vocab_size: int) -> None:
    rng = random.Random(vocab_size)
    for _ in range(20):
        index = NgramIndex()
        token_ids: list[int] = []
        for _ in range(120):
            token_ids += [rng.randrange(vocab_size) for _ in range(rng.choice([1, 1, 1, 6]))]
            index.extend(token_ids, len(token_ids))
            assert index.propose(token_ids, NUM_DRAFTS) == searched(token_ids), token_ids


def test_guesses_are_the_same_however_the_text_came() -> None:
    rng = random.Random(3)
    token_ids = [rng.randrange(6) for _ in range(300)]
    index = NgramIndex()
    end = 0
    while end < len(token_ids):
        end = min(end + rng.randrange(0, 20), len(token_ids))
        index.extend(token_ids, end)
        index.extend(token_ids, max(end - 3, 0))
    assert len(index._before) == len(token_ids)
    assert index.propose(token_ids, NUM_DRAFTS) == propose(token_ids)


def test_what_followed_is_repeated() -> None:
    assert propose([1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2]) == [3, 4, 5, 6, 7]
    assert propose([1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2], 2) == [3, 4]


def test_longer_agreement_comes_before_later_occurrence() -> None:
    assert propose([1, 2, 3, 4, 50, 9, 3, 4, 60, 1, 2, 3, 4], 1) == [50]
    assert propose([1, 2, 3, 4, 50, 1, 2, 3, 4, 60, 1, 2, 3, 4], 1) == [60]
    assert propose([0, 2, 3, 4, 50, 9, 3, 4, 60, 1, 2, 3, 4], 1) == [50]
    assert propose([0, 0, 3, 4, 50, 9, 3, 4, 60, 1, 2, 3, 4], 1) == [60]


def test_a_loop_is_guessed_to_continue() -> None:
    assert propose([9, 8, 8, 8]) == [8] * NUM_DRAFTS
    assert propose([4, 1, 2, 1, 2]) == [1, 2, 1, 2, 1]


def test_nothing_is_guessed_without_a_repetition() -> None:
    for token_ids in ([], [1], [1, 1], [1, 2, 3, 4, 2], list(range(500))):
        assert propose(token_ids) == []


def test_large_ids_are_distinguished() -> None:
    top = 2**31 - 1
    assert propose([top, 0, 5, 0, top, 6, top, 0], 1) == [5]
    assert propose([top, 0, 5, 0, top, 6, 0, top], 1) == [6]


def test_memory_is_bounded_by_the_text() -> None:
    rng = random.Random(5)
    token_ids = [rng.randrange(2**17) for _ in range(100_000)]
    tracemalloc.start()
    try:
        index = NgramIndex()
        index.extend(token_ids, len(token_ids))
        num_bytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert num_bytes < MAX_BYTES_PER_TOKEN * len(token_ids)

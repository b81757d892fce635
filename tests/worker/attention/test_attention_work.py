"""Pieces cover every token and section once; contexts are split where threads would idle."""

import random
from itertools import pairwise

import pytest

from worker_proc.attention.work import (
    ITEM_TOKENS,
    SECTION,
    WHOLE,
    Shares,
    Team,
    Texts,
    share_work,
)


def team(num_threads: int = 2, num_kv_heads: int = 3, max_sums: int = 10_000) -> Team:
    return Team(num_threads, num_kv_heads, tile_tokens=10, max_sums=max_sums)


def tokens_of(shares: Shares, texts: Texts, group: int) -> list[tuple[int, int]]:
    """Return the (segment, token)s of a group, as the kernels enumerate them."""
    work = shares.work
    items = range(*work.group_items[group : group + 2])
    return [
        (segment, token)
        for segment, first in ((work.item_segments[i], work.item_tokens[i]) for i in items)
        for token in range(first, min(first + shares.item_size, texts.counts[segment]))
    ]


@pytest.mark.parametrize("window", [None, 700])
@pytest.mark.parametrize("seed", range(30))
def test_every_token_and_section_is_covered_once(seed: int, window: int | None) -> None:
    rng = random.Random(seed)
    counts = [rng.choice((1, 1, 1, 2, 30, 64, 300)) for _ in range(rng.randrange(1, 7))]
    starts = [rng.choice((0, 100, 2 * SECTION - 1, 5000, 20_000)) for _ in counts]
    texts = Texts(starts, counts, window)
    singles = [segment for segment, count in enumerate(counts) if count == 1]
    shared = min([starts[segment] for segment in singles], default=0) // 64 * 64
    grouped = [(singles, shared)] if window is None and shared and len(singles) > 1 else []
    bound = rng.choice((0, 40, 100_000))
    sharers = team(rng.choice((1, 2, 4)), rng.choice((1, 3, 8)), bound)
    shares = share_work(texts, grouped, [] if grouped else singles, sharers)
    work = shares.work
    assert 1 <= shares.item_size <= ITEM_TOKENS
    computed = set()
    kept: list[tuple[int, int]] = []
    for group, section, first_sum in zip(
        work.piece_groups, work.piece_sections, work.piece_sums, strict=True
    ):
        tokens = tokens_of(shares, texts, group)
        if section == WHOLE:
            wanted = [(token, every) for token in tokens for every in texts.sections(*token, 1)]
        else:
            wanted = [(token, section) for token in tokens if section in texts.sections(*token, 1)]
            kept.append((first_sum, first_sum + len(tokens)))
        assert computed.isdisjoint(wanted)
        computed.update(wanted)
    assert computed == {
        ((segment, token), section)
        for segment, count in enumerate(counts)
        for token in range(count)
        for section in texts.sections(segment, token, 1)
    }
    assert sum(end - begin for begin, end in kept) == shares.num_sums <= bound
    assert all(before[1] <= after[0] for before, after in pairwise(sorted(kept)))
    for piece in work.split_pieces:
        assert piece == 0 or work.piece_groups[piece - 1] != work.piece_groups[piece]
    groups = {work.piece_groups[piece] for piece in work.split_pieces}
    assert len(groups) == len(work.split_pieces)


@pytest.mark.parametrize(
    ("counts", "starts", "sharers", "is_split"),
    [
        ([1], [7900], team(), True),
        ([1], [SECTION - 1], team(), False),
        ([1], [7900], team(num_threads=1), False),
        ([1] * 64, [7900] * 64, team(), False),
        ([1] * 64, [7900] * 64, team(num_threads=64), True),
        ([1] * 64, [200] * 63 + [60_000], team(), True),
        ([16], [7884], team(num_kv_heads=1), True),
        ([2048], [5852], team(), False),
    ],
)
def test_long_contexts_are_split_where_there_are_few(
    counts: list[int], starts: list[int], sharers: Team, is_split: bool
) -> None:
    singles = [segment for segment, count in enumerate(counts) if count == 1]
    shares = share_work(Texts(starts, counts), [], singles, sharers)
    assert bool(shares.work.split_pieces) == is_split


def test_a_short_prompt_with_one_kv_head_is_cut_for_all_threads() -> None:
    shares = share_work(Texts([0], [60]), [], [], team(num_kv_heads=1))
    assert len(shares.work.piece_groups) >= 4

"""Texts that begin with the same blocks are found, and each is in one group at most."""

import random

from hypothesis import given
from hypothesis import strategies as st

from worker_proc.attention.shared_prefixes import group_by_prefix


def test_texts_with_one_prefix_fill_groups() -> None:
    tables = {text: [1, 2, 3, 4, 100 + text] for text in range(7)}
    groups, alone = group_by_prefix(tables, max_members=3, min_blocks=4)
    assert [(len(members), num_blocks) for members, num_blocks in groups] == [(3, 4), (3, 4)]
    assert len(alone) == 1


def test_two_prefixes_of_one_family_are_not_mixed() -> None:
    """All begin with blocks 1 and 2, and half of them with longer prefixes in common."""
    tables = {text: [1, 2, 10 + text % 2, 20 + text % 2, 100 + text] for text in range(8)}
    groups, alone = group_by_prefix(tables, max_members=8, min_blocks=4)
    assert sorted(sorted(members) for members, _ in groups) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert not alone


@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(1, 5))
def test_members_of_a_group_begin_alike(seed: int, max_members: int, min_blocks: int) -> None:
    rng = random.Random(seed)
    tables: dict[int, list[int]] = {}
    for text in range(rng.randrange(20)):
        kin = tables[rng.randrange(len(tables))] if tables and rng.random() < 0.8 else []
        common = kin[: rng.randrange(len(kin) + 1)]
        tables[text] = [*common, *range(100 * text + 100, 100 * text + 101 + rng.randrange(80))]
    groups, alone = group_by_prefix(tables, max_members, min_blocks)
    for members, num_blocks in groups:
        assert 2 <= len(members) <= max_members
        assert num_blocks >= min_blocks
        beginnings = {tuple(tables[text][:num_blocks]) for text in members}
        assert len(beginnings) == 1
        assert len(min(beginnings)) == num_blocks
    grouped = [text for members, _ in groups for text in members]
    assert sorted(grouped + alone) == sorted(tables)

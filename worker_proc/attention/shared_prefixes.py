"""Finds the texts of a step that begin with the same blocks, so that kernels read these once."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

COMPARED_BLOCKS = 64  # number of blocks by which texts are sorted


class PrefixGroup(NamedTuple):
    """Texts with a common prefix, and its number of blocks."""

    members: list[int]
    num_blocks: int


def group_by_prefix(
    tables: Mapping[int, Sequence[int]], max_members: int, min_blocks: int
) -> tuple[list[PrefixGroup], list[int]]:
    """Return groups of texts with a common prefix, and the ungrouped texts, given block tables.

    Each group has 2 to `max_members` texts, with at least `min_blocks` blocks in common.
    """
    if len({table[0] for table in tables.values()}) == len(tables):
        return [], list(tables)
    families: dict[int, list[int]] = {}
    for text, table in tables.items():
        families.setdefault(table[0], []).append(text)
    groups: list[PrefixGroup] = []
    alone: list[int] = []
    for family in families.values():
        if len(family) == 1:
            alone += family
            continue
        # Texts with long common prefixes become adjacent.
        family.sort(key=lambda text: list(tables[text][:COMPARED_BLOCKS]))
        at = 0
        while at < len(family):
            group = _take_group(family[at : at + max_members], tables, min_blocks)
            if group.num_blocks:
                groups.append(group)
            else:
                alone += group.members
            at += len(group.members)
    return groups, alone


def _take_group(
    texts: list[int], tables: Mapping[int, Sequence[int]], min_blocks: int
) -> PrefixGroup:
    """Return a group of the first text and the following ones that benefit from joining it."""
    first = tables[texts[0]]
    members, num_blocks = texts[:1], len(first)
    for text in texts[1:]:
        common = _num_common(first, tables[text], num_blocks)
        saved = (len(members) - 1) * num_blocks  # block reads saved without this text
        if common < min_blocks or len(members) * common < saved:
            break
        members.append(text)
        num_blocks = common
    return PrefixGroup(members, num_blocks if len(members) > 1 else 0)


def _num_common(first: Sequence[int], second: Sequence[int], max_length: int) -> int:
    """Return the length of the common prefix of two lists, at most `max_length`."""
    if first[:max_length] == second[:max_length]:
        return min(max_length, len(first), len(second))
    low, high = 0, min(max_length, len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low

"""Which texts of a step begin with the same blocks, so that a kernel reads these once for all."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

COMPARED_BLOCKS = 64  # by which texts are ordered


class PrefixGroup(NamedTuple):
    """Texts, and the number of blocks that all of them begin with."""

    members: list[int]
    num_blocks: int


def group_by_prefix(
    tables: Mapping[int, Sequence[int]], max_members: int, min_blocks: int
) -> tuple[list[PrefixGroup], list[int]]:
    """Return groups of texts that begin alike, and the texts of no group, given lists of block ids.

    Groups have 2 to `max_members` texts, with at least `min_blocks` in common.
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
        # Texts with much in common are adjacent, then.
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
    """Return the first of some texts with those after it that may join it."""
    first = tables[texts[0]]
    members, num_blocks = texts[:1], len(first)
    for text in texts[1:]:
        common = _num_common(first, tables[text], num_blocks)
        saved = (len(members) - 1) * num_blocks  # reads of blocks, without this text
        if common < min_blocks or len(members) * common < saved:
            break
        members.append(text)
        num_blocks = common
    return PrefixGroup(members, num_blocks if len(members) > 1 else 0)


def _num_common(first: Sequence[int], second: Sequence[int], most: int) -> int:
    """Return the length of the common prefix of two lists, or `most` if that is less."""
    if first[:most] == second[:most]:
        return min(most, len(first), len(second))
    low, high = 0, min(most, len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low

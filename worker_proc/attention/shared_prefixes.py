"""Which texts of a step begin with the same blocks, so that a kernel reads these once for all."""

from collections.abc import Mapping, Sequence
from itertools import takewhile
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
    families: dict[int, list[int]] = {}
    for text, table in tables.items():
        families.setdefault(table[0], []).append(text)
    groups: list[PrefixGroup] = []
    rest: list[int] = []
    for family in families.values():
        if len(family) == 1:
            rest += family
            continue
        # Those with long prefixes in common are adjacent, then.
        family.sort(key=lambda text: tables[text][:COMPARED_BLOCKS])
        while family:
            first = tables[family[0]]
            beginning = first[:min_blocks]
            most = min(len(family), max_members)
            members = list(
                takewhile(lambda text: tables[text][:min_blocks] == beginning, family[:most])
            )
            family = family[len(members) :]
            if len(members) > 1 and len(beginning) == min_blocks:
                num_blocks = min(_num_common(first, tables[text]) for text in members[1:])
                groups.append(PrefixGroup(members, num_blocks))
            else:
                rest += members
    return groups, rest


def _num_common(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the length of the common prefix of two lists."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low

"""Divides a step's attention among the threads of the native kernels.

The kernels merge sections in the order of positions (native/attention/sections.h), so no result
depends on this division.
"""

from collections.abc import Sequence
from operator import add
from typing import NamedTuple

SECTION = 1024  # constant of native/attention/sections.h
ITEM_TOKENS = 64
"""Maximum number of tokens of a chunk that a thread computes at a time."""
PIECES_PER_THREAD = 4
"""A group is split into sections if its cost exceeds a thread's share divided by this number."""
WHOLE = -1
"""Stands for all sections of a group."""


class Team(NamedTuple):
    """The threads and buffers that share a step."""

    num_threads: int
    num_kv_heads: int
    tile_tokens: int
    """The number of tokens whose heads of one KV head fill a tile."""
    max_sums: int
    """The number of partial sums that fit in memory: one for each token and section of split
    groups."""


class Texts(NamedTuple):
    """The tokens of a step: each segment's number of tokens, and its first position."""

    starts: Sequence[int]
    counts: Sequence[int]
    window: int | None = None

    def sections(self, segment: int, token: int, count: int) -> range:
        """Return the sections that `count` tokens from `token` on attend to."""
        first = self.starts[segment] + token
        earliest = 0 if self.window is None else max(first - self.window + 1, 0)
        return range(earliest // SECTION, (first + count - 1) // SECTION + 1)


class Work(NamedTuple):
    """Columns of `Step` in native/step.h."""

    item_segments: list[int]
    item_tokens: list[int]
    group_items: list[int]
    group_shared: list[int]
    piece_groups: list[int]
    piece_sections: list[int]
    piece_sums: list[int]
    split_pieces: list[int]

    def add_group(self, segments: Sequence[int], tokens: Sequence[int], num_shared: int) -> None:
        """Add a group of items."""
        self.item_segments.extend(segments)
        self.item_tokens.extend(tokens)
        self.group_items.append(len(self.item_segments))
        self.group_shared.append(num_shared)

    def add_each(self, segments: Sequence[int]) -> None:
        """Add one-token segments, each as a separate group."""
        end = len(self.item_segments) + 1
        self.item_segments.extend(segments)
        self.item_tokens.extend([0] * len(segments))
        self.group_items.extend(range(end, end + len(segments)))
        self.group_shared.extend([0] * len(segments))

    def add_whole(self, groups: range) -> None:
        """Assign each group to a single thread."""
        self.piece_groups.extend(groups)
        self.piece_sections.extend([WHOLE] * len(groups))
        self.piece_sums.extend([0] * len(groups))

    def add_sections(self, group: int, sections: range, first_sum: int, num_tokens: int) -> None:
        """Split a group into sections; their sums are stored in section order."""
        self.split_pieces.append(len(self.piece_groups))
        self.piece_groups.extend([group] * len(sections))
        self.piece_sections.extend(sections)
        self.piece_sums.extend(first_sum + num_tokens * i for i in range(len(sections)))


class Shares(NamedTuple):
    """A step's work, divided among threads."""

    work: Work
    item_size: int
    num_sums: int
    """The number of partial sums that are kept, counted as in `Team.max_sums`."""


class _Extent(NamedTuple):
    """A group's size and cost; the cost unit is one section of a tile."""

    num_tokens: int
    sections: range
    cost: int


def share_work(
    texts: Texts, prefix_groups: Sequence[tuple[list[int], int]], alone: Sequence[int], team: Team
) -> Shares:
    """Divide a step into pieces; threads take the last pieces, which are the longest, first.

    `prefix_groups` are one-token segments with the number of positions they share; `alone` are the
    other one-token segments.
    """
    work = Work([], [], [0], [], [], [], [], [])
    work.add_each(alone)
    for members, num_shared in prefix_groups:
        work.add_group(members, [0] * len(members), num_shared)
    chunks = [segment for segment, count in enumerate(texts.counts) if count > 1]
    size = _item_size(texts, chunks, team) if chunks else ITEM_TOKENS
    for segment in sorted(chunks, key=lambda segment: texts.counts[segment]):
        for token in range(0, texts.counts[segment], size):
            work.add_group([segment], [token], 0)
    return Shares(work, size, _add_pieces(work, texts, size, team))


def _item_size(texts: Texts, chunks: Sequence[int], team: Team) -> int:
    """Return the number of tokens in an item, which is smaller if long items leave threads idle."""
    num_tokens = sum(
        texts.counts[segment] * len(texts.sections(segment, 0, texts.counts[segment]))
        for segment in chunks
    )
    wanted = team.num_threads * PIECES_PER_THREAD
    size = ITEM_TOKENS
    while size // 2 >= team.tile_tokens and num_tokens * team.num_kv_heads < size * wanted:
        size //= 2
    return size


def _add_pieces(work: Work, texts: Texts, item_size: int, team: Team) -> int:
    """Split the groups that would keep one thread busy while others are idle.

    Returns the number of partial sums that are kept.
    """
    num_groups = len(work.group_shared)
    if team.num_threads == 1 or max(map(add, texts.starts, texts.counts)) <= SECTION:
        work.add_whole(range(num_groups))
        return 0
    extents = [_extent(work, texts, group, item_size, team) for group in range(num_groups)]
    total = sum(extent.cost for extent in extents) * team.num_kv_heads
    num_sums = 0
    for group, extent in enumerate(extents):
        more = extent.num_tokens * len(extent.sections)
        is_long = extent.cost * team.num_threads * PIECES_PER_THREAD > total
        if is_long and len(extent.sections) > 1 and num_sums + more <= team.max_sums:
            work.add_sections(group, extent.sections, num_sums, extent.num_tokens)
            num_sums += more
        else:
            work.add_whole(range(group, group + 1))
    return num_sums


def _extent(work: Work, texts: Texts, group: int, item_size: int, team: Team) -> _Extent:
    first, end = work.group_items[group : group + 2]
    segment, token = work.item_segments[first], work.item_tokens[first]
    if end == first + 1:
        num_tokens = min(texts.counts[segment] - token, item_size)
        sections = texts.sections(segment, token, num_tokens)
        return _Extent(num_tokens, sections, -(-num_tokens // team.tile_tokens) * len(sections))
    lengths = [len(texts.sections(member, 0, 1)) for member in work.item_segments[first:end]]
    shared = work.group_shared[group] // SECTION
    return _Extent(end - first, range(max(lengths)), sum(lengths) - shared * (len(lengths) - 1))

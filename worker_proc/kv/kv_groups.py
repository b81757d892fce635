"""Groups layers by window, so that blocks that a window has passed can be freed.

A layer that shares the KV of an earlier one is in no group: it reads the KV that the earlier layer
has stored. A block of the pool belongs to one group at a time. All groups have the same number of
layers and share the tensors: layer i of every group keeps its KV in tensor pair i. One pool of
equal blocks therefore serves all groups, and a request holds only the blocks that each window
needs.

Layers with compressed entries keep them in one group without a window, and the rows of their tokens
in other groups, whose blocks are freed. In these layouts a block is a row of one tensor, in which
each layer of a group has its place: a block with the entries of all layers has room for the rows of
a few layers.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from protocol.model_facts import KVGroup
from worker_proc.kv.kv_format import KVFormat

MAX_GROUPS = 64  # limit of the wire format
MAX_PADDING = 1.25  # kinds of layers whose counts differ by at most this factor fill a group each


@dataclass(frozen=True, slots=True)
class CompressedSpec:
    """The window and the compressed entries that a layer attends to, instead of all tokens.

    A token has one row: its key and value, followed by its contributions to entries and to an
    indexer's keys.
    """

    window: int  # number of individual positions that a token sees, including its own
    ratio: int = 0  # tokens for each entry; 0: the layer has no entries
    num_series: int = 1  # 2: an entry also summarizes the tokens of the previous one
    index_dim: int = 0  # dimension of the keys that select entries; 0: all entries are used
    num_index_heads: int = 0
    num_chosen: int = 0

    def row_width(self, head_dim: int) -> int:
        """Return the number of values that are stored for a token."""
        return head_dim + (2 * self.num_series * self.entry_width(head_dim) if self.ratio else 0)

    def entry_width(self, head_dim: int) -> int:
        """Return the number of values that are stored for an entry."""
        return head_dim + self.index_dim if self.ratio else 0

    def block_entries(self, block_size: int) -> int:
        """Return the most entries whose last token is in one block."""
        return -(-block_size // self.ratio) if self.ratio else 0

    @property
    def reach(self) -> int:
        """How many of the last positions a token reads rows from, including its own."""
        return max(self.window, self.num_series * self.ratio)


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Shape and window of a layer's attention, as called by the model's own code."""

    num_heads: int
    num_kv_heads: int
    head_dim: int  # dimension of queries and keys
    value_head_dim: int
    window: int | None  # positions attended to, including its own; None: all preceding ones
    is_latent: bool = False  # values are the first part of keys, and not stored separately
    is_chunked: bool = False
    """True if a token sees only its chunk of `window` positions, which begins at a multiple of
    it."""
    kv_source: int | None = None
    """The earlier layer whose keys and values it attends to; None: it has its own."""
    is_causal: bool = True
    """If False, a token also attends to those after it; `window` then counts the positions on each
    side, including the token's own."""
    compressed: CompressedSpec | None = None
    """The entries of a layer in a model with compressed entries; `window` is then None."""

    @property
    def stored_dims(self) -> tuple[int, ...]:
        """The sizes of the stored rows for each token and KV head."""
        return (self.head_dim,) if self.is_latent else (self.head_dim, self.value_head_dim)


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that share a block table for each request."""

    window: int | None
    layers: tuple[int, ...]
    """Layer indices in call order; the i-th layer has tensor pair i. A pipeline stage may have
    none."""


class Place(NamedTuple):
    """Where a layer stores its data, in a model with compressed entries."""

    group: int
    """The group of the rows of its tokens."""
    rows_at: int
    """The offset of these rows in a block."""
    entries_at: int
    """The offset of its entries in a block of group 0."""


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The groups of a model's layers, which share one pool."""

    groups: tuple[LayerGroup, ...]
    block_size: int
    max_chunk: int  # most tokens that a request computes in a step
    format: KVFormat = KVFormat.PLAIN
    has_states: bool = False
    """True if a request has a table of state blocks, after those of the groups."""
    places: tuple[Place, ...] = ()
    """The place of each layer, in a model with compressed entries."""
    block_numbers: int = 0
    """The number of values in a block of such a model, which has a single tensor."""

    @property
    def num_tables(self) -> int:
        """The number of a request's block tables."""
        return len(self.groups) + self.has_states

    @property
    def tensor_layers(self) -> tuple[int, ...]:
        """One layer for each tensor pair, with its shape."""
        return max((group.layers for group in self.groups), key=len, default=())

    def kv_groups(self) -> list[KVGroup]:
        """Return the groups in the form announced to the core."""
        groups = [KVGroup(group.window, self._max_blocks(group.window)) for group in self.groups]
        return groups + [KVGroup(is_state=True)] * self.has_states

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return the most KV blocks that a request of `num_tokens` tokens holds at once."""
        num_blocks = -(-num_tokens // self.block_size)
        bounds = (self._max_blocks(group.window) or num_blocks for group in self.groups)
        return sum(min(num_blocks, each) for each in bounds)

    def num_tokens_in(self, num_blocks: int, limit: int) -> int:
        """Return the greatest number of tokens, at most `limit`, for which `num_blocks` suffice."""
        return bisect_right(range(limit + 1), num_blocks, key=self.num_blocks_for) - 1

    def _max_blocks(self, window: int | None) -> int | None:
        if window is None:
            return None
        # The first token of the longest chunk sees window - 1 more, and may begin within a block.
        return -(-(window - 1 + self.max_chunk) // self.block_size) + 1


def lay_out(
    specs: Sequence[LayerSpec],
    block_size: int,
    max_chunk: int,
    max_model_len: int,
    hybrid: bool,
    *,
    format: KVFormat = KVFormat.PLAIN,
    has_attention: bool = False,
    has_states: bool = False,
) -> KVLayout:
    """Divide the layers that have KV into groups, beginning with those without a window.

    A window of `max_model_len` counts as none. All layers form one group, which frees no blocks,
    unless `hybrid` is set and all kinds of layers can share tensors. A stage without attention has
    this group, too, if other stages have attention (`has_attention`).
    """
    if any(spec.compressed is not None for spec in specs):
        return _lay_out_compressed(specs, block_size, max_chunk, max_model_len, hybrid)
    kinds: dict[int | None, list[int]] = {}
    own = {index: spec for index, spec in enumerate(specs) if spec.kv_source is None}
    for index, spec in own.items():
        passes = hybrid and spec.window is not None and spec.window < max_model_len
        kinds.setdefault(spec.window if passes else None, []).append(index)
    groups = _cut(kinds) if kinds else [LayerGroup(None, ())] * has_attention
    shapes = {(s.num_kv_heads, s.head_dim, s.value_head_dim, s.is_latent) for s in own.values()}
    if len(groups) > MAX_GROUPS or (len(kinds) > 1 and len(shapes) > 1):
        groups = [LayerGroup(None, tuple(own))]
    return KVLayout(tuple(groups), block_size, max_chunk, format, has_states)


def _cut(kinds: dict[int | None, list[int]]) -> list[LayerGroup]:
    sizes = [len(layers) for layers in kinds.values()]
    size = max(sizes) if max(sizes) <= MAX_PADDING * min(sizes) else min(sizes)
    return [
        LayerGroup(window, tuple(layers[first : first + size]))
        for window, layers in sorted(kinds.items(), key=lambda kind: kind[0] or 0)
        for first in range(0, len(layers), size)
    ]


def _lay_out_compressed(
    specs: Sequence[LayerSpec], block_size: int, max_chunk: int, max_model_len: int, hybrid: bool
) -> KVLayout:
    """Put entries in a group that keeps them, and rows in groups with a window, if there is one."""
    rows, entries, reach = [], [], 0
    for spec in specs:
        compressed = spec.compressed
        assert compressed is not None
        rows.append(block_size * compressed.row_width(spec.head_dim))
        num_entries = compressed.block_entries(block_size)
        entries.append(num_entries * compressed.entry_width(spec.head_dim))
        reach = max(reach, compressed.reach)
    groups = [LayerGroup(None, tuple(range(len(specs))))]
    if not hybrid or reach >= max_model_len:
        size = sum(entries) + sum(rows)
        of_rows = [(0, at) for at in _starts(rows, sum(entries))]
    else:
        size = max(sum(entries), *rows)
        while len(parts := _fill(rows, size)) >= MAX_GROUPS:
            size += -(-size // 4)
        of_rows = [(0, 0)] * len(specs)
        for number, part in enumerate(parts, 1):
            groups.append(LayerGroup(reach, tuple(part)))
            for layer, at in zip(part, _starts([rows[i] for i in part]), strict=True):
                of_rows[layer] = (number, at)
    places = [Place(*row, at) for row, at in zip(of_rows, _starts(entries), strict=True)]
    return KVLayout(tuple(groups), block_size, max_chunk, places=tuple(places), block_numbers=size)


def _starts(sizes: Sequence[int], first: int = 0) -> list[int]:
    """Return the offsets of consecutive parts of these sizes."""
    return list(accumulate(sizes, initial=first))[:-1]


def _fill(rows: Sequence[int], size: int) -> list[list[int]]:
    """Divide layers among blocks of `size`, beginning with the longest rows."""
    parts: list[list[int]] = []
    left: list[int] = []
    for layer in sorted(range(len(rows)), key=lambda layer: -rows[layer]):
        number = next((n for n, room in enumerate(left) if room >= rows[layer]), len(parts))
        if number == len(parts):
            parts.append([])
            left.append(size)
        parts[number].append(layer)
        left[number] -= rows[layer]
    return parts

"""Groups layers by window, so that the blocks that a window has passed can be freed.

A layer that shares the KV of an earlier one is in no group: it reads what that one has stored.
A block of the pool belongs to one group at a time. All groups have the same number of layers and
share the tensors: layer i of every group keeps its KV in tensor pair i. So one pool of equal blocks
serves all groups, and a request holds only the blocks that each window needs.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from protocol.core_worker import KVGroup
from worker_proc.kv.kv_format import KVFormat

MAX_GROUPS = 64  # of the wire format
MAX_PADDING = 1.25  # kinds of layers whose counts differ by at most this factor fill one group each


@dataclass(frozen=True, slots=True)
class CompressedSpec:
    """What a layer attends to in place of all tokens: a window, and entries of several tokens each.

    A token has one row, its key and value, and beside it what entries and an indexer's keys are
    made of.
    """

    window: int  # positions that a token sees as they are, itself included
    ratio: int = 0  # tokens of an entry; 0: the layer has no entries
    num_series: int = 1  # 2: an entry is also made of the tokens of the one before
    index_dim: int = 0  # of the keys by which an indexer chooses entries; 0: all are attended to
    num_index_heads: int = 0
    num_chosen: int = 0

    def row_width(self, head_dim: int) -> int:
        """Return the numbers that are stored for a token."""
        return head_dim + (2 * self.num_series * self.entry_width(head_dim) if self.ratio else 0)

    def entry_width(self, head_dim: int) -> int:
        """Return the numbers that are stored for an entry."""
        return head_dim + self.index_dim if self.ratio else 0

    def block_numbers(self, head_dim: int, block_size: int) -> int:
        """Return the numbers that are stored in a block: the last token of an entry is in it."""
        num_entries = -(-block_size // self.ratio) if self.ratio else 0
        rows = block_size * self.row_width(head_dim)
        return rows + num_entries * self.entry_width(head_dim)


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Shape and window of one layer's attention, as the model's own code calls it."""

    num_heads: int
    num_kv_heads: int
    head_dim: int  # of queries and keys
    value_head_dim: int
    window: int | None  # positions that a token attends to, itself included; None: all before it
    is_latent: bool = False  # values are the first numbers of the keys, and not stored again
    is_chunked: bool = False
    """Whether a token sees only its chunk of `window` positions, which begins at a multiple."""
    kv_source: int | None = None
    """The earlier layer whose keys and values it attends to; None: it has its own."""
    is_causal: bool = True
    """Else a token also attends to those behind it; a window counts the positions to each side,
    the token itself included."""
    compressed: CompressedSpec | None = None
    """Of a layer whose cache holds compressed entries, or that is beside such layers. It has no
    window then: blocks are kept, since entries are made of what they hold."""

    @property
    def stored_dims(self) -> tuple[int, ...]:
        """The sizes of what is stored for a token and KV head."""
        return (self.head_dim,) if self.is_latent else (self.head_dim, self.value_head_dim)


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers with block tables of their own."""

    window: int | None
    layers: tuple[int, ...]
    """Layer indices in the order of the forward; the i-th layer has tensor pair i. Of a stage there
    may be none."""


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The groups of a model's layers, which share one pool."""

    groups: tuple[LayerGroup, ...]
    block_size: int
    max_chunk: int  # most tokens that one request computes in one step
    format: KVFormat = KVFormat.PLAIN
    has_states: bool = False
    """Whether a request has a table of state blocks, behind those of the groups."""

    @property
    def num_tables(self) -> int:
        """Block tables of a request."""
        return len(self.groups) + self.has_states

    @property
    def tensor_layers(self) -> tuple[int, ...]:
        """One layer for each tensor pair, with its shape."""
        return max((group.layers for group in self.groups), key=len, default=())

    def kv_groups(self) -> list[KVGroup]:
        """Return the groups as they are announced to the core."""
        groups = [KVGroup(group.window, self._max_blocks(group.window)) for group in self.groups]
        return groups + [KVGroup(is_state=True)] * self.has_states

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return the most KV blocks that a request of `num_tokens` tokens holds at once."""
        num_blocks = -(-num_tokens // self.block_size)
        most = (self._max_blocks(group.window) or num_blocks for group in self.groups)
        return sum(min(num_blocks, each) for each in most)

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
    """Divide the layers of a model that have KV into groups, first those without a window.

    A window of `max_model_len` counts as none. Unless `hybrid`, and where several kinds of layers
    cannot share tensors, all layers form one group that frees no blocks. A stage without attention
    has this group, too, if other stages have it (`has_attention`).
    """
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

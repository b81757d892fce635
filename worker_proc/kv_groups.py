"""Groups layers that see equally far, so that windows give back the blocks that they have passed.

A block of the pool belongs to one group at a time. All groups have equally many layers and share
the tensors: layer i of every group keeps its KV in tensor pair i. So one pool of equal blocks
serves all groups, and a request takes from it what each of its windows needs.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from protocol.core_worker import KVGroup
from worker_proc.attention.layer_spec import LayerSpec

MAX_GROUPS = 64
"""As on the wire."""
MAX_PADDING = 1.25
"""Kinds of layers that differ in number by no more than this factor fill one group each."""


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers with block tables of their own."""

    window: int | None
    """A token sees so many positions, itself included; None: nothing is ever passed."""
    layers: tuple[int, ...]
    """Indices of its layers, in the order of the forward; the i-th has tensor pair i."""


@dataclass(frozen=True, slots=True)
class KVLayout:
    """How the layers of a model share the pool."""

    groups: tuple[LayerGroup, ...]
    block_size: int
    max_chunk: int
    """Most tokens that one request computes in one step."""

    @property
    def windows(self) -> list[int | None]:
        """Of each group."""
        return [group.window for group in self.groups]

    @property
    def tensor_layers(self) -> tuple[int, ...]:
        """One layer for each tensor pair, whose shapes it has."""
        return max((group.layers for group in self.groups), key=len)

    def kv_groups(self) -> list[KVGroup]:
        """Return what the core must know of the groups."""
        return [KVGroup(group.window, self._max_blocks(group.window)) for group in self.groups]

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks a request of so many tokens holds at once, at most."""
        num_blocks = -(-num_tokens // self.block_size)
        return sum(min(num_blocks, g.max_blocks or num_blocks) for g in self.kv_groups())

    def num_tokens_in(self, num_blocks: int, limit: int) -> int:
        """Return the greatest number of tokens, `limit` at most, that so many blocks can serve."""
        return bisect_right(range(limit + 1), num_blocks, key=self.num_blocks_for) - 1

    def _max_blocks(self, window: int | None) -> int | None:
        if window is None:
            return None
        # The first token of the longest chunk sees window - 1 more, and may begin within a block.
        return -(-(window - 1 + self.max_chunk) // self.block_size) + 1


def lay_out(
    specs: Sequence[LayerSpec], block_size: int, max_chunk: int, max_model_len: int, hybrid: bool
) -> KVLayout:
    """Cut the layers of a model into groups, those that see everything first.

    Args:
        specs: of the layers, in the order of the forward.
        block_size: tokens per block.
        max_chunk: most tokens that one request computes in one step.
        max_model_len: of the longest request; a window that reaches as far counts as none.
        hybrid: whether to tell windows apart at all. Without it, and where several kinds of layers
            cannot share tensors, all layers form one group that gives nothing back.
    """
    kinds: dict[int | None, list[int]] = {}
    for index, spec in enumerate(specs):
        passes = hybrid and spec.window is not None and spec.window < max_model_len
        kinds.setdefault(spec.window if passes else None, []).append(index)
    groups = _cut(kinds)
    shapes = {(spec.num_kv_heads, spec.head_dim, spec.value_head_dim) for spec in specs}
    if len(groups) > MAX_GROUPS or (len(kinds) > 1 and len(shapes) > 1):
        groups = [LayerGroup(None, tuple(range(len(specs))))]
    return KVLayout(tuple(groups), block_size, max_chunk)


def _cut(kinds: dict[int | None, list[int]]) -> list[LayerGroup]:
    sizes = [len(layers) for layers in kinds.values()]
    size = max(sizes) if max(sizes) <= MAX_PADDING * min(sizes) else min(sizes)
    return [
        LayerGroup(window, tuple(layers[first : first + size]))
        for window, layers in sorted(kinds.items(), key=lambda kind: kind[0] or 0)
        for first in range(0, len(layers), size)
    ]

"""Determines the positions that a transformers mask shows, by evaluating it.

A mask is a function of a query's position and a key's position. It may show all positions up to the
query's own, a window of the most recent ones, or those of the query's chunk. A mask that is not
causal shows all positions, or a window on both sides.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from worker_proc.errors import UnsupportedModel

FAR_POSITION = 2**24  # a query at this position sees the whole of any window
_OFFSETS = (0, 1, 77_777)

MaskFunction = Callable[..., Any]


class Visibility(NamedTuple):
    """The positions that a token sees, including its own."""

    window: int | None
    """The number of positions; None: all preceding ones."""
    is_chunked: bool = False
    """True if the positions are those of its chunk, which begins at a multiple of `window`."""
    is_causal: bool = True
    """If False, a token sees `window` positions on each side, including its own; None: the whole
    text."""

    def size_at(self, position: int) -> int:
        """Return how many positions a token at `position` sees."""
        if self.window is None:
            return position + 1
        return position % self.window + 1 if self.is_chunked else min(self.window, position + 1)


def observe(mask_function: MaskFunction) -> Visibility:
    """Return what a mask shows.

    Raises UnsupportedModel if it is neither complete, nor a window, nor chunks of equal size.
    """
    if _sees(mask_function, FAR_POSITION, FAR_POSITION + 1):
        return _observe_sides(mask_function)
    sizes = [_size_at(mask_function, FAR_POSITION + offset) for offset in _OFFSETS]
    if all(size == FAR_POSITION + offset + 1 for size, offset in zip(sizes, _OFFSETS, strict=True)):
        return Visibility(None)
    found = Visibility(sizes[0])
    if len(set(sizes)) > 1:
        found = Visibility(_chunk_size(mask_function, FAR_POSITION - sizes[0] + 1), is_chunked=True)
    size = found.window or 1
    for position in (
        0,
        size - 1,
        size,
        size + 1,
        2 * size - 1,
        *(FAR_POSITION + o for o in _OFFSETS),
    ):
        if _size_at(mask_function, position) != found.size_at(position):
            raise UnsupportedModel("its mask is neither a window nor chunks of equal size")
    return found


def _observe_sides(mask_function: MaskFunction) -> Visibility:
    """Return what a mask shows that is not causal and equally wide on both sides."""
    sizes = {
        _reach(mask_function, FAR_POSITION + offset, direction)
        for offset in _OFFSETS
        for direction in (1, -1)
    }
    if len(sizes) > 1:
        raise UnsupportedModel("its mask does not show as much before a token as after it")
    return Visibility(sizes.pop(), is_causal=False)


def _reach(mask_function: MaskFunction, position: int, direction: int) -> int | None:
    """Return how many positions a token sees on one side, including its own; None: all."""

    def sees(distance: int) -> bool:
        return _sees(mask_function, position, position - direction * distance)

    size = _first_hidden(sees, position)
    return None if size == position + 1 else size


def _sees(mask_function: MaskFunction, position: int, key: int) -> bool:
    query = torch.tensor(position, device="cpu")
    zero = torch.zeros_like(query)
    return bool(mask_function(zero, zero, query, zero + key))


def _size_at(mask_function: MaskFunction, position: int) -> int:
    """Return how many consecutive positions a token sees, including its own."""

    def sees(distance: int) -> bool:
        return _sees(mask_function, position, position - distance)

    if sees(-1):
        raise UnsupportedModel("its mask is not causal")
    return _first_hidden(sees, position)


def _first_hidden(sees: Callable[[int], bool], position: int) -> int:
    """Return the smallest distance at which the key is hidden; `position + 1`: none is hidden."""
    if not sees(0):
        raise UnsupportedModel("its mask hides a token from itself")
    size = position + 1
    if not sees(position):
        low, high = 0, position
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if sees(middle) else (low, middle)
        size = high
    samples = [2**k for k in range(24) if 2**k <= position]
    if any(sees(distance) != (distance < size) for distance in samples):
        raise UnsupportedModel("its mask has gaps")
    return size


def _chunk_size(mask_function: MaskFunction, start: int) -> int:
    """Return the size of the chunk that begins at `start`."""
    low, high = 0, FAR_POSITION
    while high - low > 1:
        middle = (low + high) // 2
        is_seen = _sees(mask_function, start + middle, start)
        low, high = (middle, high) if is_seen else (low, middle)
    return high

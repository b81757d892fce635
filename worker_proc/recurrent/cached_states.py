"""Runs modules that keep their states in transformers' cache over packed rows.

Examples are ZAYA's projections with convolutions and delayed values, and the n-grams of Qwen4-Exp.
Their own forward runs with a stand-in for the cache, which provides the states before some rows and
keeps the states after them. Texts with equal numbers of rows are batched, so that a step in which
each text decodes a token calls a module once. A text whose states are saved midway is computed in
pieces.
"""

import inspect
from collections.abc import Iterator, Sequence
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import nn

from worker_proc.native.kernels import NativeLibrary
from worker_proc.recurrent.cache_argument import CACHE
from worker_proc.recurrent.row_convolution import Convolutions, RowConvolutions
from worker_proc.recurrent.stand_in_cache import StandInCache
from worker_proc.recurrent.state_pool import StatePool
from worker_proc.recurrent.state_spec import RecurrentSpec
from worker_proc.recurrent.step_texts import NO_STATE


class _Piece(NamedTuple):
    """Consecutive rows of a text, and the blocks of its states."""

    first_row: int
    source: int
    blocks: list[int]
    """Blocks that receive the states after the rows."""


class CachedStatesLayer:
    """The forward of one module over packed rows."""

    def __init__(
        self, module: nn.Module, spec: RecurrentSpec, library: NativeLibrary | None
    ) -> None:
        self.spec = spec
        self.is_rowwise = True
        self.plain_products: Sequence[str] = ()
        self._own = MethodType(type(module).forward, module)
        self._signature = inspect.signature(self._own)
        self._convolutions = Convolutions(library)
        self._pool: StatePool | None = None

    def attach(self, pool: StatePool) -> None:
        """Use the states of `pool` from now on."""
        self._pool = pool

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the module's own forward, for packed rows."""
        given = self._signature.bind(*args, **kwargs).arguments
        given.update(given.pop("kwargs", {}))
        num_rows = next(one.shape[1] for one in given.values() if isinstance(one, torch.Tensor))
        batches = list(self._batches(num_rows))
        indices = [index for _, index in batches]
        with RowConvolutions(self._convolutions):
            results = [self._compute(given, num_rows, *batch) for batch in batches]
        if not isinstance(results[0], tuple):
            return _in_order(results, indices, num_rows)
        return tuple(_in_order(parts, indices, num_rows) for parts in zip(*results, strict=True))

    def _batches(self, num_rows: int) -> Iterator[tuple[list[_Piece], torch.Tensor]]:
        """Yield pieces that are computed together, and their rows, `[pieces, rows of each]`."""
        assert self._pool is not None
        batches: dict[tuple[int, int, bool], list[_Piece]] = {}
        for text in self._pool.texts_with(num_rows):
            ends: dict[int, list[int]] = {}
            for block, end in text.cuts.items():
                ends.setdefault(end, []).append(block)
            start, source = 0, text.source
            for number, (end, blocks) in enumerate(ends.items()):
                key = number, end - start, source != NO_STATE
                piece = _Piece(text.first_row + start, source, blocks)
                batches.setdefault(key, []).append(piece)
                start, source = end, blocks[0]
        for (_, count, _), pieces in sorted(batches.items()):
            firsts = torch.tensor([piece.first_row for piece in pieces])
            yield pieces, firsts.unsqueeze(1) + torch.arange(count)

    def _compute(
        self, given: dict[str, Any], num_rows: int, pieces: list[_Piece], index: torch.Tensor
    ) -> Any:
        """Return the results for rows, and keep the states after them."""
        assert self._pool is not None
        tensors = self._pool.tensors[self.spec.module_name]
        kept = list(zip(self.spec.states, tensors, strict=True))
        before = None
        if pieces[0].source != NO_STATE:
            sources = torch.tensor([piece.source for piece in pieces])
            before = {
                state.function: states[sources].long() if state.holds_ids else states[sources]
                for state, states in kept
            }
        cache = StandInCache(before)
        rows = {
            name: value[0][index]
            if isinstance(value, torch.Tensor) and value.shape[:2] == (1, num_rows)
            else value
            for name, value in given.items()
        }
        result = self._own(**rows | {CACHE: cache})
        for state, states in kept:
            after = cache.after[state.function]
            for number, piece in enumerate(pieces):
                states[piece.blocks] = after[number].to(states.dtype)
        return result


def _in_order(
    parts: Sequence[torch.Tensor], indices: Sequence[torch.Tensor], num_rows: int
) -> torch.Tensor:
    """Return `[1, rows, ...]`, given results `[pieces, rows of each, ...]`."""
    first = parts[0]
    out = first.new_empty(num_rows, *first.shape[2:])
    for part, index in zip(parts, indices, strict=True):
        out[index.flatten()] = part.flatten(0, 1)
    return out.unsqueeze(0)

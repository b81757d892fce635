"""Masks of a step's constrained rows, computed in separate threads alongside the model."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import llguidance
import numpy as np
import torch
from torch import Tensor

from worker_proc.grammar.state import GrammarState

_BITS = 32


class RowMasks:
    """The allowed tokens of some rows."""

    def __init__(self, bits: Tensor, rows: dict[int, int], vocab_size: int) -> None:
        """`bits`, int32, has a line for each constrained row; `rows` maps rows to lines."""
        self.bits = bits
        self._rows = rows
        self._vocab_size = vocab_size

    def __contains__(self, row: int) -> bool:
        return row in self._rows

    def line(self, row: int) -> int:
        """Return the line of `bits` for a row; -1: it may take any token."""
        return self._rows.get(row, -1)

    def allowed(self, rows: Sequence[int], device: torch.device) -> Tensor:
        """Return the tokens that constrained rows may take: bool [n, vocab]."""
        lines = self.bits.numpy()[[self._rows[row] for row in rows]]
        known = lines.shape[1] * _BITS
        bits = np.unpackbits(lines.view(np.uint8), axis=1, bitorder="little")
        if known < self._vocab_size:
            bits = np.pad(bits, ((0, 0), (0, self._vocab_size - known)))
        return torch.from_numpy(bits.view(np.bool_))[:, : self._vocab_size].to(device)


class MaskedRows(NamedTuple):
    """The rows of one request: the first one, and one for each draft."""

    first_row: int
    state: GrammarState
    draft_token_ids: list[int]


class MaskComputer:
    """Computes the masks of one step at a time."""

    def __init__(
        self, num_threads: int, num_tokens: int, vocab_size: int, special_token_ids: list[int]
    ) -> None:
        """Take the number of the tokenizer's tokens and of the model's, and the special ones."""
        self._num_words = -(-num_tokens // _BITS)
        special = np.zeros(self._num_words, np.uint32)
        for token_id in special_token_ids:
            special[token_id // _BITS] |= 1 << token_id % _BITS
        self._special_places = np.flatnonzero(special)
        self._special_words = special[self._special_places]
        """The words of a line that have bits of special tokens."""
        self._vocab_size = vocab_size
        self._executor = llguidance.LLExecutor(num_threads)
        self._thread = ThreadPoolExecutor(1, "troika-masks")

    def begin(self, requests: list[MaskedRows]) -> Future[RowMasks]:
        """Start to compute the masks of these requests; their states must not change meanwhile."""
        return self._thread.submit(self._compute, requests)

    def _compute(self, requests: list[MaskedRows]) -> RowMasks:
        requests = [request for request in requests if not request.state.error]
        rows: dict[int, int] = {}
        lines: list[int] = []
        for first_row, _, drafts in requests:
            lines.append(len(rows))
            rows |= {first_row + place: len(rows) + place for place in range(1 + len(drafts))}
        # Rows after a draft that is not allowed are dropped anyway, and need no mask.
        bits = torch.full((len(rows), self._num_words), -1, dtype=torch.int32)
        placed = list(zip(requests, lines, strict=True))
        try:
            self._fill(bits, placed)
        except BaseException:  # including a panic of the library, which is not an Exception
            alone = placed
        else:
            forced = self._lines_with_only_a_special_token(bits)
            alone = [
                (request, line)
                for request, line in placed
                if not forced.isdisjoint(range(line, line + 1 + len(request.draft_token_ids)))
            ]
        for request, line in alone:
            self._fill_alone(bits, request, line)
        for request in requests:
            request.state.note_error()
        return RowMasks(bits, rows, self._vocab_size)

    def _fill(self, bits: Tensor, placed: list[tuple[MaskedRows, int]]) -> None:
        """Compute the masks of these requests in parallel, from a line on for each."""
        plain, drafted = [], []
        for (_, state, drafts), line in placed:
            assert state.matcher is not None
            if drafts:
                drafted.append((state.matcher, line, drafts))
            else:
                plain.append((state.matcher, line))
        size = bits.data_ptr(), self._num_words * 4, len(bits)
        if plain:
            self._executor.unsafe_compute_mask_ptr(plain, *size)
        if drafted:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(drafted, *size)

    def _lines_with_only_a_special_token(self, bits: Tensor) -> set[int]:
        """Return the lines in which `GrammarState.masks` may replace the only token."""
        words = bits.numpy().view(np.uint32)
        has_special = (words[:, self._special_places] & self._special_words).any(axis=1)
        return {
            int(line)
            for line in np.flatnonzero(has_special)
            if np.count_nonzero(words[line]) == 1 and int(words[line].max()).bit_count() == 1
        }

    def _fill_alone(self, bits: Tensor, request: MaskedRows, line: int) -> None:
        """Compute the masks of one request; a failure affects only this request."""
        try:
            masks = request.state.masks(request.draft_token_ids)
        except BaseException as error:
            request.state.error = f"{type(error).__name__}: {error}"
            return
        width = self._num_words * 4
        for place, mask in enumerate(masks):
            row = np.frombuffer(mask[:width].ljust(width, b"\0"), np.int32)
            bits[line + place] = torch.from_numpy(row.copy())

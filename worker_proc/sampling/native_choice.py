"""Chooses tokens by the native kernel, in one call for each step."""

from array import array
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from worker_proc.grammar.masks import RowMasks
from worker_proc.native.kernels import NATIVE_DTYPES, NativeLibrary
from worker_proc.native.structures import SAMPLING_ROW, SCORE_EDIT, ChoiceState, EditKind
from worker_proc.sampling.logit_edits import SamplingRow, banned_stops, banned_words
from worker_proc.sampling.row_edits import MIN_REPETITION_PENALTY, RowEdits
from worker_proc.sampling.thinking import forced_token

_NOT_FINITE = int(ChoiceState.NOT_FINITE)


class NativeChoice:
    """Chooses the tokens of a step on the CPU."""

    def __init__(
        self, library: NativeLibrary, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        self._library = library
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._greedy, self._num_greedy = b"", 0

    def choose(
        self, logits: Tensor, rows: Sequence[SamplingRow], masks: RowMasks | None
    ) -> tuple[list[int], list[int]]:
        """Return a token for each row, and the rows that are not finite, whose token is 0."""
        if logits.dtype not in NATIVE_DTYPES:
            logits = logits.float()
        if logits.stride(1) != 1:
            logits = logits.clone(memory_format=torch.contiguous_format)
        orders, edits = self._greedy_orders(len(rows)), _Edits(self._eos_token_ids)
        if masks is not None or not all(row.is_greedy and not row.edits_scores for row in rows):
            orders = b"".join(self._orders(rows, masks, edits))
        bits = None if masks is None else masks.bits
        packed = b"".join(edits.packed)
        token_ids, states = self._library.sample(logits, orders, packed, bits)
        lost = []
        if any(states):
            lost = [place for place, state in enumerate(states) if state == _NOT_FINITE]
        return token_ids, lost

    def _greedy_orders(self, num_rows: int) -> bytes:
        """Return the orders of rows that take their most likely token without edits."""
        if num_rows > self._num_greedy:
            self._num_greedy = num_rows
            self._greedy = b"".join(_greedy(place, -1, 0, 0) for place in range(num_rows))
        return self._greedy[: num_rows * SAMPLING_ROW.size]

    def _orders(
        self, rows: Sequence[SamplingRow], masks: RowMasks | None, edits: "_Edits"
    ) -> Iterator[bytes]:
        """Yield the order of each row, and add its edits to `edits`."""
        for place, row in enumerate(rows):
            first = len(edits.packed)
            if row.edits_scores:
                edits.add(row)
            line = -1 if masks is None else masks.line(place)
            yield self._order(row, place, line, first, len(edits.packed) - first)

    def _order(self, row: SamplingRow, *places: int) -> bytes:
        params = row.sampling_params
        if row.is_greedy:
            return _greedy(*places)
        top_k = params.top_k if 0 < params.top_k < self._vocab_size else 0
        filters = (params.min_p, params.top_p, params.temperature, top_k)
        return SAMPLING_ROW.pack(params.seed, row.num_tokens, *filters, *places)


class _Edits:
    """The edits of all rows of a step, in the order of `logit_edits.edit_scores`."""

    def __init__(self, eos_token_ids: Sequence[int]) -> None:
        self.packed: list[bytes] = []
        self._eos_token_ids = eos_token_ids
        self._alive: list[RowEdits | array[int]] = []  # kept alive during the call

    def add(self, row: SamplingRow) -> None:
        """Add the edits of a row whose parameters edit scores."""
        params, kept = row.sampling_params, row.edits
        assert kept is not None
        self._alive.append(kept)
        self._add(EditKind.BAN, banned_stops(row, self._eos_token_ids))
        if params.bad_words:
            self._add(EditKind.BAN, banned_words(row))
        if kept.bias_ids:
            self._pack(EditKind.ADD_BIAS, kept.bias_ids, (_address(kept.biases), 0, 0))
        if kept.token_counts is not None:
            counts = kept.token_counts
            latest = self._array(row.token_ids_after(counts.num_tokens))
            addresses = (0, _address(counts.counts), _address(latest))
            penalties = (
                max(params.repetition_penalty, MIN_REPETITION_PENALTY),
                params.frequency_penalty,
                params.presence_penalty,
            )
            numbers = (len(latest), *penalties)
            self._pack(EditKind.PENALIZE, counts.ids, addresses, numbers)
        if kept.allowed_ids:
            self._pack(EditKind.ALLOW, kept.allowed_ids)
        if params.thinking_budget is not None:
            budget = params.thinking_budget
            forced = forced_token(row.token_ids, row.num_prompt_tokens, budget)
            self._add(EditKind.FORCE, [] if forced is None else [forced])

    def _add(self, kind: EditKind, ids: Sequence[int]) -> None:
        if ids:
            self._pack(kind, self._array(ids))

    def _array(self, ids: Sequence[int]) -> "array[int]":
        kept = array("i", ids)
        self._alive.append(kept)
        return kept

    def _pack(
        self,
        kind: EditKind,
        ids: "array[int]",
        addresses: tuple[int, int, int] = (0, 0, 0),
        numbers: tuple[int, float, float, float] = (0, 0.0, 0.0, 0.0),
    ) -> None:
        """Pack an edit: addresses of biases, counts and latest outputs, then their numbers."""
        self.packed.append(SCORE_EDIT.pack(_address(ids), *addresses, kind, len(ids), *numbers))


def _greedy(*places: int) -> bytes:
    return SAMPLING_ROW.pack(0, 0, 0.0, 1.0, 0.0, 0, *places)


def _address(values: "array[int] | array[float]") -> int:
    return values.buffer_info()[0]

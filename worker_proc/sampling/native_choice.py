"""Chooses tokens with the native kernel: one call for a step, and one for each part with edits."""

from collections.abc import Sequence

import torch
from torch import Tensor

from worker_proc.grammar.masks import RowMasks
from worker_proc.native.kernels import NATIVE_DTYPES, SAMPLING_ROW, ChoiceState, NativeLibrary
from worker_proc.sampling.logit_edits import SamplingRow, edited_scores


class NativeChoice:
    """Chooses the tokens of a step on the CPU."""

    def __init__(
        self,
        library: NativeLibrary,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        chunk_rows: int,
    ) -> None:
        """Take the number of rows to edit at a time."""
        self._library = library
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._chunk_rows = chunk_rows

    def choose(
        self, logits: Tensor, rows: Sequence[SamplingRow], masks: RowMasks | None
    ) -> tuple[list[int], list[int]]:
        """Return a token for each row, and the rows that are not finite, whose token is 0."""
        if logits.dtype not in NATIVE_DTYPES:
            logits = logits.float()
        if logits.stride(1) != 1:
            logits = logits.clone(memory_format=torch.contiguous_format)
        bits = None if masks is None else masks.bits
        orders = b"".join(
            # Rows with edits take their most likely token here: it stays where none is possible.
            _greedy(i) if row.edits_scores else self._order(i, row, _line(masks, i))
            for i, row in enumerate(rows)
        )
        tokens, states = self._library.sample(logits, orders, bits)
        token_ids: list[int] = tokens.tolist()
        self._choose_edited(logits, rows, masks, token_ids)
        not_finite = [i for i, state in enumerate(states) if state == ChoiceState.NOT_FINITE]
        for i in not_finite:
            token_ids[i] = 0
        return token_ids, not_finite

    def _choose_edited(
        self,
        logits: Tensor,
        rows: Sequence[SamplingRow],
        masks: RowMasks | None,
        token_ids: list[int],
    ) -> None:
        """Replace the tokens of the rows whose scores are edited first."""
        edited = [i for i, row in enumerate(rows) if row.edits_scores]
        free = [i for i in edited if _line(masks, i) < 0]
        masked = [i for i in edited if _line(masks, i) >= 0]
        for members in (free, masked):
            for start in range(0, len(members), self._chunk_rows):
                part = members[start : start + self._chunk_rows]
                part_rows = [rows[i] for i in part]
                allowed = bits = None
                if masks is not None and members is masked:
                    bits = masks.bits
                    if any(row.sampling_params.thinking_budget is not None for row in part_rows):
                        allowed = masks.allowed(part, logits.device)
                part_logits = logits.index_select(0, torch.tensor(part))
                scores = edited_scores(part_logits, part_rows, self._eos_token_ids, allowed)
                orders = b"".join(
                    self._order(place, rows[i], _line(masks, i)) for place, i in enumerate(part)
                )
                tokens, states = self._library.sample(scores, orders, bits, are_edited=True)
                for i, token_id, state in zip(part, tokens.tolist(), states, strict=True):
                    if state == ChoiceState.CHOSEN:
                        token_ids[i] = token_id

    def _order(self, place: int, row: SamplingRow, line: int) -> bytes:
        params = row.sampling_params
        if params.greedy:
            return _greedy(place, line)
        top_k = params.top_k if 0 < params.top_k < self._vocab_size else 0
        filters = (params.min_p, params.top_p, params.temperature, top_k)
        return SAMPLING_ROW.pack(params.seed, row.num_tokens, *filters, place, line)


def _greedy(place: int, line: int = -1) -> bytes:
    return SAMPLING_ROW.pack(0, 0, 0.0, 1.0, 0.0, 0, place, line)


def _line(masks: RowMasks | None, row: int) -> int:
    return -1 if masks is None else masks.line(row)

"""Chooses the tokens of a step with Triton, by parameters that are on the device.

Every row of a worker on CUDA goes through the same kernel, either with the parameters that stay
there (`device_sampler`), or with those of the current step after its scores were edited. The path
of a row can therefore not change its token.
"""

import struct
from collections.abc import Iterator, Sequence

import torch
import triton
from torch import Tensor

from protocol.sampling import SamplingParams
from worker_proc.cuda.choice_kernels import NOT_FINITE, NUM_COLUMNS, UNIT, choose_kernel
from worker_proc.grammar.masks import RowMasks
from worker_proc.inputs import to_device
from worker_proc.sampling.edited_rows import edit_rows
from worker_proc.sampling.logit_edits import SamplingRow

MAX_NEAR = 2**14
"""Maximum number of tokens near the best one that are listed; a row with more is searched as a
whole."""
MAX_TILE_TOKENS = 2048
"""Two programs with this number share a multiprocessor of an H100."""
_DTYPES = {torch.float32, torch.bfloat16, torch.float16}
_LINE = struct.Struct("=qddqq")  # seed, temperature, top_p, top_k, min_weight
_GREEDY = _LINE.pack(0, 0.0, 1.0, 0, 0)


def pack_parameters(params: SamplingParams, vocab_size: int) -> bytes:
    """Pack a request's line of parameters; a temperature of 0 takes the most likely token."""
    if params.greedy:
        return _GREEDY
    top_k = params.top_k if 0 < params.top_k < vocab_size else 0
    # Exact: the product only changes the exponent, and the bound is at most 2**40.
    min_weight = -int(-params.min_p * UNIT.value // 1)
    return _LINE.pack(params.seed, params.temperature, params.top_p, top_k, min_weight)


def lines_to_device(lines: Sequence[bytes], device: torch.device) -> Tensor:
    """Return packed lines as int64 `[n, columns]` on a device, without waiting for the copy."""
    packed = torch.frombuffer(bytearray(b"".join(lines)), dtype=torch.int64)
    if device.type != "cpu":
        packed = packed.pin_memory().to(device, non_blocking=True)
    return packed.view(-1, NUM_COLUMNS.value)


def choose(logits: Tensor, parameters: Tensor, lines: Tensor, positions: Tensor) -> Tensor:
    """Return the token of each row of `logits`, `[n, vocab]`, or NOT_FINITE; int64 `[n]`.

    `lines` are the lines of the rows in `parameters`, and `positions` the positions of the chosen
    tokens, both int32 `[n]`. Nothing here depends on values, so the launch can be captured.
    """
    num_rows, vocab_size = logits.shape
    chosen = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if not num_rows:
        return chosen
    capacity = min(MAX_NEAR, triton.next_power_of_2(vocab_size))
    nearby = torch.empty(num_rows, capacity, dtype=torch.int32, device=logits.device)
    choose_kernel[(num_rows,)](
        *(logits, parameters, lines, positions, nearby, chosen),
        *(logits.stride(0), vocab_size),
        CAPACITY=capacity,
        TILE=min(MAX_TILE_TOKENS, triton.next_power_of_2(vocab_size)),
        num_warps=8,
    )
    return chosen


class TritonChoice:
    """Chooses tokens by parameters that are sent with each step."""

    def __init__(self, vocab_size: int, eos_token_ids: Sequence[int], chunk_rows: int) -> None:
        """`chunk_rows` is the number of rows whose scores are edited at a time."""
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._chunk_rows = chunk_rows

    def choose(
        self, logits: Tensor, rows: Sequence[SamplingRow], masks: RowMasks | None
    ) -> tuple[list[int], list[int]]:
        """Return a token for each row, and the rows that are not finite, whose token is 0."""
        if logits.dtype not in _DTYPES:
            logits = logits.float()
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        lines = [pack_parameters(row.sampling_params, self._vocab_size) for row in rows]
        parameters = lines_to_device(lines, logits.device)
        columns = to_device([*range(len(rows)), *(row.num_tokens for row in rows)], logits.device)
        order, positions = columns.int().split(len(rows))
        chosen = choose(logits, parameters, order, positions)
        for part, part_masks in self._parts_to_edit(rows, masks):
            edited = edit_rows(logits, rows, part, part_masks, self._eos_token_ids)
            index = edited.places
            found = choose(edited.scores, parameters, order[index], positions[index])
            # If no token is possible, the best token of the raw logits is taken.
            best = torch.where(edited.is_lost, logits[index].max(dim=-1).indices, found)
            is_finite = chosen[index] != NOT_FINITE.value
            chosen[index] = torch.where(is_finite, best, chosen[index])
        token_ids = chosen.tolist()
        lost = [row for row, token_id in enumerate(token_ids) if token_id == NOT_FINITE.value]
        for row in lost:
            token_ids[row] = 0
        return token_ids, lost

    def _parts_to_edit(
        self, rows: Sequence[SamplingRow], masks: RowMasks | None
    ) -> Iterator[tuple[list[int], RowMasks | None]]:
        """Yield rows with masks, then those with edits only, in chunks of rows to edit together."""
        masked = [i for i in range(len(rows)) if masks is not None and i in masks]
        is_masked = set(masked)
        unmasked = [i for i, row in enumerate(rows) if row.edits_scores and i not in is_masked]
        for members, member_masks in ((masked, masks), (unmasked, None)):
            for start in range(0, len(members), self._chunk_rows):
                yield members[start : start + self._chunk_rows], member_masks

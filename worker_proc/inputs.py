"""Packs the tokens of one step into a single row, with the indices that attention needs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from worker_proc.mirror import ScheduledRequest

NULL_SLOT = 0  # of the null block, for KV that is not kept


class LogitsRange(NamedTuple):
    """One request's rows of the step's logits: first those of its prompt, then those to sample."""

    part: ScheduledRequest
    first_row: int
    num_prompt_rows: int
    num_drafts: int
    """A request that samples has a row for its last known token, and one for each draft."""


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One packed step of T tokens; N rows get logits."""

    parts: Sequence[ScheduledRequest]
    first_rows: list[int]  # row of each part's first token
    input_ids: torch.Tensor  # [1, T]
    position_ids: torch.Tensor  # [1, T]
    slot_mappings: list[torch.Tensor]
    """For each KV group, `[T]`: block · block_size + offset of each token's KV."""
    logits_indices: torch.Tensor  # [N]
    logits_ranges: list[LogitsRange]  # in mirror order; requests without logits are left out


def to_device(values: list[int], device: torch.device) -> torch.Tensor:
    """Return `values` as int64 on `device`, without waiting for the copy."""
    if device.type == "cpu":
        return torch.tensor(values, dtype=torch.long)
    return torch.tensor(values, dtype=torch.long, pin_memory=True).to(device, non_blocking=True)


def pack_step(
    parts: Sequence[ScheduledRequest], block_size: int, device: torch.device
) -> StepInputs:
    """Pack the tokens of `parts`, at least one, in mirror order."""
    tokens: list[int] = []
    positions: list[int] = []
    first_rows: list[int] = []
    logits_rows: list[int] = []
    ranges: list[LogitsRange] = []
    for part in parts:
        request, start, num_tokens, samples = part
        first_row, num_drafts = len(tokens), 0
        first_rows.append(first_row)
        if num_tokens == 1:
            tokens.append(request.token_ids[start])
            positions.append(start)
        else:
            tokens += request.token_ids[start : part.end]
            if num_drafts := part.num_drafts:
                tokens += request.draft_token_ids[:num_drafts]
            positions += range(start, part.end)
        num_prompt_rows = 0
        if request.sampling_params.prompt_logprobs is not None:
            # The row of position p predicts the token at p + 1, which must still be of the prompt.
            num_prompt_rows = max(min(part.end, request.num_prompt_tokens - 1) - start, 0)
        if num_prompt_rows or samples:
            ranges.append(LogitsRange(part, len(logits_rows), num_prompt_rows, num_drafts))
        if num_prompt_rows:
            logits_rows += range(first_row, first_row + num_prompt_rows)
        if num_drafts:
            logits_rows += range(len(tokens) - 1 - num_drafts, len(tokens) - 1)
        if samples:
            logits_rows.append(len(tokens) - 1)
    return StepInputs(
        parts=parts,
        first_rows=first_rows,
        input_ids=to_device(tokens, device).unsqueeze(0),
        position_ids=to_device(positions, device).unsqueeze(0),
        slot_mappings=[
            to_device(_slots(parts, group, block_size), device)
            for group in range(len(parts[0].request.block_tables))
        ],
        logits_indices=to_device(logits_rows, device),
        logits_ranges=ranges,
    )


def _slots(parts: Sequence[ScheduledRequest], group: int, block_size: int) -> list[int]:
    """Return the slot of each token's KV in the layers of one group."""
    slots: list[int] = []
    for part in parts:
        request, position, num_tokens, _ = part
        end, table = position + num_tokens, request.block_tables[group]
        num_unwritten = min(max(request.num_cached_tokens - position, 0), num_tokens)
        if num_unwritten:
            slots += [NULL_SLOT] * num_unwritten
            position += num_unwritten
        while position < end:
            index, offset = divmod(position, block_size)
            count = min(block_size - offset, end - position)
            first = table[index] * block_size + offset
            slots += range(first, first + count)
            position += count
    return slots

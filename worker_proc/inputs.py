"""Packs the tokens of one step into a single row, with the indices that attention needs.

The inputs of a decode step of the same requests as the step before are made from those.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, overload

import torch

from worker_proc.errors import MirrorError
from worker_proc.request import MirroredRequest, ScheduledRequest

NULL_SLOT = 0
"""The slot of the null block for KV that is not kept."""


class PromptRows(NamedTuple):
    """The rows of the step's logits that belong to one request's prompt."""

    part: ScheduledRequest
    first_row: int
    num_rows: int


class BegunBlock(NamedTuple):
    """A row whose token is the first one in a block."""

    row: int
    number: int
    """The index of the block in its text."""
    request: MirroredRequest


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One packed step of T tokens; N rows get logits."""

    parts: Sequence[ScheduledRequest]
    first_rows: list[int]  # row of each part's first token
    input_ids: torch.Tensor  # [1, T]
    position_ids: torch.Tensor  # [1, T]
    logits_indices: torch.Tensor
    """`[N]`: first the rows to sample, then those of prompts. A part that samples has a row for its
    last known token, and one for each draft."""
    sampling: Sequence[ScheduledRequest]
    """The parts that sample, in mirror order."""
    prompt_rows: list[PromptRows]
    token_type_ids: torch.Tensor | None = None
    """`[1, T]`: which text of a pair a token belongs to; None: the model does not ask for it."""
    begun_blocks: Sequence[BegunBlock] | None = None
    """The blocks that the step begins, if its parts are those of the step before, each one token
    further; None: it is another step."""


def to_device(values: list[int], device: torch.device) -> torch.Tensor:
    """Return `values` as int64 on `device`, without waiting for the copy."""
    if device.type != "cpu":
        pinned = torch.tensor(values, dtype=torch.long, pin_memory=True)
        return pinned.to(device, non_blocking=True)
    if not values:
        return torch.empty(0, dtype=torch.long)
    # In a third of the time that torch takes to read a list.
    packed = bytearray(struct.pack(f"{len(values)}q", *values))
    return torch.frombuffer(packed, dtype=torch.long)


def pack_step(parts: Sequence[ScheduledRequest], device: torch.device) -> StepInputs:
    """Pack the tokens of `parts`, at least one, in mirror order."""
    tokens: list[int] = []
    positions: list[int] = []
    first_rows: list[int] = []
    sampling: list[ScheduledRequest] = []
    logits_rows: list[int] = []
    scored: list[tuple[ScheduledRequest, int, int]] = []
    for part in parts:
        request, start = part.request, part.start
        first_row = len(tokens)
        first_rows.append(first_row)
        if part.samples:
            sampling.append(part)
            if part.num_tokens == 1:  # most parts of most steps
                logits_rows.append(first_row)
                tokens.append(request.token_ids[start])
                positions.append(start)
                continue
        end, num_drafts = part.end, part.num_drafts
        if part.samples:
            end_row = first_row + part.num_tokens
            logits_rows += range(end_row - 1 - num_drafts, end_row)
        tokens += request.token_ids[start:end]
        tokens += request.draft_token_ids[:num_drafts]
        positions += range(start, end)
        if request.sampling_params.prompt_logprobs is not None:
            # The row of position p predicts the token at p + 1, which must still be of the prompt.
            num_rows = min(end, request.num_prompt_tokens - 1) - start
            if num_rows > 0:
                scored.append((part, first_row, num_rows))
    prompt_rows: list[PromptRows] = []
    for part, first_row, num_rows in scored:
        prompt_rows.append(PromptRows(part, len(logits_rows), num_rows))
        logits_rows += range(first_row, first_row + num_rows)
    return StepInputs(
        parts=parts,
        first_rows=first_rows,
        input_ids=to_device(tokens, device).unsqueeze(0),
        position_ids=to_device(positions, device).unsqueeze(0),
        logits_indices=to_device(logits_rows, device),
        sampling=sampling,
        prompt_rows=prompt_rows,
    )


def with_token_types(inputs: StepInputs) -> StepInputs:
    """Add the types of tokens: 1 in the second text of a pair, else 0."""
    types: list[int] = []
    for part in inputs.parts:
        pooling = part.request.sampling_params.pooling
        begin = 0 if pooling is None else pooling.second_text_start
        num_first = max(min(begin, part.end) - part.start, 0) if begin else part.num_tokens
        types += [0] * num_first + [1] * (part.num_tokens - num_first)
    tensor = to_device(types, inputs.input_ids.device)
    return replace(inputs, token_type_ids=tensor.unsqueeze(0))


class SteadyDecode:
    """Steps of the same requests, each of which computes its last known token."""

    def __init__(self, inputs: StepInputs, block_size: int) -> None:
        """Take the inputs of a step that computed one token of each of its requests."""
        self.requests = [part.request for part in inputs.parts]
        self._starts = [part.start for part in inputs.parts]
        self._inputs = inputs
        self._block_size = block_size
        self._num_moves = 0
        self._rows_by_move: list[list[int]] = [[] for _ in range(block_size)]
        """The rows that begin a block at a move, by its number modulo the size of a block."""
        for row, start in enumerate(self._starts):
            self._rows_by_move[-start % block_size].append(row)

    @staticmethod
    def can_follow(inputs: StepInputs, num_requests: int) -> bool:
        """Return whether a step computed and sampled exactly one token of every request."""
        num_tokens = inputs.input_ids.shape[1]
        num_rows = len(inputs.logits_indices)
        return num_tokens == num_rows == len(inputs.sampling) == len(inputs.parts) == num_requests

    def move_on(self) -> StepInputs:
        """Return the inputs of the next step, once the requests have the tokens of the last one."""
        self._num_moves += 1
        parts = _MovedParts(self.requests, self._starts, self._num_moves)
        tokens = [request.token_ids[-1] for request in self.requests]
        before = self._inputs
        self._inputs = replace(
            before,
            parts=parts,
            input_ids=to_device(tokens, before.input_ids.device).unsqueeze(0),
            position_ids=before.position_ids + 1,
            sampling=parts,
            begun_blocks=list(self._begun_blocks()),
        )
        return self._inputs

    def _begun_blocks(self) -> Iterator[BegunBlock]:
        for row in self._rows_by_move[self._num_moves % self._block_size]:
            request = self.requests[row]
            number = (self._starts[row] + self._num_moves) // self._block_size
            if number >= len(request.block_tables[0]):
                raise MirrorError(f"request {request.req_id} has no block {number} of its text")
            yield BegunBlock(row, number, request)


class _MovedParts(Sequence[ScheduledRequest]):
    """The parts of a step, built only when they are read."""

    def __init__(self, requests: list[MirroredRequest], starts: list[int], num_moves: int) -> None:
        self._requests = requests
        self._starts = starts
        self._num_moves = num_moves

    def __len__(self) -> int:
        return len(self._requests)

    @overload
    def __getitem__(self, row: int) -> ScheduledRequest: ...

    @overload
    def __getitem__(self, row: slice) -> Sequence[ScheduledRequest]: ...

    def __getitem__(self, row: int | slice) -> ScheduledRequest | Sequence[ScheduledRequest]:
        if isinstance(row, slice):
            return [self[index] for index in range(*row.indices(len(self)))]
        return ScheduledRequest(self._requests[row], self._starts[row] + self._num_moves, 1, True)


def slot_mappings(
    parts: Sequence[ScheduledRequest], num_groups: int, block_size: int, device: torch.device
) -> list[torch.Tensor]:
    """Return for each KV group, `[T]`: block · block_size + offset of each token's KV."""
    return [to_device(_slots(parts, group, block_size), device) for group in range(num_groups)]


def _slots(parts: Sequence[ScheduledRequest], group: int, block_size: int) -> list[int]:
    """Return the slot of each token's KV in the layers of one group."""
    slots: list[int] = []
    for part in parts:
        request, position, num_tokens = part.request, part.start, part.num_tokens
        table = request.block_tables[group]
        if num_tokens == 1 and position >= request.num_cached_tokens:
            slots.append(table[position // block_size] * block_size + position % block_size)
            continue
        end = position + num_tokens
        num_unwritten = min(max(request.num_cached_tokens - position, 0), num_tokens)
        slots += [NULL_SLOT] * num_unwritten
        position += num_unwritten
        while position < end:
            index, offset = divmod(position, block_size)
            count = min(block_size - offset, end - position)
            first = table[index] * block_size + offset
            slots += range(first, first + count)
            position += count
    return slots

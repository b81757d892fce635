"""Decode steps that follow one another: the inputs of one are made from those of the one before."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import overload

from worker_proc.inputs import BegunBlock, StepInputs, to_device
from worker_proc.mirror import MirroredRequest, MirrorError, ScheduledRequest


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
        """Return whether a step computed one token of each of all requests, and sampled it."""
        num_tokens = inputs.input_ids.shape[1]
        num_rows = len(inputs.logits_indices)
        return num_tokens == num_rows == len(inputs.sampling) == len(inputs.parts) == num_requests

    def move_on(self) -> StepInputs:
        """Return the inputs of the step after the last one, whose tokens the requests have got."""
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
    """The parts of a step, which are made when they are read."""

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

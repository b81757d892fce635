"""The state blocks of a fake worker: each holds a value that identifies the tokens before it.

In a step all requests read before any writes, and they may do so in any order. So a block that one
request writes must not be read or written by another in the same step.
"""

from collections.abc import Sequence
from typing import Protocol

from protocol.core_worker import NULL_BLOCK


class HasStates(Protocol):
    """A mirrored request, as far as states are concerned."""

    block_tables: list[list[int]]
    num_computed_tokens: int

    def prefix(self, position: int) -> int:
        """Identify the tokens up to this one."""


class FakeStates:
    """Executes the rules of state tables, and checks every state that a request begins from."""

    def __init__(self, block_size: int, num_blocks: int) -> None:
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._contents: dict[int, int] = {}
        """By block: the prefix up to the last token of its state."""

    def clear(self) -> None:
        self._contents.clear()

    def execute(self, parts: Sequence[tuple[HasStates, int]]) -> None:
        """Compute this many tokens of each request, drafts not included."""
        readers: dict[int, list[HasStates]] = {}
        for request, _ in parts:
            if request.num_computed_tokens:
                block_id = self._read(request)
                readers.setdefault(block_id, []).append(request)
        writers: dict[int, HasStates] = {}
        for request, num_tokens in parts:
            for block_id, prefix in self._writes(request, num_tokens):
                assert writers.setdefault(block_id, request) is request, "two requests write it"
                assert readers.get(block_id, []) in ([], [request]), "another request reads it"
                self._contents[block_id] = prefix

    def _read(self, request: HasStates) -> int:
        start = request.num_computed_tokens
        block_id = request.block_tables[-1][(start - 1) // self._block_size]
        assert block_id != NULL_BLOCK, "there is no state to begin from"
        assert self._contents[block_id] == request.prefix(start - 1), "the state is another one"
        return block_id

    def _writes(self, request: HasStates, num_tokens: int) -> list[tuple[int, int]]:
        start, size = request.num_computed_tokens, self._block_size
        end, table = start + num_tokens, request.block_tables[-1]
        assert table[(end - 1) // size] != NULL_BLOCK, "the last state has no block"
        assert len(table) == (end - 1) // size + 1
        writes = []
        for index in range(start // size, len(table)):
            if table[index] != NULL_BLOCK:
                assert 0 < table[index] < self._num_blocks
                writes.append((table[index], request.prefix(min((index + 1) * size, end) - 1)))
        return writes

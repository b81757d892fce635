"""The state blocks of a fake worker: each holds a value that identifies the tokens before it.

In a step all requests read before any writes, and they may do so in any order. So a block that one
request writes must not be read or written by another in the same step.
"""

from collections.abc import Sequence
from typing import Protocol

from protocol.core_worker import NULL_BLOCK, BlockCopies

OF_DRAFTS = 0
"""Content of a block whose state includes drafts that may be wrong."""


class HasStates(Protocol):
    """A mirrored request, as far as states are concerned."""

    token_ids: list[int]
    block_tables: list[list[int]]
    num_computed_tokens: int

    def prefix(self, position: int) -> int:
        """Identify the tokens up to this one."""


class FakeStates:
    """Executes the rules of state tables, and checks every state that a request begins from."""

    def __init__(self, block_size: int, num_blocks: int, num_host_blocks: int) -> None:
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._num_host_blocks = num_host_blocks
        self._host: dict[int, int] = {}
        self._contents: dict[int, int] = {}
        """The prefix up to the last token of each block's state."""
        self._kept: set[HasStates] = set()
        """Requests that begin from the state before a wrong draft, which is in no table."""

    def clear(self) -> None:
        self._contents.clear()
        self._host.clear()
        self._kept.clear()

    def content(self, block_id: int) -> int:
        """Return what a kept state stands for, which no draft is part of."""
        assert self._contents[block_id] != OF_DRAFTS
        return self._contents[block_id]

    def fill(self, block_id: int, content: int) -> None:
        """Write a state block, as a load does."""
        assert 0 < block_id < self._num_blocks
        self._contents[block_id] = content

    def forget(self, request: HasStates) -> None:
        """Let a request go; what is copied from its block is the state of its computed tokens."""
        if request in self._kept:
            self._kept.remove(request)
            own = request.block_tables[-1][-1]
            self._contents[own] = request.prefix(request.num_computed_tokens - 1)

    def swap(self, out: BlockCopies, into: BlockCopies) -> None:
        """Copy states to the host, then others from it."""
        for block_id, host_id in zip(out.device_block_ids, out.host_block_ids, strict=True):
            assert 0 <= host_id < self._num_host_blocks
            self._host[host_id] = self._contents[block_id]
            assert self._host[host_id] != OF_DRAFTS
        for block_id, host_id in zip(into.device_block_ids, into.host_block_ids, strict=True):
            self._contents[block_id] = self._host[host_id]

    def execute(self, parts: Sequence[tuple[HasStates, int]]) -> None:
        """Compute this many tokens of each request, drafts included."""
        readers: dict[int, list[HasStates]] = {}
        for request, _ in parts:
            if request in self._kept:
                self._kept.remove(request)
            elif request.num_computed_tokens:
                block_id = self._read(request)
                readers.setdefault(block_id, []).append(request)
        writers: dict[int, HasStates] = {}
        for request, num_tokens in parts:
            for block_id, prefix in self._writes(request, num_tokens):
                assert writers.setdefault(block_id, request) is request, "two requests write it"
                assert readers.get(block_id, []) in ([], [request]), "another request reads it"
                self._contents[block_id] = prefix

    def verified(self, request: HasStates, num_drafts: int, num_accepted: int) -> None:
        """Take the state after the last right draft, when the request has its tokens."""
        if num_accepted < num_drafts:
            self._kept.add(request)
        elif num_drafts:
            end = request.num_computed_tokens
            block_id = request.block_tables[-1][(end - 1) // self._block_size]
            self._contents[block_id] = request.prefix(end - 1)

    def _read(self, request: HasStates) -> int:
        start = request.num_computed_tokens
        block_id = request.block_tables[-1][(start - 1) // self._block_size]
        assert block_id != NULL_BLOCK, "there is no state to begin from"
        assert self._contents[block_id] == request.prefix(start - 1), "the state is another one"
        return block_id

    def _writes(self, request: HasStates, num_tokens: int) -> list[tuple[int, int]]:
        start, size = request.num_computed_tokens, self._block_size
        end, table = start + num_tokens, request.block_tables[-1]
        num_known = len(request.token_ids)
        assert all(table[(e - 1) // size] for e in range(min(end, num_known), end + 1))
        writes = []
        for index in range(start // size, (end - 1) // size + 1):
            if table[index] != NULL_BLOCK:
                assert 0 < table[index] < self._num_blocks
                last = min((index + 1) * size, end) - 1
                prefix = request.prefix(last) if last < num_known else OF_DRAFTS
                writes.append((table[index], prefix))
        return writes

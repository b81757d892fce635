"""KV blocks of the null runner: each records the table entry through which it was last written.

Blocks with two owners, and copies of host blocks without content, are therefore errors, even if the
core's own records agree.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeVar

from protocol.core_worker import SchedulerOutput
from protocol.model_facts import ModelFacts
from worker_proc.errors import MirrorError
from worker_proc.kv.window import first_visible
from worker_proc.request import MirroredRequest, ScheduledRequest

T = TypeVar("T")


class BlockOwner(NamedTuple):
    """An entry of a request's block table in one KV group."""

    request: MirroredRequest
    group: int
    entry: int


class NullBlocks:
    """Checks which requests write to and copy the KV blocks of a pool."""

    def __init__(self, facts: ModelFacts, requests: Mapping[int, MirroredRequest]) -> None:
        """`requests` are the mirrored ones, by id."""
        self._facts = facts
        self._requests = requests
        self._has_states = facts.kv_groups[-1].is_state
        self._writers: dict[int, BlockOwner] = {}
        self._host_blocks: set[int] = set()

    def clear(self) -> None:
        """Lose the contents of all blocks, as a sleep does."""
        self._writers.clear()
        self._host_blocks.clear()

    def swap(self, step: SchedulerOutput) -> None:
        """Copy blocks to the host, then others from it into blocks of new requests.

        Raises MirrorError if a host block was never written, or if no new request holds a block
        that is filled.
        """
        self._host_blocks.update(step.swap_out.host_block_ids)
        if not step.swap_in.host_block_ids:
            return
        for host_id in step.swap_in.host_block_ids:
            if host_id not in self._host_blocks:
                raise MirrorError(f"host block {host_id} was never written")
        owners: dict[int, BlockOwner] = {}
        for new in step.scheduled_new_reqs:  # the first request with a block writes it
            request = self._requests[new.req_id]
            for group, table in enumerate(self._kv_tables(new.block_ids)):
                for index, block_id in enumerate(table):
                    owners.setdefault(block_id, BlockOwner(request, group, index))
        for block_id in step.swap_in.device_block_ids:
            if block_id not in owners:
                raise MirrorError(f"swap_in fills block {block_id}, which no new request holds")
            self._claim(block_id, owners[block_id])

    def write(self, scheduled: Iterable[ScheduledRequest]) -> None:
        """Write the tokens of each part to its blocks.

        Raises MirrorError if another request still reads one of them.
        """
        block_size = self._facts.block_size
        for part in scheduled:
            request = part.request
            is_in_block = part.num_tokens == 1 and part.start % block_size
            if is_in_block and part.start > request.num_cached_tokens:
                continue  # its entry was claimed with the token before
            first = max(part.start, request.num_cached_tokens) // block_size
            for group, table in enumerate(self._kv_tables(request.block_tables)):
                for index in range(first, (part.end - 1) // block_size + 1):
                    self._claim(table[index], BlockOwner(request, group, index))

    def _kv_tables(self, tables: list[T]) -> list[T]:
        return tables[:-1] if self._has_states else tables

    def _claim(self, block_id: int, owner: BlockOwner) -> None:
        before = self._writers.get(block_id)
        if before == owner:
            return
        if before is not None and self._is_live(before):
            raise MirrorError(
                f"block {block_id} is written by requests {before.request.req_id}"
                f" and {owner.request.req_id}"
            )
        self._writers[block_id] = owner

    def _is_live(self, owner: BlockOwner) -> bool:
        """Return whether the request still runs, and its window has not passed the block."""
        request, group, entry = owner
        if self._requests.get(request.req_id) is not request:
            return False
        window = self._facts.kv_groups[group].window
        visible = first_visible(window, request.num_computed_tokens)
        return entry >= visible // self._facts.block_size

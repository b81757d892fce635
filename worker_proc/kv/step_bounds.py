"""Checks the tokens, blocks and copies of a step against the model's facts."""

from collections.abc import Sequence

from protocol.core_worker import NULL_BLOCK, BlockCopies, NewRequestData
from protocol.model_facts import ModelFacts
from worker_proc.errors import MirrorError
from worker_proc.kv.window import first_visible


class StepBounds:
    """Checks parts of a step; raises MirrorError, which names the field and the bound."""

    def __init__(self, facts: ModelFacts) -> None:
        self._facts = facts

    def check_new(self, new: NewRequestData, token_ids: Sequence[int]) -> None:
        """Check a new request, whose known tokens are `token_ids`."""
        name = f"new request {new.req_id}"
        known = len(token_ids)
        if not new.num_prompt_tokens <= known <= self._facts.max_model_len:
            raise MirrorError(
                f"{name} has {known} tokens, outside num_prompt_tokens {new.num_prompt_tokens}"
                f" to max_model_len {self._facts.max_model_len}"
            )
        if not new.num_computed_tokens < known:
            raise MirrorError(f"{name} has all of its {known} tokens computed")
        if new.num_cached_tokens - new.num_computed_tokens not in (0, 1):
            raise MirrorError(
                f"{name} has {new.num_cached_tokens} cached tokens"
                f" and {new.num_computed_tokens} computed ones"
            )
        if max(token_ids) >= self._facts.vocab_size:
            raise MirrorError(f"{name} holds a token outside vocab_size {self._facts.vocab_size}")
        self.check_tables(new.req_id, new.block_ids, new.num_computed_tokens)
        if self._facts.kv_groups[-1].is_state and new.num_cached_tokens > new.num_computed_tokens:
            raise MirrorError(f"{name} has a cached token after the state that it begins from")

    def check_tables(self, req_id: int, tables: list[list[int]], start: int | None) -> None:
        """Check the tables of a request that starts at `start`; None: blocks that are appended."""
        groups = self._facts.kv_groups
        if [len(table) for table in tables] != [len(tables[0]) if tables else 0] * len(groups):
            raise MirrorError(
                f"request {req_id} got block tables of lengths {list(map(len, tables))},"
                f" instead of {len(groups)} equal ones"
            )
        for group, table in zip(groups, tables, strict=True):
            if group.is_state:
                self._check_state_table(req_id, table)
                continue
            first = 0
            if start is not None:
                first = first_visible(group.window, start) // self._facts.block_size
            self._check_blocks(f"request {req_id}", table[:first], lowest=NULL_BLOCK)
            self._check_blocks(f"request {req_id}", table[first:])

    def _check_state_table(self, req_id: int, table: list[int]) -> None:
        """Check a state table, or the blocks appended to one."""
        bound = self._facts.num_state_blocks
        for block_id in table:
            if not NULL_BLOCK <= block_id < bound:
                raise MirrorError(
                    f"request {req_id} got state block {block_id}, outside 0 to {bound - 1}"
                )
        if table and table[-1] == NULL_BLOCK:
            raise MirrorError(f"request {req_id} got no state block at the end of its table")

    def check_copies(self, copies: BlockCopies, field: str) -> None:
        """Check the copies between device and host in `field` of a step."""
        facts, of_states = self._facts, field.startswith("state")
        if len(copies.device_block_ids) != len(copies.host_block_ids):
            raise MirrorError(f"columns of {field} differ in length")
        num_blocks = facts.num_state_blocks if of_states else facts.num_gpu_blocks
        self._check_blocks(field, copies.device_block_ids, num_blocks=num_blocks)
        num_host_blocks = facts.num_host_state_blocks if of_states else facts.num_host_blocks
        for block_id in copies.host_block_ids:
            if not 0 <= block_id < num_host_blocks:
                raise MirrorError(f"{field} names host block {block_id} of {num_host_blocks}")
        targets = copies.host_block_ids if field.endswith("out") else copies.device_block_ids
        if len(set(targets)) != len(targets):
            raise MirrorError(f"{field} copies two blocks to one")

    def _check_blocks(
        self,
        name: str,
        block_ids: list[int],
        lowest: int = NULL_BLOCK + 1,
        num_blocks: int | None = None,
    ) -> None:
        num_blocks = self._facts.num_gpu_blocks if num_blocks is None else num_blocks
        for block_id in block_ids:
            if not lowest <= block_id < num_blocks:
                bounds = f"{lowest} to {num_blocks - 1}"
                raise MirrorError(f"{name} got block {block_id}, outside {bounds}")

"""Chooses the number of state blocks."""

from typing import NamedTuple

from worker_proc.errors import InsufficientMemory
from worker_proc.kv.kv_tensors import format_sizes

MIN_BLOCKS = 3
"""The null block, a request's own, and one in which to keep a state."""


class StateBlockCounts(NamedTuple):
    """Numbers of state blocks."""

    num_blocks: int
    """The announced blocks, including the null block."""
    num_for_drafts: int = 0
    """Further blocks, for the states before drafts."""


def choose_num_state_blocks(
    available_bytes: int,
    block_bytes: int,
    *,
    max_num_seqs: int,
    has_attention: bool,
    num_speculative_tokens: int = 0,
    override: int | None = None,
) -> StateBlockCounts:
    """Choose the numbers of state blocks.

    There is one for each of `max_num_seqs` requests, as many again for the prefix cache, and one
    for each draft. Without `override`, which is the number of announced blocks, they take at most
    half of the memory if attention shares it, and with less memory both numbers shrink in
    proportion. Blocks of a stage without recurrent layers take no bytes. Raises InsufficientMemory
    if the blocks do not fit.
    """
    share = available_bytes // 2 if has_attention else available_bytes
    usable_bytes = available_bytes if override else share
    max_number, max_for_drafts = 1 + 2 * max_num_seqs, num_speculative_tokens * max_num_seqs
    fitting = max_number
    if block_bytes:
        fitting = min(
            max_number, usable_bytes // block_bytes * max_number // (max_number + max_for_drafts)
        )
    number = override or max(fitting, MIN_BLOCKS)
    number_for_drafts = min(max_for_drafts, number * max_for_drafts // max_number)
    needed_bytes = (number + number_for_drafts) * block_bytes
    if needed_bytes > usable_bytes:
        needed, free = format_sizes(needed_bytes, usable_bytes)
        raise InsufficientMemory(
            f"{number + number_for_drafts} recurrent states need {needed}, and {free} are"
            " available; free memory, or raise kv_cache_memory_bytes"
        )
    return StateBlockCounts(number, number_for_drafts)

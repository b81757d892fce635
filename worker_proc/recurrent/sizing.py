"""How many state blocks there are."""

from typing import NamedTuple

from worker_proc.errors import InsufficientMemory
from worker_proc.kv.kv_tensors import format_sizes

MIN_BLOCKS = 3
"""The null block, a request's own, and one to keep a state in."""


class StateBlockCounts(NamedTuple):
    """Numbers of state blocks."""

    num_blocks: int
    """Those that are announced, the null block included."""
    num_for_drafts: int = 0
    """After these: for the states before drafts."""


def choose_num_state_blocks(
    available_bytes: int,
    block_bytes: int,
    *,
    max_num_seqs: int,
    has_attention: bool,
    num_speculative_tokens: int = 0,
    override: int | None = None,
) -> StateBlockCounts:
    """Decide the numbers of state blocks.

    That is one for each of `max_num_seqs` requests, as many to keep for the prefix cache, and one
    for each draft, but at most half of the memory if attention shares it. With less memory there
    are fewer of both, in the same ratio. An override is the number of those that are announced.
    Blocks of a stage without recurrent layers take no bytes.
    """
    share = available_bytes // 2 if has_attention else available_bytes
    there = available_bytes if override else share
    most, most_for_drafts = 1 + 2 * max_num_seqs, num_speculative_tokens * max_num_seqs
    fitting = most
    if block_bytes:
        fitting = min(most, there // block_bytes * most // (most + most_for_drafts))
    number = override or max(fitting, MIN_BLOCKS)
    number_for_drafts = min(most_for_drafts, number * most_for_drafts // most)
    needed_bytes = (number + number_for_drafts) * block_bytes
    if needed_bytes > there:
        needed, free = format_sizes(needed_bytes, there)
        raise InsufficientMemory(
            f"{number + number_for_drafts} recurrent states need {needed}, and {free} are"
            " available; free memory, or raise kv_cache_memory_bytes"
        )
    return StateBlockCounts(number, number_for_drafts)

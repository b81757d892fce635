"""How many state blocks there are."""

from worker_proc.errors import InsufficientMemory
from worker_proc.kv.kv_tensors import format_sizes

MIN_BLOCKS = 3
"""The null block, a request's own, and one to keep a state in."""


def choose_num_state_blocks(
    available_bytes: int,
    block_bytes: int,
    *,
    max_num_seqs: int,
    has_attention: bool,
    override: int | None = None,
) -> int:
    """Return the number of state blocks, the null block included.

    That is one for each of `max_num_seqs` requests, and as many to keep for the prefix cache, but
    at most half of the memory if attention shares it. An override is the exact number.
    """
    share = available_bytes // 2 if has_attention else available_bytes
    number = override or min(1 + 2 * max_num_seqs, share // block_bytes)
    least = override or MIN_BLOCKS
    there = available_bytes if override else share
    if number < MIN_BLOCKS or least * block_bytes > there:
        needed, free = format_sizes(max(least, MIN_BLOCKS) * block_bytes, there)
        raise InsufficientMemory(
            f"{max(least, MIN_BLOCKS)} recurrent states need {needed}, and {free} are available;"
            " free memory, or raise kv_cache_memory_bytes"
        )
    return number

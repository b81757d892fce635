"""The host's memory for swapped KV blocks and states."""

from typing import NamedTuple

from protocol.model_facts import UNLIMITED_BLOCKS
from worker_proc.errors import InsufficientMemory
from worker_proc.kv.kv_tensors import CacheSize
from worker_proc.loading.host_limits import available_memory


def check_swap_space(num_bytes: int) -> None:
    """Raise InsufficientMemory if the swap space exceeds the free memory."""
    free = available_memory()
    if num_bytes > free:
        raise InsufficientMemory(
            f"swap_space_bytes {num_bytes} is more than the {free} bytes of free memory"
        )


class SwapSpace(NamedTuple):
    """The capacity of the swap space."""

    num_blocks: int = 0
    num_states: int = 0
    state_cost_blocks: float = 0.0
    """Cost of copying a state, in copies of KV blocks. It is 1 without KV blocks, and 0 in a stage
    that has only states or only KV blocks."""


def share_swap_space(
    swap_space_bytes: int,
    block_bytes: int,
    state_bytes: int,
    size: CacheSize,
    *,
    has_attention: bool = True,
    has_states: bool = False,
) -> SwapSpace:
    """Divide the swap space between KV blocks and states in the same ratio as the cache.

    There is then room for a state alongside each request's KV. If blocks or states take no bytes,
    they do not exist, or belong to other stages, which decide how many fit. `has_attention`: some
    stage has KV blocks; `has_states`: some stage has states. Raises InsufficientMemory if the swap
    space exceeds the free memory.
    """
    if not swap_space_bytes:
        return SwapSpace()
    check_swap_space(swap_space_bytes)
    if not state_bytes:
        num_blocks = swap_space_bytes // block_bytes if block_bytes else UNLIMITED_BLOCKS
        return SwapSpace(num_blocks, UNLIMITED_BLOCKS if has_states else 0)
    if not block_bytes and has_attention:
        return SwapSpace(UNLIMITED_BLOCKS, swap_space_bytes // state_bytes)
    if not block_bytes:
        return SwapSpace(0, swap_space_bytes // state_bytes, 1.0)
    all_states, all_blocks = size.num_state_blocks * state_bytes, size.num_blocks * block_bytes
    share = swap_space_bytes * all_states // (all_states + all_blocks)
    num_states = share // state_bytes
    num_blocks = (swap_space_bytes - num_states * state_bytes) // block_bytes
    return SwapSpace(num_blocks, num_states, state_bytes / block_bytes)

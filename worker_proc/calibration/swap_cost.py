"""Measures the cost of copying KV to the host and back, in prompt tokens."""

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from protocol.core_worker import BlockCopies
from worker_proc.attention.interface import AttentionBackend
from worker_proc.calibration.self_check import trial_requests
from worker_proc.forward import attach_cache, compute_logits, state_pool_of
from worker_proc.inputs import pack_step
from worker_proc.kv.kv_groups import KVLayout
from worker_proc.loading.loaded_model import LoadedModel
from worker_proc.request import ScheduledRequest

NUM_COPIED_BLOCKS = 8
NUM_REPEATS = 7
PROMPT_LENGTHS = (32, 256, 256, 256)
"""The first also warms up; the others follow until the budget is used up."""
BUDGET_S = 0.1


def measure_swap_cost(loaded: LoadedModel, backend: AttentionBackend, layout: KVLayout) -> float:
    """Return the number of prompt tokens computed while a block is swapped out and in.

    Replaces the pool. In a model without KV blocks, the cost is that of a state.
    """
    per_group = -(-max(PROMPT_LENGTHS) // layout.block_size)
    num_blocks = 1 + max(per_group * layout.num_tables, NUM_COPIED_BLOCKS)
    pool = attach_cache(
        loaded,
        backend,
        layout,
        num_blocks,
        NUM_COPIED_BLOCKS,
        num_swap_states=0 if layout.groups else NUM_COPIED_BLOCKS,
    )
    states = state_pool_of(loaded.model)
    swap = pool.swap if layout.groups or states is None else states.swap
    copies = BlockCopies(list(range(1, 1 + NUM_COPIED_BLOCKS)), list(range(NUM_COPIED_BLOCKS)))
    block_times = [
        _seconds(partial(swap, copies, copies), loaded.device) / NUM_COPIED_BLOCKS
        for _ in range(NUM_REPEATS)
    ]
    token_time = _seconds_per_token(loaded, backend, layout)
    pool.sleep()  # releases the memory; the backend may still refer to the pool
    return statistics.median(block_times) / token_time


def _seconds_per_token(loaded: LoadedModel, backend: AttentionBackend, layout: KVLayout) -> float:
    def compute(num_tokens: int) -> float:
        [request] = trial_requests(layout, [[0] * num_tokens])
        part = ScheduledRequest(request, 0, num_tokens, True)
        inputs = pack_step([part], loaded.device)
        forward = partial(compute_logits, loaded.model, backend, inputs, loaded.vocab_size)
        return _seconds(forward, loaded.device) / num_tokens

    deadline = time.perf_counter() + BUDGET_S
    last, *lengths = (min(length, loaded.model_len) for length in PROMPT_LENGTHS)
    times = {last: [compute(last)]}
    for num_tokens in lengths:
        if time.perf_counter() + times[last][-1] * num_tokens > deadline:
            break
        times.setdefault(num_tokens, []).append(compute(num_tokens))
        last = num_tokens
    return statistics.median(times[last])


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    began = time.perf_counter()
    work()
    if device.type != "cpu":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began

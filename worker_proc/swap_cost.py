"""Measures what a copy of KV to the host and back costs, in tokens computed instead."""

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from protocol.core_worker import BlockCopies, ModelFacts
from protocol.sampling import SamplingParams
from worker_proc.attention.interface import AttentionBackend
from worker_proc.forward import compute_logits
from worker_proc.inputs import pack_step
from worker_proc.kv_pool import KVPool
from worker_proc.loader import LoadedModel
from worker_proc.mirror import MirroredRequest, ScheduledRequest

NUM_COPIED_BLOCKS = 8
NUM_REPEATS = 5
PROMPT_LENGTHS = (32, 256, 256, 256)
"""The first also warms up; the longer ones follow while there is time for them."""
BUDGET_S = 0.15


def measure_swap_cost(
    loaded: LoadedModel, backend: AttentionBackend, pool: KVPool, facts: ModelFacts
) -> float:
    """Return how many prompt tokens are computed while one block is copied out and in.

    Overwrites the first blocks of the pool. 0 where there is nothing to copy to.
    """
    num_blocks = min(NUM_COPIED_BLOCKS, facts.num_host_blocks, facts.num_gpu_blocks - 1)
    if num_blocks == 0:
        return 0.0
    copies = BlockCopies(list(range(1, 1 + num_blocks)), list(range(num_blocks)))
    block_times = [
        _seconds(partial(pool.swap, copies, copies), loaded.device) / num_blocks
        for _ in range(NUM_REPEATS)
    ]
    return statistics.median(block_times) / _seconds_per_token(loaded, backend, facts)


def _seconds_per_token(loaded: LoadedModel, backend: AttentionBackend, facts: ModelFacts) -> float:
    blocks_per_group = (facts.num_gpu_blocks - 1) // len(facts.kv_groups)
    longest = min(blocks_per_group * facts.block_size, facts.max_model_len - 1)

    def compute(num_tokens: int) -> float:
        part = ScheduledRequest(_request(num_tokens, facts), 0, num_tokens, True)
        inputs = pack_step([part], facts.block_size, loaded.device)
        forward = partial(compute_logits, loaded.model, backend, inputs, loaded.vocab_size)
        return _seconds(forward, loaded.device) / num_tokens

    deadline = time.perf_counter() + BUDGET_S
    last, *lengths = (min(length, longest) for length in PROMPT_LENGTHS)
    times = {last: [compute(last)]}
    for num_tokens in lengths:
        if time.perf_counter() + times[last][-1] * num_tokens > deadline:
            break
        times.setdefault(num_tokens, []).append(compute(num_tokens))
        last = num_tokens
    return statistics.median(times[last])


def _request(num_tokens: int, facts: ModelFacts) -> MirroredRequest:
    num_blocks = -(-num_tokens // facts.block_size)
    tables = [
        list(range(1 + group * num_blocks, 1 + (group + 1) * num_blocks))
        for group in range(len(facts.kv_groups))
    ]
    token_ids = [index % facts.vocab_size for index in range(num_tokens)]
    return MirroredRequest(0, token_ids, num_tokens, SamplingParams(), tables, 0, 0)


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    began = time.perf_counter()
    work()
    if device.type != "cpu":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began

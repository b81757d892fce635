"""Determines the memory for the KV cache."""

import copy
from array import array

import torch

from protocol.config import EngineConfig
from protocol.sampling import SamplingParams
from worker_proc.attention.interface import AttentionBackend
from worker_proc.forward import attach_cache, compute_logits
from worker_proc.inputs import pack_step
from worker_proc.kv.kv_groups import KVLayout
from worker_proc.loading.host_limits import available_memory
from worker_proc.loading.loaded_model import LoadedModel
from worker_proc.request import MirroredRequest, ScheduledRequest
from worker_proc.sampling.sampler import Sampler

DEFAULT_CPU_CACHE_BYTES = 4 * 1024**3
CUDA_MARGIN_BYTES = 1024**3
"""Left free for later allocations: CUDA graphs, and memory that the allocator cannot use."""
CUDA_STEP_BYTES = 128 * 1024**2
"""The size of a cache on CUDA is a multiple of this."""
NUM_TOP_LOGPROBS = 20
_WORST_SAMPLING = SamplingParams(
    temperature=1.0, top_p=0.9, frequency_penalty=0.1, logprobs=NUM_TOP_LOGPROBS
)


def available_cache_bytes(
    loaded: LoadedModel,
    backend: AttentionBackend,
    layout: KVLayout,
    sampler: Sampler,
    config: EngineConfig,
) -> int:
    """Return the bytes for the KV cache, as configured or as measured.

    On the CPU this is 4 GiB, but at most half of the memory available to this process. On CUDA it
    is the configured share of the device, minus the memory of the largest steps, which are computed
    here.
    """
    if config.cache.kv_cache_memory_bytes is not None or loaded.device.type == "cpu":
        return max_cache_bytes(loaded.device, config)
    device, utilization = loaded.device, config.cache.gpu_memory_utilization
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    profile_run(loaded, backend, layout, sampler, config)
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    used_by_others = total - free - torch.cuda.memory_reserved(device)
    peak = torch.cuda.max_memory_allocated(device)
    return whole_steps(int(total * utilization) - used_by_others - peak - CUDA_MARGIN_BYTES)


def whole_steps(num_bytes: int) -> int:
    """Round down the bytes of a cache, so that small differences have no effect.

    A worker that replaces another must have the same number of blocks, although the memory that
    other processes use is never quite the same.
    """
    return max(num_bytes, 0) // CUDA_STEP_BYTES * CUDA_STEP_BYTES


def max_cache_bytes(device: torch.device, config: EngineConfig) -> int:
    """Return the most bytes that the KV cache can have, before the weights are loaded."""
    if config.cache.kv_cache_memory_bytes is not None:
        return config.cache.kv_cache_memory_bytes
    if device.type == "cpu":
        return min(DEFAULT_CPU_CACHE_BYTES, available_memory() // (2 * config.num_workers))
    _, total = torch.cuda.mem_get_info(device)
    return int(total * config.cache.gpu_memory_utilization)


def profile_run(
    loaded: LoadedModel,
    backend: AttentionBackend,
    layout: KVLayout,
    sampler: Sampler,
    config: EngineConfig,
) -> None:
    """Compute the steps that need the most memory, in a block that all parts share.

    One step decodes the maximum number of requests at the end of the longest context, samples each
    in the costliest way, and fills its budget with chunks that also end there. The other computes a
    prompt with the logprobs of all of its tokens.
    """
    longest = min(config.model.max_model_len or loaded.model_len, loaded.model_len)
    num_tokens = config.scheduler.max_num_batched_tokens
    rows_per_request = 1 + config.scheduler.num_speculative_tokens
    num_decodes = min(config.scheduler.max_num_seqs * rows_per_request, num_tokens) - 1
    attach_cache(loaded, backend, layout, 2)
    sizes = [1] * num_decodes
    rest = num_tokens - num_decodes
    while rest > 0:
        sizes.append(min(rest, longest))
        rest -= sizes[-1]
    token_ids = [0] * longest
    tables = [array("i", [1]) * -(-longest // layout.block_size)] * len(layout.groups)

    def part(start: int, end: int, shared: MirroredRequest) -> ScheduledRequest:
        request = copy.copy(shared)  # creating the shared data for each request would take seconds
        request.block_tables = list(tables)
        return ScheduledRequest(request, start, end - start, True)

    sampled = MirroredRequest(0, token_ids, longest, _WORST_SAMPLING, tables, 0, 0)
    parts = [part(longest - size, longest, sampled) for size in sizes]
    inputs = pack_step(parts, loaded.device)
    logits = compute_logits(loaded.model, backend, inputs, loaded.vocab_size)
    sampler.sample(logits, [part.request for part in parts])
    del logits
    size = min(num_tokens, longest)
    params = SamplingParams(prompt_logprobs=NUM_TOP_LOGPROBS)
    described = MirroredRequest(0, token_ids, size, params, tables, 0, 0)
    inputs = pack_step([part(0, size, described)], loaded.device)
    logits = compute_logits(loaded.model, backend, inputs, loaded.vocab_size)
    sampler.prompt_logprobs(logits, [0] * len(logits), NUM_TOP_LOGPROBS)

"""Decides how much memory the KV cache may take."""

from array import array

import torch

from protocol.config import EngineConfig
from protocol.sampling import SamplingParams
from worker_proc.attention.interface import AttentionBackend
from worker_proc.forward import attach_cache, compute_logits
from worker_proc.inputs import pack_step
from worker_proc.kv.kv_groups import KVLayout
from worker_proc.loading.host_limits import available_memory
from worker_proc.loading.loader import LoadedModel
from worker_proc.mirror import MirroredRequest, ScheduledRequest

DEFAULT_CPU_CACHE_BYTES = 4 * 1024**3
CUDA_MARGIN_BYTES = 1024**3
"""Left free for memory that the profiled step does not use: keys and values gathered for a group of
decodes, the masks of a chunk deep in its context, the sampler's temporaries."""


def available_cache_bytes(
    loaded: LoadedModel, backend: AttentionBackend, layout: KVLayout, config: EngineConfig
) -> int:
    """Return the bytes for the KV cache, as configured or as measured.

    On the CPU: 4 GiB, at most half of the memory that is available to this process. On CUDA: the
    configured share of the device less what the largest step needs; that step is computed here.
    """
    if config.cache.kv_cache_memory_bytes is not None:
        return config.cache.kv_cache_memory_bytes
    if loaded.device.type == "cpu":
        return min(DEFAULT_CPU_CACHE_BYTES, available_memory() // 2)
    device, utilization = loaded.device, config.cache.gpu_memory_utilization
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    profile_run(loaded, backend, layout, config)
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    used_by_others = total - free - torch.cuda.memory_reserved(device)
    peak = torch.cuda.max_memory_allocated(device)
    return max(int(total * utilization) - used_by_others - peak - CUDA_MARGIN_BYTES, 0)


def profile_run(
    loaded: LoadedModel, backend: AttentionBackend, layout: KVLayout, config: EngineConfig
) -> None:
    """Compute the largest step, with as many samples as possible, in blocks that parts share."""
    num_tokens = config.scheduler.max_num_batched_tokens
    rows_per_request = 1 + config.scheduler.num_speculative_tokens
    num_requests = min(config.scheduler.max_num_seqs * rows_per_request, num_tokens)
    longest = min(config.model.max_model_len or loaded.model_len, loaded.model_len)
    lengths = [1] * (num_requests - 1)
    rest = num_tokens - len(lengths)
    while rest > 0:
        lengths.append(min(rest, longest))
        rest -= lengths[-1]
    num_blocks = -(-max(lengths) // layout.block_size)
    attach_cache(loaded, backend, layout, 1 + num_blocks)
    tables = [array("i", range(1, 1 + num_blocks))] * len(layout.groups)
    parts = []
    for req_id, length in enumerate(lengths):
        request = MirroredRequest(req_id, [0] * length, length, SamplingParams(), tables, 0, 0)
        parts.append(ScheduledRequest(request, 0, length, True))
    inputs = pack_step(parts, layout.block_size, loaded.device)
    compute_logits(loaded.model, backend, inputs, loaded.vocab_size)

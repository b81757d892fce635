"""Divides the memory for KV and states among a model, its draft model and its adapters."""

import logging

from protocol.config import EngineConfig
from worker_proc.attention.interface import AttentionBackend
from worker_proc.calibration.memory import available_cache_bytes
from worker_proc.drafting.draft_model import num_spare_blocks
from worker_proc.kv import kv_tensors
from worker_proc.kv.kv_groups import KVLayout
from worker_proc.loading.loaded_model import LoadedModel
from worker_proc.loading.prepared import PreparedModel
from worker_proc.recurrent.sizing import StateBlockCounts, choose_num_state_blocks
from worker_proc.recurrent.state_spec import state_bytes
from worker_proc.sampling.sampler import Sampler
from worker_proc.startup.parts import (
    block_bytes_of,
    make_backend,
    make_draft_layout,
    make_sampler,
)

_log = logging.getLogger("troika.worker")


def choose_cache_size(
    prepared: PreparedModel,
    layout: KVLayout,
    backend: AttentionBackend,
    sampler: Sampler,
    config: EngineConfig,
    *,
    logs_sizes: bool,
) -> kv_tensors.CacheSize:
    """Divide the memory for KV between the blocks of the model and those of its draft model."""
    loaded, draft = prepared.loaded, prepared.draft
    if not loaded.is_causal:  # blocks take no memory, so there are always enough
        longest = min(config.model.max_model_len or loaded.model_len, loaded.model_len)
        per_request = layout.num_blocks_for(longest)
        num_blocks = config.cache.num_gpu_blocks_override
        enough = 1 + config.scheduler.max_num_seqs * per_request
        return kv_tensors.CacheSize(num_blocks or enough, longest)
    available_bytes = available_cache_bytes(loaded, backend, layout, sampler, config)
    states, num_draft_model_states = StateBlockCounts(0), 0
    if loaded.has_states:
        states, num_bytes = _size_states(loaded, available_bytes, config, logs_sizes=logs_sizes)
        available_bytes -= num_bytes
    block_bytes = block_bytes_of(loaded, layout)
    if prepared.adapters is not None:
        available_bytes -= prepared.adapters.max_bytes
    if draft is not None:
        draft_layout = make_draft_layout(draft, config)
        draft_block_bytes = block_bytes_of(draft, draft_layout)
        draft_bytes = _available_to_draft(prepared, draft, draft_layout, config)
        available_bytes = min(available_bytes, draft_bytes)
        num_draft_model_states, num_bytes = _size_draft_model_states(
            draft, available_bytes, config, states, logs_sizes=logs_sizes
        )
        available_bytes -= num_bytes
        available_bytes -= num_all_spare_blocks(config) * draft_block_bytes
        block_bytes += draft_block_bytes
    size = kv_tensors.size_cache(
        available_bytes=available_bytes,
        block_bytes=block_bytes,
        layout=layout,
        model_len=loaded.model_len,
        max_model_len=config.model.max_model_len,
        num_blocks_override=config.cache.num_gpu_blocks_override,
    )
    is_shortened = config.model.max_model_len is None and size.max_model_len < loaded.model_len
    if logs_sizes and is_shortened:
        _log.warning(
            "max_model_len is %d instead of the model's %d: the KV cache holds no more",
            size.max_model_len,
            loaded.model_len,
        )
    return size._replace(
        num_state_blocks=states.num_blocks,
        num_draft_states=states.num_for_drafts,
        num_draft_model_states=num_draft_model_states,
    )


def _available_to_draft(
    prepared: PreparedModel, draft: LoadedModel, layout: KVLayout, config: EngineConfig
) -> int:
    """Return the bytes available for caches after the draft model's working memory."""
    backend = make_backend(draft, layout, prepared.kernels)
    return available_cache_bytes(
        draft, backend, layout, make_sampler(draft, prepared.kernels), config
    )


def _size_states(
    loaded: LoadedModel, available_bytes: int, config: EngineConfig, *, logs_sizes: bool
) -> tuple[StateBlockCounts, int]:
    """Return the numbers of state blocks, and the bytes that they take."""
    block_bytes = state_bytes(loaded.recurrent, loaded.dtype)
    counts = choose_num_state_blocks(
        available_bytes,
        block_bytes,
        max_num_seqs=config.scheduler.max_num_seqs,
        has_attention=bool(loaded.layers),
        num_speculative_tokens=config.scheduler.num_speculative_tokens,
        override=config.cache.num_state_blocks_override,
    )
    number = sum(counts)
    if logs_sizes and block_bytes:
        one, all_of_them = kv_tensors.format_sizes(block_bytes, number * block_bytes)
        _log.info("recurrent states: %s for each request, %s for %d", one, all_of_them, number - 1)
    if logs_sizes and block_bytes and counts.num_for_drafts:
        _log.info("%d of these states are for drafts", counts.num_for_drafts)
    return counts, number * block_bytes


def _size_draft_model_states(
    draft: LoadedModel,
    available_bytes: int,
    config: EngineConfig,
    states: StateBlockCounts,
    *,
    logs_sizes: bool,
) -> tuple[int, int]:
    """Return the number of a draft model's state blocks, and the bytes that they take.

    `states` are those of the model, each of whose requests may have drafts.
    """
    block_bytes = state_bytes(draft.recurrent, draft.dtype)
    if not block_bytes:
        return 0, 0
    scheduler = config.scheduler
    num_requests = scheduler.max_num_seqs
    if states.num_blocks:
        num_requests = min(num_requests, states.num_blocks - 1)
    number = sum(
        choose_num_state_blocks(
            available_bytes,
            block_bytes,
            max_num_seqs=num_requests,
            has_attention=True,  # the model's attention, with whose KV it shares the memory
            num_speculative_tokens=scheduler.num_speculative_tokens - 1,
        )
    )
    if logs_sizes:
        one, all_of_them = kv_tensors.format_sizes(block_bytes, number * block_bytes)
        _log.info(
            "recurrent states of the draft model: %s each, %s for %d", one, all_of_them, number - 1
        )
    return number, number * block_bytes


def num_all_spare_blocks(config: EngineConfig) -> int:
    """Return the number of the draft model's blocks beyond the model's, for all requests."""
    scheduler = config.scheduler
    per_request = num_spare_blocks(config.cache.block_size, scheduler.num_speculative_tokens)
    return scheduler.max_num_seqs * per_request

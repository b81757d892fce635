"""Makes a runner of a configured checkpoint."""

import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch

from protocol.config import EngineConfig
from protocol.core_worker import ModelFacts
from protocol.process.run_dir import make_run_dir
from worker_proc.attention.interface import AttentionBackend
from worker_proc.calibration.memory import available_cache_bytes
from worker_proc.decoder.install import install
from worker_proc.drafting.draft_model import DraftModel, num_spare_blocks
from worker_proc.drafting.draft_model_states import DraftModelStates
from worker_proc.errors import UnsupportedModel
from worker_proc.forward import attach_cache, state_pool_of
from worker_proc.kv import kv_tensors
from worker_proc.kv.kv_groups import KVLayout
from worker_proc.kv.kv_pool import KVPool
from worker_proc.loading.checkpoint_identity import checkpoint_identity
from worker_proc.loading.draft import describe_speculation, group_without_window
from worker_proc.loading.host_limits import available_cpus
from worker_proc.loading.loader import LoadedModel
from worker_proc.loading.model_kind import ModelKind
from worker_proc.loading.prepared import PreparedModel
from worker_proc.model_runner import ModelRunner
from worker_proc.offload.drafts import DraftBlocks
from worker_proc.offload.layout import describe_draft, num_slots, num_state_slots, with_layout
from worker_proc.offload.memory import BlockMemory, NoMemory
from worker_proc.offload.staging import PoolMemory
from worker_proc.parallel.adoption import TIMEOUT_S, Adoption
from worker_proc.parallel.connect import connect
from worker_proc.parallel.exchange import RankExchange
from worker_proc.parallel.pipe import PipeSize, StagePipe
from worker_proc.parallel.shared_drafts import SharedDrafts
from worker_proc.parallel.stage_part import StagePart
from worker_proc.parallel.stage_runner import StageRunner
from worker_proc.parallel.stages import hidden_size, places
from worker_proc.parallel.step_results import max_words
from worker_proc.recurrent.sizing import StateBlockCounts, choose_num_state_blocks
from worker_proc.recurrent.state_spec import state_bytes
from worker_proc.runner import ReportProgress, Runner
from worker_proc.sampling.sampler import Sampler
from worker_proc.startup.build import describe_build, kernels_of
from worker_proc.startup.calibrate import Calibration, calibrate
from worker_proc.startup.cpu_pinning import is_confined
from worker_proc.startup.parts import (
    block_bytes_of,
    make_backend,
    make_device_sampler,
    make_draft_layout,
    make_graphs,
    make_layout,
    make_sampler,
    share_swap_space,
)
from worker_proc.startup.prepare import describe_codes, prepare_model

_log = logging.getLogger("troika.worker")


def load_model_runner(
    config: EngineConfig, progress: ReportProgress, *, keeps_proofs: bool = False, rank: int = 0
) -> Runner:
    """Load the configured checkpoint and size its KV cache; see worker_proc/errors.py.

    With `keeps_proofs`, what is proven here is not proven again at the next start.
    """
    torch.set_num_threads(num_threads(config))
    prepared = prepare_model(config, progress, keeps_proofs=keeps_proofs, rank=rank)
    calibration = calibrate(prepared, config, progress)
    return build_runner(prepared, config, calibration, progress, rank=rank)


def num_threads(config: EngineConfig) -> int:
    """Return how many threads compute: as configured, else this worker's share of the CPUs."""
    num_workers = 1 if is_confined() else config.num_workers
    return config.worker.num_threads or max(1, available_cpus() // num_workers)


def build_runner(
    prepared: PreparedModel,
    config: EngineConfig,
    calibration: Calibration,
    progress: ReportProgress,
    *,
    rank: int = 0,
    logs_sizes: bool = True,
) -> Runner:
    """Size and allocate the KV cache of a loaded and checked model, and connect the two.

    A fork passes `logs_sizes=False`: its sizes were logged by the process that chose them.
    """
    loaded = prepared.loaded
    progress("allocate_cache", 0, 1)
    layout = make_layout(loaded, config)
    backend = make_backend(loaded, layout, prepared.kernels, config.worker)
    sampler = make_sampler(loaded, prepared.kernels)
    if prepared.adapters is not None:
        calibration.adapters.apply(prepared.adapters.sites)
    size = _size_cache(prepared, layout, backend, sampler, config, logs_sizes=logs_sizes)
    facts = _facts_of(prepared, config, calibration, layout, size)
    cache = _allocate_cache(
        prepared, config, layout, backend, facts, num_draft_states=size.num_draft_states
    )
    stack = install(prepared, calibration.decoder, is_whole=calibration.is_whole)
    row_dtype = getattr(torch, calibration.row_dtype or cache.facts.dtype)
    exchange, part = _join_ranks(prepared, config, rank, row_dtype, size.num_draft_states)
    if exchange is not None:
        connect(loaded, stack, exchange)
    if part is not None and not part.pipe.stage.is_last:
        progress("allocate_cache", 1, 1)
        return StageRunner(
            loaded,
            cache.facts,
            backend,
            cache.pool,
            part,
            swap_cost_tokens=calibration.swap_cost_tokens,
            num_speculative_tokens=config.scheduler.num_speculative_tokens,
            grammars=prepared.grammars,
            adapters=prepared.adapters,
            num_draft_states=size.num_draft_states,
            exchange=exchange,
            block_memory=cache.block_memory,
            state_memory=cache.state_memory,
        )
    device_sampler = make_device_sampler(loaded, backend, config)
    graphs = make_graphs(loaded, backend, device_sampler, cache.facts, config)
    draft_model, draft_blocks = _build_draft_model(
        prepared, config, calibration, cache.facts, num_states=size.num_draft_model_states
    )
    progress("allocate_cache", 1, 1)
    return ModelRunner(
        loaded,
        cache.facts,
        backend,
        cache.pool,
        sampler,
        swap_cost_tokens=calibration.swap_cost_tokens,
        num_speculative_tokens=config.scheduler.num_speculative_tokens,
        draft_model=draft_model,
        grammars=prepared.grammars,
        device_sampler=device_sampler,
        graphs=graphs,
        adapters=prepared.adapters,
        num_draft_states=size.num_draft_states,
        exchange=exchange,
        stage=part,
        block_memory=cache.block_memory,
        state_memory=cache.state_memory,
        draft_blocks=draft_blocks,
        shared_drafts=_share_drafts(config, exchange),
    )


class _Cache(NamedTuple):
    """The allocated KV cache and recurrent states, and the facts that describe them."""

    facts: ModelFacts
    pool: KVPool
    block_memory: BlockMemory | None
    state_memory: BlockMemory | None
    """Both as stores see them, if blocks are kept there."""


def _allocate_cache(
    prepared: PreparedModel,
    config: EngineConfig,
    layout: KVLayout,
    backend: AttentionBackend,
    facts: ModelFacts,
    *,
    num_draft_states: int,
) -> _Cache:
    """Allocate the blocks and states that the facts announce, and add their layout to the facts."""
    loaded = prepared.loaded
    pool = attach_cache(
        loaded,
        backend,
        layout,
        facts.num_gpu_blocks,
        facts.num_host_blocks,
        num_state_blocks=facts.num_state_blocks + num_draft_states,
        num_swap_states=facts.num_host_state_blocks,
    )
    kernels = f"{backend.name} {kernels_of(prepared)}"
    division = "" if prepared.stage is None else prepared.stage.division
    states = state_pool_of(loaded.model)
    state_tensors = [] if states is None else states.all_tensors
    facts = with_layout(
        facts, config, pool.all_tensors, kernels, division=division, states=state_tensors
    )
    block_memory = state_memory = None
    if facts.kv_layout:
        block_memory = _block_memory(config, facts, pool, block_bytes_of(loaded, layout))
    if facts.kv_layout and states is not None:
        state_memory = _state_memory(loaded, pool, state_tensors)
    return _Cache(facts, pool, block_memory, state_memory)


def _block_memory(
    config: EngineConfig, facts: ModelFacts, pool: KVPool, block_bytes: int
) -> BlockMemory:
    """Return the pool's blocks as stores see them; a model without attention has none."""
    if not pool.all_tensors:
        return NoMemory(num_slots(config, facts, 0))
    return PoolMemory(pool, num_slots(config, facts, block_bytes))


def _state_memory(
    loaded: LoadedModel, pool: KVPool, tensors: Sequence[torch.Tensor]
) -> BlockMemory:
    """Return the states as stores see them; a stage without recurrent layers has none."""
    number = num_state_slots(state_bytes(loaded.recurrent, loaded.dtype))
    return PoolMemory(pool, number, tensors) if tensors else NoMemory(number)


def _join_ranks(
    prepared: PreparedModel,
    config: EngineConfig,
    rank: int,
    row_dtype: torch.dtype,
    num_draft_states: int,
) -> tuple[RankExchange | None, StagePart | None]:
    """Return what exchanges sums with the ranks of a stage, and what joins it to other stages.

    `row_dtype` is the type of the rows that stages pass on, and `num_draft_states` the number of
    this rank.
    """
    parallel, library = config.parallel, prepared.kernels
    if parallel.num_ranks == 1:
        return None, None
    if library is None:
        raise UnsupportedModel(f"a model in {parallel.num_ranks} ranks needs the compiled kernels")
    stage, share = places(rank, parallel)
    # The last stage waits while each before it may compute a step of a new size.
    timeout_s = stage.num_stages * max(TIMEOUT_S, config.recovery.first_step_timeout_s)
    run_dir = make_run_dir(config.run.run_dir)
    adoption = Adoption(rank, parallel.num_ranks, run_dir, timeout_s=timeout_s)
    exchange = RankExchange(library, adoption, share) if share.num_ranks > 1 else None
    if prepared.stage is None:
        return exchange, None
    scheduler, loaded = config.scheduler, prepared.loaded
    size = PipeSize(
        num_rows=scheduler.max_num_batched_tokens,
        row_bytes=hidden_size(loaded.model) * row_dtype.itemsize,
        num_words=max_words(scheduler.max_num_seqs + 1, scheduler.num_speculative_tokens),
        num_steps=max(scheduler.max_steps_in_flight, stage.num_stages),
    )
    pipe = StagePipe(library, adoption, stage, share, size, num_draft_states=num_draft_states)
    return exchange, StagePart(loaded, prepared.stage, pipe, row_dtype)


def _size_cache(
    prepared: PreparedModel,
    layout: KVLayout,
    backend: AttentionBackend,
    sampler: Sampler,
    config: EngineConfig,
    *,
    logs_sizes: bool,
) -> kv_tensors.CacheSize:
    """Share the memory for KV among the blocks of the model and those of its draft model."""
    loaded, draft = prepared.loaded, prepared.draft
    if not loaded.is_causal:  # blocks take no memory: there are enough of them
        longest = min(config.model.max_model_len or loaded.model_len, loaded.model_len)
        per_request = layout.num_blocks_for(longest)
        num_blocks = config.cache.num_gpu_blocks_override
        most = 1 + config.scheduler.max_num_seqs * per_request
        return kv_tensors.CacheSize(num_blocks or most, longest)
    available_bytes = available_cache_bytes(loaded, backend, layout, sampler, config)
    states, num_draft_model_states = StateBlockCounts(0), 0
    if loaded.has_states:
        states, num_bytes = _size_states(loaded, available_bytes, config, logs_sizes=logs_sizes)
        available_bytes -= num_bytes
    block_bytes = block_bytes_of(loaded, layout)
    if prepared.adapters is not None:
        available_bytes -= prepared.adapters.most_bytes
    if draft is not None:
        draft_layout = make_draft_layout(draft, config)
        draft_backend = make_backend(draft, draft_layout, prepared.kernels)
        draft_sampler = make_sampler(draft, prepared.kernels)
        draft_bytes = available_cache_bytes(
            draft, draft_backend, draft_layout, draft_sampler, config
        )
        draft_block_bytes = block_bytes_of(draft, draft_layout)
        available_bytes = min(available_bytes, draft_bytes)
        num_draft_model_states, num_bytes = _size_draft_model_states(
            draft, available_bytes, config, states, logs_sizes=logs_sizes
        )
        available_bytes -= num_bytes
        available_bytes -= _num_all_spare_blocks(config) * draft_block_bytes
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
            has_attention=True,  # of the model, with which its KV shares the memory
            num_speculative_tokens=scheduler.num_speculative_tokens - 1,
        )
    )
    if logs_sizes:
        one, all_of_them = kv_tensors.format_sizes(block_bytes, number * block_bytes)
        _log.info(
            "recurrent states of the draft model: %s each, %s for %d", one, all_of_them, number - 1
        )
    return number, number * block_bytes


def _facts_of(
    prepared: PreparedModel,
    config: EngineConfig,
    calibration: Calibration,
    layout: KVLayout,
    size: kv_tensors.CacheSize,
) -> ModelFacts:
    loaded, exactness = prepared.loaded, calibration.exactness
    head = loaded.head
    num_labels = head.num_outputs if head and loaded.kind is ModelKind.CLASSIFIES else 0
    swap = share_swap_space(
        config.cache.swap_space_bytes,
        block_bytes_of(loaded, layout),
        state_bytes(loaded.recurrent, loaded.dtype),
        size,
        has_attention=loaded.has_attention,
        has_states=loaded.has_states,
    )
    return ModelFacts(
        model=config.model.model,
        vocab_size=loaded.vocab_size,
        max_model_len=size.max_model_len,
        block_size=layout.block_size,
        num_gpu_blocks=size.num_blocks,
        eos_token_ids=loaded.eos_token_ids,
        dtype=str(loaded.dtype).removeprefix("torch."),
        device=loaded.device.type,
        kv_groups=layout.kv_groups(),
        num_host_blocks=swap.num_blocks,
        exact_resume=exactness.holds,
        exact_resume_reason=exactness.reason,
        embedding_size=calibration.embedding_size if head is None else head.num_outputs,
        decoder=prepared.executor.name if prepared.executor and calibration.decoder else "modules",
        speculation=describe_speculation(config),
        quantization=describe_codes(loaded, config.model.quantization),
        kv_cache_dtype=layout.format.config_name,
        generates=loaded.kind is ModelKind.GENERATES,
        computes_whole_prompts=not loaded.is_causal,
        num_labels=num_labels,
        default_pooling=loaded.pooling,
        num_state_blocks=size.num_state_blocks,
        num_host_state_blocks=swap.num_states,
        state_swap_blocks=swap.state_cost_blocks,
        checkpoint=prepared.checkpoint,
        build=describe_build(prepared, config),
        kernels=kernels_of(prepared) if exactness.holds else "",
    )


def _build_draft_model(
    prepared: PreparedModel,
    config: EngineConfig,
    calibration: Calibration,
    facts: ModelFacts,
    *,
    num_states: int,
) -> tuple[DraftModel | None, DraftBlocks | None]:
    """Allocate the draft model's KV cache, for the blocks of the model and some spare ones.

    `num_states` is the number of its state blocks, if it has recurrent layers.

    Also returns its blocks as stores see them, if blocks are kept there.
    """
    if prepared.draft is None:
        return None, None
    own = prepared.of_draft(prepared.draft)
    loaded = own.loaded
    layout = make_draft_layout(loaded, config)
    backend = make_backend(loaded, layout, own.kernels)
    num_blocks = facts.num_gpu_blocks + _num_all_spare_blocks(config)
    pool = attach_cache(loaded, backend, layout, num_blocks, num_state_blocks=num_states)
    install(own, calibration.draft_decoder, is_whole=calibration.draft_is_whole)
    group = group_without_window(facts.kv_groups)
    states = None
    if loaded.has_states:
        cache, block_size = config.cache, facts.block_size
        spacing = cache.snapshot_spacing(block_size) if cache.enable_prefix_caching else None
        states = DraftModelStates(num_states, block_size, spacing)
    draft_model = DraftModel(
        loaded,
        backend,
        pool,
        make_sampler(loaded, own.kernels, facts),
        facts,
        group=group,
        num_spare=_num_all_spare_blocks(config) // config.scheduler.max_num_seqs,
        max_tokens=config.scheduler.max_num_batched_tokens,
        states=states,
    )
    if not facts.kv_layout:
        return draft_model, None
    if loaded.has_states:
        none = NoMemory(num_slots(config, facts, 0))
        return draft_model, DraftBlocks(none, draft_model, group, None)
    memory = PoolMemory(pool, num_slots(config, facts, block_bytes_of(loaded, layout)))
    path = str(config.model.speculative_model)
    name = describe_draft(checkpoint_identity(path) or path, backend.name, pool.all_tensors)
    return draft_model, DraftBlocks(memory, draft_model, group, name)


def _share_drafts(config: EngineConfig, exchange: RankExchange | None) -> SharedDrafts | None:
    """Return what gives the drafts of the draft model to all ranks, if several sample."""
    if exchange is None or config.model.speculative_model is None:
        return None
    return SharedDrafts(exchange, config.scheduler.num_speculative_tokens)


def _num_all_spare_blocks(config: EngineConfig) -> int:
    """Return the draft model's blocks beyond those of the model, for all requests."""
    scheduler = config.scheduler
    per_request = num_spare_blocks(config.cache.block_size, scheduler.num_speculative_tokens)
    return scheduler.max_num_seqs * per_request

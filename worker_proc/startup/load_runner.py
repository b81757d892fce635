"""Creates the runner of a configured checkpoint."""

from collections.abc import Sequence

import torch

from protocol.config import EngineConfig
from protocol.model_facts import ModelFacts
from protocol.process.run_dir import make_run_dir
from worker_proc.decoder.install import install
from worker_proc.errors import UnsupportedModel
from worker_proc.forward import attach_cache, state_pool_of
from worker_proc.kv.kv_pool import KVPool
from worker_proc.kv.kv_tensors import CacheSize
from worker_proc.loading.host_limits import available_cpus
from worker_proc.loading.loaded_model import LoadedModel
from worker_proc.loading.model_with_cache import ModelWithCache
from worker_proc.loading.prepared import PreparedModel
from worker_proc.model_runner import ModelRunner
from worker_proc.native.kernels import load_library
from worker_proc.offload.layout import with_layout
from worker_proc.offload.memory import BlockMemory, NoMemory
from worker_proc.offload.slots import num_slots, num_state_slots
from worker_proc.offload.staging import PoolMemory
from worker_proc.parallel.adoption import TIMEOUT_S, Adoption
from worker_proc.parallel.connect import connect
from worker_proc.parallel.exchange import RankExchange
from worker_proc.parallel.pipe import PipeSize, StagePipe
from worker_proc.parallel.shared_drafts import SharedDrafts
from worker_proc.parallel.stage import places
from worker_proc.parallel.stage_part import StagePart
from worker_proc.parallel.stage_runner import StageRunner
from worker_proc.parallel.step_results import max_words
from worker_proc.recurrent.state_spec import state_bytes
from worker_proc.runner import ReportProgress, Runner
from worker_proc.sampling.sampler import Sampler
from worker_proc.startup.build import kernels_of
from worker_proc.startup.cache_size import choose_cache_size
from worker_proc.startup.calibrate import Calibration, calibrate
from worker_proc.startup.cpu_pinning import is_confined
from worker_proc.startup.draft_parts import build_draft_model
from worker_proc.startup.model_facts import facts_of
from worker_proc.startup.parts import (
    block_bytes_of,
    make_backend,
    make_layout,
    make_rank_group,
    make_sampler,
    make_steps_ahead,
)
from worker_proc.startup.prepare import prepare_model


def load_model_runner(
    config: EngineConfig, progress: ReportProgress, *, keeps_proofs: bool = False, rank: int = 0
) -> Runner:
    """Load the configured checkpoint and size its KV cache; see worker_proc/errors.py for errors.

    With `keeps_proofs`, the proofs of this start are stored for the next one.
    """
    torch.set_num_threads(num_threads(config))
    prepared = prepare_model(config, progress, keeps_proofs=keeps_proofs, rank=rank)
    calibration = calibrate(prepared, config, progress)
    return build_runner(prepared, config, calibration, progress, rank=rank)


def num_threads(config: EngineConfig) -> int:
    """Return the number of computing threads: as configured, or this worker's share of the CPUs."""
    num_workers = 1 if is_confined() else config.num_workers
    return config.worker.num_threads or max(1, available_cpus() // num_workers)


def find_facts(
    prepared: PreparedModel, config: EngineConfig, calibration: Calibration
) -> ModelFacts:
    """Return the facts of a loaded and checked model's runner; its cache is allocated once."""
    _apply_adapters(prepared, calibration)
    sampler = make_sampler(prepared.loaded, prepared.kernels)
    model, _ = _with_cache(prepared, config, calibration, sampler, logs_sizes=True)
    return model.facts


def build_runner(
    prepared: PreparedModel,
    config: EngineConfig,
    calibration: Calibration,
    progress: ReportProgress,
    *,
    rank: int = 0,
    logs_sizes: bool = True,
) -> Runner:
    """Size and allocate the KV cache of a loaded and checked model, and create its runner.

    A fork passes `logs_sizes=False`: its sizes were logged by the process that chose them.
    """
    progress("allocate_cache", 0, 1)
    _apply_adapters(prepared, calibration)
    sampler = make_sampler(prepared.loaded, prepared.kernels)
    model, size = _with_cache(prepared, config, calibration, sampler, logs_sizes=logs_sizes)
    stack = install(prepared, calibration.decoder, is_whole=calibration.is_whole)
    row_dtype = getattr(torch, calibration.row_dtype or model.facts.dtype)
    exchange, part = _join_ranks(prepared, config, rank, row_dtype, size.num_draft_states)
    if exchange is not None:
        connect(model.loaded, stack, exchange)
    runner: Runner
    if part is not None and not part.pipe.stage.is_last:
        runner = StageRunner(model, part, exchange)
    else:
        group = None if exchange is None else exchange.group
        ahead = make_steps_ahead(model.loaded, model.backend, model.facts, config, group)
        if ahead is not None and ahead.graphs is not None and exchange is None:
            ahead.graphs.capture()  # ranks are not connected before a step
        draft_model, draft_blocks = build_draft_model(
            prepared, config, calibration, model.facts, num_states=size.num_draft_model_states
        )
        runner = ModelRunner(
            model,
            sampler,
            draft_model=draft_model,
            draft_blocks=draft_blocks,
            shared_drafts=_share_drafts(config, exchange),
            steps_ahead=ahead,
            exchange=exchange,
            stage=part,
        )
    progress("allocate_cache", 1, 1)
    return runner


def _apply_adapters(prepared: PreparedModel, calibration: Calibration) -> None:
    if prepared.adapters is not None:
        calibration.adapters.apply(prepared.adapters.sites)


def _with_cache(
    prepared: PreparedModel,
    config: EngineConfig,
    calibration: Calibration,
    sampler: Sampler,
    *,
    logs_sizes: bool,
) -> tuple[ModelWithCache, CacheSize]:
    """Size and allocate the blocks and states of a model, and attach it to them."""
    loaded = prepared.loaded
    layout = make_layout(loaded, config)
    backend = make_backend(loaded, layout, prepared.kernels, config.worker)
    size = choose_cache_size(prepared, layout, backend, sampler, config, logs_sizes=logs_sizes)
    facts = facts_of(prepared, config, calibration, layout, size)
    pool = attach_cache(
        loaded,
        backend,
        layout,
        facts.num_gpu_blocks,
        facts.num_host_blocks,
        num_state_blocks=facts.num_state_blocks + size.num_draft_states,
        num_swap_states=facts.num_host_state_blocks,
    )
    kernels = f"{backend.name} {kernels_of(prepared)}"
    division = "" if prepared.stage is None else prepared.stage.division
    states = state_pool_of(loaded.model)
    state_tensors = [] if states is None else states.all_tensors
    facts = with_layout(
        facts,
        config,
        pool.all_tensors,
        kernels,
        division=division,
        states=state_tensors,
        places=layout.places,
    )
    block_memory = state_memory = None
    if facts.kv_layout:
        block_memory = _block_memory(config, facts, pool, block_bytes_of(loaded, layout))
    if facts.kv_layout and states is not None:
        state_memory = _state_memory(loaded, pool, state_tensors)
    model = ModelWithCache(
        loaded,
        facts,
        backend,
        pool,
        calibration.swap_cost_tokens,
        config.scheduler.num_speculative_tokens,
        size.num_draft_states,
        prepared.grammars,
        prepared.adapters,
        block_memory,
        state_memory,
    )
    return model, size


def _block_memory(
    config: EngineConfig, facts: ModelFacts, pool: KVPool, block_bytes: int
) -> BlockMemory:
    """Return the pool's blocks in the form that stores use; a model without attention has none."""
    if not pool.all_tensors:
        return NoMemory(num_slots(config, facts, 0))
    return PoolMemory(pool, num_slots(config, facts, block_bytes))


def _state_memory(
    loaded: LoadedModel, pool: KVPool, tensors: Sequence[torch.Tensor]
) -> BlockMemory:
    """Return the states in the form that stores use; a stage without recurrent layers has none."""
    number = num_state_slots(state_bytes(loaded.recurrent, loaded.dtype))
    return PoolMemory(pool, number, tensors) if tensors else NoMemory(number)


def _join_ranks(
    prepared: PreparedModel,
    config: EngineConfig,
    rank: int,
    row_dtype: torch.dtype,
    num_draft_states: int,
) -> tuple[RankExchange | None, StagePart | None]:
    """Return the exchange among the ranks of a stage, and the link to other stages.

    `row_dtype` is the dtype of the rows that stages pass on; `num_draft_states` is this rank's
    number.
    """
    parallel = config.parallel
    if parallel.num_ranks == 1:
        return None, None
    library = prepared.kernels or load_library()
    if library is None:
        raise UnsupportedModel(f"a model in {parallel.num_ranks} ranks needs the compiled kernels")
    stage, share = places(rank, parallel)
    # The last stage waits while each previous one may compute a step of a new size.
    timeout_s = stage.num_stages * max(TIMEOUT_S, config.recovery.first_step_timeout_s)
    run_dir = make_run_dir(config.run.run_dir)
    adoption = Adoption(rank, parallel.num_ranks, run_dir, timeout_s=timeout_s)
    exchange = None
    if share.num_ranks > 1:
        group = make_rank_group(prepared.loaded, share, timeout_s)
        exchange = RankExchange(library, adoption, share, group=group)
    if prepared.stage is None:
        return exchange, None
    scheduler, passages = config.scheduler, prepared.stage
    size = PipeSize(
        num_rows=scheduler.max_num_batched_tokens,
        row_bytes=passages.row_width * row_dtype.itemsize,
        num_words=max_words(scheduler.max_num_seqs + 1, scheduler.num_speculative_tokens),
        num_steps=max(scheduler.max_steps_in_flight, stage.num_stages),
    )
    pipe = StagePipe(library, adoption, stage, share, size, num_draft_states=num_draft_states)
    return exchange, StagePart(passages, pipe, row_dtype)


def _share_drafts(config: EngineConfig, exchange: RankExchange | None) -> SharedDrafts | None:
    """Return the exchange that gives drafts to all ranks, if several ranks sample."""
    if exchange is None or config.model.speculative_model is None:
        return None
    return SharedDrafts(exchange, config.scheduler.num_speculative_tokens)

"""Loads a model once for several processes, which are all forked from the first.

Everything here runs in one thread: OpenMP's pool does not survive a fork, and the child of a
process that has used it would hang. The weights are never written again: their pages stay shared.
"""

import msgspec
import torch

from protocol.config import EngineConfig
from worker_proc.calibration.self_check import num_blocks_needed
from worker_proc.forward import attach_cache
from worker_proc.kv.kv_groups import KVLayout
from worker_proc.loading.host_limits import available_cpus
from worker_proc.model_runner import (
    ModelRunner,
    PreparedModel,
    build_runner,
    make_backend,
    make_layout,
    prepare_model,
    resolve_device,
)
from worker_proc.runner import ReportProgress, RunnerFactory


def load_shared_model(config: EngineConfig, progress: ReportProgress) -> RunnerFactory:
    """Load, pack and check the model, and return the function that makes a runner in a fork.

    Every runner gets the number of KV blocks that was found here. A later process finds less free
    memory, and with other facts the core would have to start anew.
    """
    if resolve_device(config.model.device).type != "cpu":
        raise ValueError("standby_workers needs device cpu: no other device survives a fork")
    torch.set_num_threads(1)
    prepared = prepare_model(config, progress)
    trial = build_runner(prepared, config, progress)  # also loads what the first forward loads
    num_blocks = trial.facts.num_gpu_blocks
    _shrink_cache(prepared, make_layout(prepared.loaded, config))
    cache = msgspec.structs.replace(config.cache, num_gpu_blocks_override=num_blocks)
    forked_config = msgspec.structs.replace(config, cache=cache)

    def make(progress: ReportProgress) -> ModelRunner:
        torch.set_num_threads(config.worker.num_threads or available_cpus())
        return build_runner(prepared, forked_config, progress)

    return make


def _shrink_cache(prepared: PreparedModel, layout: KVLayout) -> None:
    """Replace the cache by a minimal one: forks allocate their own, and address space may count."""
    backend = make_backend(prepared.loaded, layout, prepared.kernels)
    attach_cache(prepared.loaded, backend, layout, num_blocks_needed(layout))

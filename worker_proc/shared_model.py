"""A model that is loaded once and computed by several processes, all forked from the first.

Everything here runs in one thread: OpenMP's pool does not survive a fork, and a process that has
used it would hang in its child. The weights are never written again, so their pages stay shared.
"""

import os

import msgspec
import torch

from protocol.config import EngineConfig
from worker_proc.forward import attach_cache
from worker_proc.kv_groups import KVLayout
from worker_proc.model_runner import (
    ModelRunner,
    PreparedModel,
    build_runner,
    make_backend,
    make_layout,
    prepare_model,
    resolve_device,
)
from worker_proc.runner import MakeRunner, Progress
from worker_proc.self_check import num_blocks_needed


def load_shared_model(config: EngineConfig, progress: Progress) -> MakeRunner:
    """Load, pack and check the model; what is returned makes a runner of it in a forked process.

    Every runner gets as many KV blocks as there was memory for here: one that comes later finds
    less, and the core would have to begin anew with other facts.

    Raises:
        ValueError: as `load_model_runner`; and for a device that is not the CPU.
    """
    if resolve_device(config.model.device).type != "cpu":
        raise ValueError("standby_workers needs device cpu: no other device survives a fork")
    torch.set_num_threads(1)
    prepared = prepare_model(config, progress)
    trial = build_runner(prepared, config, progress)  # loads what the first forward loads, too
    num_blocks = trial.facts.num_gpu_blocks
    _shrink_cache(prepared, make_layout(prepared.loaded, config))
    cache = msgspec.structs.replace(config.cache, num_gpu_blocks_override=num_blocks)
    forked_config = msgspec.structs.replace(config, cache=cache)

    def make(progress: Progress) -> ModelRunner:
        torch.set_num_threads(config.worker.num_threads or len(os.sched_getaffinity(0)))
        return build_runner(prepared, forked_config, progress)

    return make


def _shrink_cache(prepared: PreparedModel, layout: KVLayout) -> None:
    """A forked process brings its own; address space counts where memory is not overcommitted."""
    backend = make_backend(prepared.loaded, layout, prepared.kernels)
    attach_cache(prepared.loaded, backend, layout, num_blocks_needed(layout))

"""Loads a model once for several processes, which are all forked from the first.

Everything here runs in one thread: OpenMP's pool does not survive a fork, and the child of a
process that has used it would hang. The weights are never written again, so their pages stay
shared.
"""

import mmap

import msgspec
import torch

from protocol.config import EngineConfig
from worker_proc.calibration.self_check import num_blocks_needed
from worker_proc.cuda.device import resolve_device
from worker_proc.forward import attach_cache
from worker_proc.kv.kv_groups import KVLayout
from worker_proc.loading.prepared import PreparedModel
from worker_proc.runner import ReportProgress, Runner, RunnerFactory
from worker_proc.startup.calibrate import Calibration, calibrate
from worker_proc.startup.load_runner import build_runner, find_facts, num_threads
from worker_proc.startup.parts import make_backend, make_draft_layout, make_layout
from worker_proc.startup.prepare import prepare_model

_LENGTH_BYTES = 4


def load_shared_model(
    config: EngineConfig, progress: ReportProgress, rank: int = 0
) -> RunnerFactory:
    """Load, pack and check a rank's model, and return the function that makes a runner in a fork.

    Every runner gets the number of KV blocks that was found here. A later process finds less free
    memory, and with other facts the core would have to start anew. The forks connect the ranks;
    nothing is exchanged here.
    """
    if resolve_device(config.model.device).type != "cpu":
        raise ValueError("standby_workers needs device cpu: no other device survives a fork")
    torch.set_num_threads(1)
    prepared = prepare_model(config, progress, keeps_proofs=True, rank=rank)
    found = SharedCalibration()
    # Without stored proofs, this also loads the libraries of the first forward; otherwise each
    # fork's warm-up does.
    calibration = calibrate(prepared, config, progress)
    found.keep(1, calibration)
    facts = find_facts(prepared, config, calibration)
    _shrink_cache(prepared, make_layout(prepared.loaded, config))
    if prepared.draft is not None:
        _shrink_cache(prepared.of_draft(prepared.draft), make_draft_layout(prepared.draft, config))
    cache = msgspec.structs.replace(
        config.cache,
        num_gpu_blocks_override=facts.num_gpu_blocks,
        num_state_blocks_override=facts.num_state_blocks or None,
    )
    forked_config = msgspec.structs.replace(config, cache=cache)

    def make(progress: ReportProgress) -> Runner:
        count = num_threads(config)
        torch.set_num_threads(count)
        calibration = found.of(count)
        if calibration is None:
            calibration = calibrate(prepared, config, progress)
            found.keep(count, calibration)
        return build_runner(
            prepared, forked_config, calibration, progress, rank=rank, logs_sizes=False
        )

    return make


class SharedCalibration:
    """The last calibration, in memory that the zygote and its forks share.

    The zygote calibrates with one thread, and the first fork with all of its own. Later forks use
    that calibration: the model, its weights and its kernels are the same memory.
    """

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)

    def keep(self, num_threads: int, calibration: Calibration) -> None:
        """Replace the calibration; one that is too long is not kept."""
        body = msgspec.msgpack.encode((num_threads, calibration))
        if len(body) > len(self._memory) - _LENGTH_BYTES:
            return
        self._write_length(0)  # a fork may die here, and another may read
        self._memory[_LENGTH_BYTES : _LENGTH_BYTES + len(body)] = body
        self._write_length(len(body))

    def of(self, num_threads: int) -> Calibration | None:
        """Return the calibration for this number of threads, or None."""
        length = int.from_bytes(self._memory[:_LENGTH_BYTES], "little")
        if not length:
            return None
        body = self._memory[_LENGTH_BYTES : _LENGTH_BYTES + length]
        known_threads, calibration = msgspec.msgpack.decode(body, type=tuple[int, Calibration])
        return calibration if known_threads == num_threads else None

    def _write_length(self, length: int) -> None:
        self._memory[:_LENGTH_BYTES] = length.to_bytes(_LENGTH_BYTES, "little")


def _shrink_cache(prepared: PreparedModel, layout: KVLayout) -> None:
    """Replace the cache by a minimal one: forks allocate their own, and limits may apply."""
    backend = make_backend(prepared.loaded, layout, prepared.kernels)
    attach_cache(prepared.loaded, backend, layout, num_blocks_needed(layout))

"""Checks a loaded model before it serves."""

from typing import NamedTuple

import torch

from protocol.config import EngineConfig, NativeDecoder
from worker_proc.calibration.exactness import Exactness, check_exactness
from worker_proc.calibration.kv_codes import as_plain, check_codes
from worker_proc.calibration.self_check import check_forward, compute_stepwise, num_blocks_needed
from worker_proc.calibration.swap_cost import measure_swap_cost
from worker_proc.decoder.adapter_proof import AdapterProof, prove_adapters
from worker_proc.decoder.install import decoding, uninstall
from worker_proc.decoder.layers import LayerSettings
from worker_proc.decoder.proof import find_settings, is_whole_exact
from worker_proc.errors import UnsupportedModel
from worker_proc.forward import attach_cache
from worker_proc.kv.kv_format import KVFormat
from worker_proc.loading.prepared import PreparedModel
from worker_proc.loading.proofs import proven
from worker_proc.parallel.stage_proof import check_rows
from worker_proc.recurrent.state_spec import state_bytes
from worker_proc.runner import ReportProgress
from worker_proc.sampling.pooling import captured_hidden_states
from worker_proc.startup.parts import block_bytes_of, make_backend, make_draft_layout, make_layout


class Calibration(NamedTuple):
    """The results of computing a few texts; they are valid for one number of threads."""

    exactness: Exactness
    swap_cost_tokens: float
    embedding_size: int = 0
    decoder: tuple[LayerSettings, ...] = ()
    """The native decoder's settings for each layer; empty: the modules compute the layers."""
    is_whole: bool = False
    """True if the native decoder also computes the parts before and after the layers."""
    draft_decoder: tuple[LayerSettings, ...] = ()
    """The layers of the draft model."""
    draft_is_whole: bool = False
    adapters: AdapterProof = AdapterProof()
    row_dtype: str = ""
    """The dtype of the rows that a stage passes on; empty: there is only one stage."""


def calibrate(
    prepared: PreparedModel, config: EngineConfig, progress: ReportProgress
) -> Calibration:
    """Check a loaded model with the current number of threads; its pool is undefined afterwards."""
    progress("check_model", 0, 1)
    if config.cache.swap_space_bytes:  # the cost of a copy is measured at each start
        return _calibrate(prepared, config)
    name = f"calibration-{torch.get_num_threads()}"
    if prepared.adapters is not None:
        name += "-lora"
    return proven(prepared.proofs, name, Calibration, lambda: _calibrate(prepared, config))


def _calibrate(prepared: PreparedModel, config: EngineConfig) -> Calibration:
    loaded = prepared.loaded
    layout = make_layout(loaded, config)
    backend = make_backend(loaded, layout, prepared.kernels, config.worker)
    # Codes round where transformers does not, so modules are compared without codes.
    plain_layout, plain = as_plain(layout), backend
    if layout.format is not KVFormat.PLAIN:
        plain = make_backend(loaded, plain_layout, prepared.kernels)
    attach_cache(loaded, plain, plain_layout, num_blocks_needed(layout))
    uninstall(prepared)  # in a fork of a process with a runner, the decoder may be installed
    row_dtype = ""
    if prepared.stage is not None:
        row_dtype = check_rows(loaded, prepared.stage, config.parallel.pipeline_parallel_size)
    with captured_hidden_states(loaded.model) as hidden:
        stepwise = check_forward(loaded, plain, plain_layout)
    settings: list[LayerSettings] = []
    if config.worker.native_decoder is NativeDecoder.AUTO and _can_decode(prepared):
        settings = find_settings(prepared, plain, plain_layout, stepwise)
    if layout.format is not KVFormat.PLAIN:
        stepwise = check_codes(loaded, plain, backend, layout)
    is_whole = prepared.stage is None and is_whole_exact(prepared, backend, layout, settings)
    with decoding(prepared, settings):
        if settings:
            stepwise = compute_stepwise(loaded, backend, layout)
        exactness = check_exactness(loaded, backend, layout, stepwise)
        if config.worker.batch_invariant and not exactness.holds:
            raise UnsupportedModel(f"batch_invariant: {exactness.reason}")
        min_bytes = block_bytes_of(loaded, layout) or state_bytes(loaded.recurrent, loaded.dtype)
        can_swap = config.cache.swap_space_bytes >= min_bytes > 0
        cost = measure_swap_cost(loaded, backend, layout) if can_swap else 0.0
    adapters = AdapterProof()
    if prepared.adapters is not None:
        adapters = prove_adapters(
            prepared, prepared.adapters, backend, layout, settings, is_whole=is_whole
        )
        if exactness.holds and adapters.problem:
            exactness = Exactness(False, adapters.problem)
    draft_settings, draft_is_whole = _calibrate_draft(prepared, config)
    return Calibration(
        exactness,
        cost,
        hidden.size,
        tuple(settings),
        is_whole,
        tuple(draft_settings),
        draft_is_whole,
        adapters,
        row_dtype,
    )


def _can_decode(prepared: PreparedModel) -> bool:
    """Return whether the layers can be computed without their modules."""
    return prepared.executor is not None and not prepared.loaded.has_states


def _calibrate_draft(
    prepared: PreparedModel, config: EngineConfig
) -> tuple[list[LayerSettings], bool]:
    """Check the draft model, if there is one; return the native decoder's settings for it.

    The second value is `Calibration.draft_is_whole`.
    """
    if prepared.draft is None:
        return [], False
    own = prepared.of_draft(prepared.draft)
    layout = make_draft_layout(own.loaded, config)
    backend = make_backend(own.loaded, layout, own.kernels)
    attach_cache(own.loaded, backend, layout, num_blocks_needed(layout))
    uninstall(own)
    stepwise = check_forward(own.loaded, backend, layout)
    if config.worker.native_decoder is not NativeDecoder.AUTO or own.loaded.has_states:
        return [], False
    settings = find_settings(own, backend, layout, stepwise)
    return settings, is_whole_exact(own, backend, layout, settings)

"""Checks the configured models and settings together, before weights are read."""

from itertools import chain
from typing import NamedTuple

import torch

from protocol.config import EngineConfig, KVCacheDtype
from worker_proc.loading.draft import check_draft
from worker_proc.loading.loader import CheckedModel, check_model
from worker_proc.loading.proofs import Proofs
from worker_proc.native.build import start_building
from worker_proc.native.kernels import NativeLibrary
from worker_proc.parallel.division.sharding import check_division
from worker_proc.parallel.share import Share
from worker_proc.parallel.stage import Stage
from worker_proc.parallel.stages import StageParts, check_stages, only_stage
from worker_proc.quantization.formats import is_quantized
from worker_proc.runner import ReportProgress
from worker_proc.startup.refusals import (
    check_cache,
    check_compressed,
    check_own_attention,
    check_score_terms,
    check_settings,
    check_stated_length,
    has_entries,
    rehearse_draft,
    rehearse_experts,
    rehearse_model,
)
from worker_proc.startup.required_kernels import check_kernel_device, load_required_kernels


class CheckedModels(NamedTuple):
    """The configured models, which can be loaded."""

    model: CheckedModel
    """The model, or a stage of it."""
    draft: CheckedModel | None
    library: NativeLibrary | None
    """The kernels, if a setting needs them."""
    parts: StageParts | None
    """The parts of all stages, if there are several."""


def check_models(
    config: EngineConfig,
    device: torch.device,
    kept: Proofs | None,
    progress: ReportProgress,
    stage: Stage,
    *,
    has_draft: bool,
) -> CheckedModels:
    """Check the configured models and settings before weights are read.

    `kept` are proofs of earlier starts, if they are used. `has_draft`: this rank has the draft
    model, if one is configured.
    """
    setting, quantization = _setting_with_kernels(config, device), config.model.quantization
    if setting is not None:
        check_kernel_device(setting, device)
    elif device.type == "cpu" and not is_quantized(config.model.model):
        start_building()
    check_stated_length(config.model)
    proofs = None if kept is None else kept.without_kernels()
    checked = check_model(
        config.model.model,
        config.model.dtype,
        device,
        progress,
        proofs,
        max_model_len=config.model.max_model_len,
        num_ranks=config.parallel.tensor_parallel_size,
    )
    check_settings(checked, config)
    if config.parallel.num_ranks > 1:
        _check_parts(checked, config.parallel.tensor_parallel_size, progress)
    draft = check_draft(config.model, checked, progress) if has_draft else None
    rehearsal = rehearse_model(checked, quantization, proofs)
    parts, whole = None, checked
    if stage.num_stages > 1:
        parts = check_stages(checked, stage.num_stages)
        checked = only_stage(checked, parts, stage)
        layers, own = whole.inspected.probed.layers, checked.inspected.probed.layers
        rehearsal = rehearsal.of(layers, own)
    check_cache(checked, rehearsal, config)
    if draft is not None:
        _check_settings_of_draft(draft, config)
        rehearse_draft(draft, proofs)
    library = None
    if setting is None and any(has_entries(one) for one in (checked, draft) if one is not None):
        setting = "attention over compressed entries"
    if setting is not None:
        progress("compile_kernels", 0, 0)
        library = load_required_kernels(setting)
    if quantization is not None and library is not None and checked.files is None:
        proofs = None if kept is None else kept.with_kernels(library)
        rehearse_experts(whole, quantization, library, proofs)
    return CheckedModels(checked, draft, library, parts)


def _check_parts(checked: CheckedModel, num_shares: int, progress: ReportProgress) -> None:
    """Check that ranks can have parts of a model, and report the kinds of all its codes."""
    if checked.files is not None:
        files = checked.files
        parts = (part for one in files.whole.values() for own in one.experts for part in own)
        files.report.state(weight.kind.value for weight in chain(files.weights.values(), parts))
    if num_shares > 1:
        check_division(checked, Share(0, num_shares))
        if checked.device.type != "cpu":  # on GPUs, kernels compute nothing else
            progress("compile_kernels", 0, 0)
            load_required_kernels(f"tensor_parallel_size {num_shares}")


def _check_settings_of_draft(draft: CheckedModel, config: EngineConfig) -> None:
    check_own_attention(draft, config.model.max_model_len)
    check_compressed(draft, config)
    check_score_terms(draft, config)


def _setting_with_kernels(config: EngineConfig, device: torch.device) -> str | None:
    """Return a setting, with its value, that requires the native kernels, or None."""
    if config.lora.enable_lora:
        return "enable_lora"
    if config.model.quantization is not None:
        return f"quantization {config.model.quantization}"
    if config.cache.kv_cache_dtype is not KVCacheDtype.AUTO:
        return f"kv_cache_dtype {config.cache.kv_cache_dtype}"
    if (num_stages := config.parallel.pipeline_parallel_size) > 1:
        return f"pipeline_parallel_size {num_stages}"
    if (num_ranks := config.parallel.tensor_parallel_size) > 1 and device.type == "cpu":
        return f"tensor_parallel_size {num_ranks}"
    return None

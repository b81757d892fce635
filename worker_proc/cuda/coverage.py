"""Decides which models CUDA attention supports; imports neither Triton nor FlashInfer."""

import importlib.util
from collections.abc import Sequence

import torch

from protocol.config import AttentionName, WorkerConfig
from worker_proc.attention.probed_layer import ProbedLayer
from worker_proc.cuda.device import uses_triton
from worker_proc.errors import UnsupportedModel

MAX_HEAD_DIM = 256
MAX_HEADS_PER_KV_HEAD = 32
FLASHINFER_HEAD_DIMS = (64, 128, 256)
FLASHINFER_DTYPES = (torch.bfloat16, torch.float16)


def choose_attention(
    layers: Sequence[ProbedLayer], dtype: torch.dtype, device: torch.device, worker: WorkerConfig
) -> AttentionName | None:
    """Return the attention of a device: TRITON, FLASHINFER, or None for another backend.

    Raises UnsupportedModel if a setting requires attention that is unavailable or unsupported.
    """
    wanted, setting = worker.attention_backend, f"attention_backend {worker.attention_backend}"
    if worker.batch_invariant:
        wanted, setting = AttentionName.TRITON, "batch_invariant"
    if wanted is AttentionName.AUTO:
        covers = uses_triton(device) and not _why_not_triton(layers)
        return AttentionName.TRITON if covers else None
    if not uses_triton(device):
        raise UnsupportedModel(
            f"{setting} needs a CUDA device, but the model runs on {device.type}"
        )
    is_flashinfer = wanted is AttentionName.FLASHINFER
    reason = _why_not_flashinfer(layers, dtype) if is_flashinfer else _why_not_triton(layers)
    if reason:
        raise UnsupportedModel(f"{setting}: {reason}")
    return AttentionName.FLASHINFER if is_flashinfer else AttentionName.TRITON


def _why_not_triton(layers: Sequence[ProbedLayer]) -> str:
    """Return the reason why the engine's kernels cannot be used; empty: they can."""
    if reason := _unusual_scores(layers):
        return reason
    for layer in layers:
        spec = layer.spec
        head_dim = max(spec.head_dim, spec.value_head_dim)
        group = spec.num_heads // spec.num_kv_heads
        if head_dim > MAX_HEAD_DIM:
            return f"{layer.module_name} has heads of {head_dim} dimensions; at most {MAX_HEAD_DIM}"
        if group > MAX_HEADS_PER_KV_HEAD:
            return (
                f"{layer.module_name} has {group} query heads for each KV head; at most"
                f" {MAX_HEADS_PER_KV_HEAD}"
            )
    return ""


def _why_not_flashinfer(layers: Sequence[ProbedLayer], dtype: torch.dtype) -> str:
    """Return the reason why FlashInfer cannot be used; empty: it can."""
    if reason := _unusual_scores(layers):
        return reason
    for layer in layers:
        dims = layer.spec.head_dim, layer.spec.value_head_dim
        if layer.sinks is not None:
            return f"{layer.module_name} has attention sinks"
        if dims[0] != dims[1] or dims[0] not in FLASHINFER_HEAD_DIMS:
            return (
                f"{layer.module_name} has heads of {dims[0]} dimensions with values of {dims[1]};"
                f" they must be alike, and one of {', '.join(map(str, FLASHINFER_HEAD_DIMS))}"
            )
    if dtype not in FLASHINFER_DTYPES:
        return "it needs dtype bfloat16 or float16"
    if importlib.util.find_spec("flashinfer") is None:
        return "FlashInfer is not installed; run pip install flashinfer-python"
    return ""


def _unusual_scores(layers: Sequence[ProbedLayer]) -> str:
    """Return the reason why neither of the two can be used; empty: there is none."""
    for layer in layers:
        if layer.biases is not None:
            return f"{layer.module_name} adds biases to its scores"
        if layer.spec.is_chunked:
            return f"{layer.module_name} attends within chunks"
        if not layer.spec.is_causal:
            return f"{layer.module_name} is not causal"
    return ""

"""Proves that the native decoder computes what a model's layers do.

Every layer must reproduce the results of its module, on rows of several scales, at the first and
the last positions, and the whole decoder must reproduce the model's logits.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from worker_proc.attention.interface import AttentionBackend, PagedLayer, Rows, Scoring
from worker_proc.calibration.same_bits import have_same_bits
from worker_proc.calibration.self_check import (
    TEXT_LENGTHS,
    check_texts,
    compute_stepwise,
    compute_whole,
    max_error,
    median_error,
)
from worker_proc.decoder.install import decoding, layer_modules, read_layers
from worker_proc.decoder.layers import LayerSettings
from worker_proc.decoder.stack import NativeExecutor
from worker_proc.kv.kv_groups import KVLayout
from worker_proc.loading.deferred_module import make_generator
from worker_proc.loading.layer_executor import LayerExecutor, Stack
from worker_proc.loading.loaded_model import LoadedModel
from worker_proc.loading.prepared import PreparedModel
from worker_proc.modules.experts.mixture import FusedExperts
from worker_proc.modules.trial_errors import TRIAL_SCALES
from worker_proc.native.structures import Rotation

MAX_ERROR = {torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.01}
"""The greatest error of a layer's contribution to a row, relative to its norm."""
ROUNDING = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}
"""Share of a row's norm that is added to the contribution's norm, since sums are rounded."""


class LayerCall(NamedTuple):
    """A layer's module, and its arguments in the model's forward."""

    module: nn.Module
    hidden: torch.Tensor
    options: dict[str, Any]

    @property
    def angles(self) -> tuple[torch.Tensor, torch.Tensor]:
        cosines, sines = self.options["position_embeddings"]
        return cosines, sines


class Recording(NamedTuple):
    """The layer calls and scorings of a step that the modules compute."""

    calls: list[LayerCall]
    scorings: list[Scoring]


def find_settings(
    prepared: PreparedModel,
    backend: AttentionBackend,
    layout: KVLayout,
    expected: list[torch.Tensor],
) -> list[LayerSettings]:
    """Return the settings with which the native decoder reproduces the layers' modules.

    `expected` are the modules' logits from `check_forward`. The list is empty if the executor has
    no instructions for a layer, or if results differ.
    """
    loaded, executor = prepared.loaded, prepared.executor
    if executor is None or not executor.covers(backend):
        return []
    layers = read_layers(executor, loaded)
    if layers is None:
        return []
    modules = layer_modules(loaded)
    settings: list[LayerSettings] = []
    for first_position in (loaded.model_len - max(TEXT_LENGTHS), 0):
        recording = _record(loaded, backend, layout, modules, first_position)
        if not _is_usual(recording, layers):
            return []
        found = [
            _best_settings(executor, layer, call, scoring)
            for layer, call, scoring in zip(layers, *recording, strict=True)
        ]
        proven = [one for one in found if one is not None]
        if len(proven) < len(found) or (settings and settings != proven):
            return []
        settings = proven
    with decoding(prepared, settings):
        logits = compute_stepwise(loaded, backend, layout)
    return settings if median_error(logits, expected) <= max_error(loaded.dtype) else []


def is_whole_exact(
    prepared: PreparedModel,
    backend: AttentionBackend,
    layout: KVLayout,
    settings: Sequence[LayerSettings],
) -> bool:
    """Return whether a single native call gives the same logits, bit for bit, as the modules.

    `settings` are those of `find_settings`.
    """
    loaded = prepared.loaded
    if not settings or not isinstance(prepared.executor, NativeExecutor):
        return False
    texts = check_texts(loaded.vocab_size)

    def logits(*, is_whole: bool) -> list[torch.Tensor]:
        with decoding(prepared, settings, is_whole=is_whole):
            found = compute_stepwise(loaded, backend, layout)
            for first_position in (loaded.model_len - max(TEXT_LENGTHS), 0):
                found += compute_whole(loaded, backend, layout, texts, first_position)
            return found

    expected = logits(is_whole=False)
    return all(map(have_same_bits, logits(is_whole=True), expected))


def _record(
    loaded: LoadedModel,
    backend: AttentionBackend,
    layout: KVLayout,
    modules: list[nn.Module],
    first_position: int,
) -> Recording:
    """Compute the self check's texts at once from a position on, recording the layers' calls.

    The backend keeps this step for the trials.
    """
    recording = Recording([], [])
    attend = backend.attend

    def record_call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if len(args) == 1 and isinstance(kwargs.get("position_embeddings"), tuple):
            recording.calls.append(LayerCall(module, args[0], kwargs))

    def record_scoring(layer: PagedLayer, rows: Rows, scoring: Scoring) -> torch.Tensor:
        recording.scorings.append(scoring)
        return attend(layer, rows, scoring)

    handles = [
        module.register_forward_pre_hook(record_call, with_kwargs=True) for module in modules
    ]
    backend.__dict__["attend"] = record_scoring
    try:
        texts = check_texts(loaded.vocab_size)
        compute_whole(loaded, backend, layout, texts, first_position)
    finally:
        del backend.__dict__["attend"]
        for handle in handles:
            handle.remove()
    return recording


def _is_usual(recording: Recording, layers: list[Any]) -> bool:
    """Return whether each layer was called once, with angles that the instructions can use."""
    calls, scorings = recording
    if not len(calls) == len(scorings) == len(layers):
        return False
    for layer, call in zip(layers, calls, strict=True):
        dtypes = {call.hidden.dtype, torch.float32}
        for part in call.angles:
            num_rotated = part.shape[-1]
            if part.dtype not in dtypes or part.shape[:-1] != call.hidden.shape[:-1]:
                return False
            if num_rotated % 2 or num_rotated > layer.paged.spec.head_dim:
                return False
    return True


def _best_settings(
    executor: LayerExecutor, layer: Any, call: LayerCall, scoring: Scoring
) -> LayerSettings | None:
    """Return the settings that come closest to a module's results; None: none is close enough."""
    best, min_error = None, MAX_ERROR[call.hidden.dtype]
    trials = list(_trials(call))
    # Attention rounds differently from the module, which may send a row to another expert. Since
    # the mixture itself is proven (modules/experts/mixture.py), only the typical row counts here.
    is_mixture = any(isinstance(part, FusedExperts) for part in call.module.modules())
    for rotation in Rotation:
        settings = LayerSettings(rotation, scoring.scale, scoring.softcap or 0.0)
        stack = executor.stack([layer], [settings], call.hidden.dtype)
        error = max(
            _error(stack, call, hidden, expected, is_typical=is_mixture)
            for hidden, expected in trials
        )
        if error < min_error:
            best, min_error = settings, error
        if error == 0.0:
            break
    return best


@torch.inference_mode()
def _trials(call: LayerCall) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield random rows of every scale, and the module's output for them."""
    generator = make_generator(1)
    for scale in TRIAL_SCALES:
        rows = torch.randn(call.hidden.shape, generator=generator) * scale
        hidden = rows.to(call.hidden)
        yield hidden, call.module(hidden, **call.options)


@torch.inference_mode()
def _error(
    stack: Stack,
    call: LayerCall,
    hidden: torch.Tensor,
    expected: object,
    *,
    is_typical: bool,
) -> float:
    """Return the greatest error of a row, or the median, relative to the module's contribution."""
    if not isinstance(expected, torch.Tensor) or expected.shape != hidden.shape:
        return math.inf
    found = stack.forward(hidden, [call.angles])
    added = (expected.float() - hidden.float()).norm(dim=-1)
    added += ROUNDING[hidden.dtype] * expected.float().norm(dim=-1)
    errors = (found.float() - expected.float()).norm(dim=-1) / added
    error = float(errors.median() if is_typical else errors.max())
    return error if math.isfinite(error) else math.inf

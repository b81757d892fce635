"""Puts the native decoder in the place of a model's layers, once it is proven.

Each layer must give the results of its module, on rows of every scale, and the whole model its own
logits. Layers that differ only in their weights are all tried: a checkpoint may hold any values.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from worker_proc.attention.interface import AttentionBackend
from worker_proc.attention.native import NativeBackend
from worker_proc.calibration.self_check import (
    check_texts,
    compute_stepwise,
    compute_whole,
    max_error,
    median_error,
)
from worker_proc.decoder.layers import DecoderLayer, read_layer
from worker_proc.decoder.stack import DecoderStack, replace_forwards, restore_forwards
from worker_proc.kv.kv_groups import KVLayout
from worker_proc.loading.loader import LoadedModel
from worker_proc.loading.prepared import PreparedModel
from worker_proc.native.kernels import Rotation

MAX_ERROR = {torch.float32: 1e-4, torch.bfloat16: 0.02}
"""Of a layer's output, relative to its largest value."""
TRIAL_SCALES = (0.1, 1.0, 30.0)


def install(prepared: PreparedModel, rotations: list[Rotation]) -> None:
    """Let the native decoder compute the layers, as `find_rotations` has proven."""
    layers = read_layers(prepared.loaded)
    if not rotations or layers is None or prepared.kernels is None:
        return
    stack = DecoderStack(prepared.kernels, layers, rotations, prepared.loaded.dtype)
    replace_forwards(layer_modules(prepared.loaded), stack)


def uninstall(prepared: PreparedModel) -> None:
    """Let the modules compute the layers."""
    restore_forwards(layer_modules(prepared.loaded))


@contextmanager
def decoding(prepared: PreparedModel, rotations: list[Rotation]) -> Iterator[None]:
    """Install the native decoder for a while."""
    install(prepared, rotations)
    try:
        yield
    finally:
        uninstall(prepared)


class LayerCall(NamedTuple):
    """One layer's module and what the model's forward has given to it."""

    module: nn.Module
    hidden: torch.Tensor
    options: dict[str, Any]


def layer_modules(loaded: LoadedModel) -> list[nn.Module]:
    """Return the decoder layers: the parents of the attention modules."""
    names = [layer.module_name.rpartition(".")[0] for layer in loaded.layers]
    return [loaded.model.get_submodule(name) for name in names]


def read_layers(loaded: LoadedModel) -> list[DecoderLayer] | None:
    """Return what the layers compute; None: there are no instructions for one of them."""
    factor = float(getattr(loaded.model.config, "residual_multiplier", None) or 1.0)
    layers = [read_layer(module, factor) for module in layer_modules(loaded)]
    read = [layer for layer in layers if layer is not None]
    return read if len(read) == len(layers) else None


def find_rotations(
    prepared: PreparedModel,
    backend: AttentionBackend,
    layout: KVLayout,
    expected: list[torch.Tensor],
) -> list[Rotation]:
    """Return how each layer rotates, if the native decoder then computes what the modules do.

    `expected` are the modules' logits, of `check_forward`. An empty list: there are no instructions
    for a layer, or they compute something else.
    """
    loaded = prepared.loaded
    layers, modules = read_layers(loaded), layer_modules(loaded)
    library = prepared.kernels
    if layers is None or library is None or not isinstance(backend, NativeBackend):
        return []
    calls = _recorded_calls(loaded, backend, layout, modules)
    if len(calls) != len(modules):  # they are called in another way
        return []
    rotations: list[Rotation] = []
    for layer, call in zip(layers, calls, strict=True):
        for rotation in Rotation:
            if _agrees(DecoderStack(library, [layer], [rotation], loaded.dtype), call):
                rotations.append(rotation)
                break
        else:
            return []
    with decoding(prepared, rotations):
        found = compute_stepwise(loaded, backend, layout)
    return rotations if median_error(found, expected) <= max_error(loaded.dtype) else []


def _recorded_calls(
    loaded: LoadedModel, backend: NativeBackend, layout: KVLayout, modules: list[nn.Module]
) -> list[LayerCall]:
    """Compute the self check's texts at once; the backend keeps this step."""
    calls: list[LayerCall] = []

    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if len(args) == 1 and isinstance(kwargs.get("position_embeddings"), tuple):
            calls.append(LayerCall(module, args[0], kwargs))

    handles = [module.register_forward_pre_hook(record, with_kwargs=True) for module in modules]
    try:
        compute_whole(loaded, backend, layout, check_texts(loaded.vocab_size))
    finally:
        for handle in handles:
            handle.remove()
    return calls


@torch.inference_mode()
def _agrees(stack: DecoderStack, call: LayerCall) -> bool:
    """Return whether a stack of one layer computes what the module does, at every scale."""
    generator = torch.Generator().manual_seed(1)
    angles = [call.options["position_embeddings"]]
    for scale in TRIAL_SCALES:
        rows = torch.randn(call.hidden.shape, generator=generator) * scale
        hidden = rows.to(call.hidden.dtype)
        expected = call.module(hidden, **call.options)
        if not isinstance(expected, torch.Tensor):
            return False
        found = stack.forward(hidden, angles)
        error = (found.float() - expected.float()).abs().max()
        if not error <= MAX_ERROR[hidden.dtype] * expected.float().abs().max():
            return False
    return True

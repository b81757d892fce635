"""Replaces a model's layers, and what is around them, by a proven decoder (proof.py)."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from worker_proc.adapters.store import AdapterStore
from worker_proc.attention.interface import attending_twice
from worker_proc.decoder.adapter_sites import sites_of_layers
from worker_proc.decoder.ends import read_ends
from worker_proc.decoder.layers import LayerSettings
from worker_proc.decoder.stack import (
    DecoderStack,
    replace_forwards,
    restore_forwards,
)
from worker_proc.decoder.whole import WholeModel, install_whole, uninstall_whole
from worker_proc.loading.layer_executor import LayerExecutor, Stack
from worker_proc.loading.loaded_model import LoadedModel
from worker_proc.loading.prepared import PreparedModel


def install(
    prepared: PreparedModel, settings: Sequence[LayerSettings], *, is_whole: bool = False
) -> Stack | None:
    """Compute the layers by the native decoder if `settings` prove it; otherwise by the modules.

    With `is_whole`, which `is_whole_exact` must have proven, it also computes what precedes and
    follows the layers. The attention modules must be attached to a KV cache. Returns the stack that
    computes the layers, or None.
    """
    uninstall(prepared)
    executor, loaded = prepared.executor, prepared.loaded
    if not settings or executor is None or (layers := read_layers(executor, loaded)) is None:
        return None
    stack = executor.stack(layers, settings, loaded.dtype)
    ends = read_ends(loaded, layer_modules(loaded)) if is_whole else None
    if prepared.adapters is not None and isinstance(stack, DecoderStack):
        _let_take_adapters(stack, prepared.adapters, layer_names(loaded))
    replace_forwards(layer_modules(loaded), stack)
    if ends is not None and isinstance(stack, DecoderStack):
        install_whole(loaded, WholeModel(stack, ends))
    return stack


def uninstall(prepared: PreparedModel) -> None:
    """Make the modules compute everything again."""
    uninstall_whole(prepared.loaded)
    restore_forwards(layer_modules(prepared.loaded))


@contextmanager
def decoding(
    prepared: PreparedModel, settings: Sequence[LayerSettings], *, is_whole: bool = False
) -> Iterator[None]:
    """Install the native decoder within the context."""
    install(prepared, settings, is_whole=is_whole)
    try:
        yield
    finally:
        uninstall(prepared)


def layer_names(loaded: LoadedModel) -> list[str]:
    """Return the names of the decoder layers: the parents of the attention modules."""
    return [layer.module_name.rpartition(".")[0] for layer in loaded.layers]


def layer_modules(loaded: LoadedModel) -> list[nn.Module]:
    """Return the decoder layers."""
    return [loaded.model.get_submodule(name) for name in layer_names(loaded)]


def _let_take_adapters(stack: DecoderStack, store: AdapterStore, names: Sequence[str]) -> None:
    """Make a stack add adapter products at the sites of its layers that take adapters."""
    sites = store.sites
    found = {
        place: (number, sites.all[number])
        for place, number in sites_of_layers(sites, names).items()
        if number in sites.allowed
    }
    stack.take_adapters(store.rows, found)


def read_layers(executor: LayerExecutor, loaded: LoadedModel) -> list[Any] | None:
    """Read the layers for the executor; None: it has no instructions for one of them."""
    if attending_twice(layer.module_name for layer in loaded.layers) is not None:
        return None
    factor = float(getattr(loaded.model.config, "residual_multiplier", None) or 1.0)
    layers = [executor.read(module, factor) for module in layer_modules(loaded)]
    read = [layer for layer in layers if layer is not None]
    return read if len(read) == len(layers) else None

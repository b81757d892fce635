"""Chooses and installs the forwards of recurrent modules over packed rows."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from torch import nn

from worker_proc.native.kernels import NativeLibrary
from worker_proc.recurrent.cached_states import CachedStatesLayer
from worker_proc.recurrent.functions import RecurrentLayer, is_recurrent
from worker_proc.recurrent.griffin import GriffinLayer, is_griffin
from worker_proc.recurrent.lightning import LightningLayer, is_lightning
from worker_proc.recurrent.rwkv import RwkvLayer, is_rwkv
from worker_proc.recurrent.state_pool import StatePool
from worker_proc.recurrent.state_spec import RecurrentSpec


class PackedLayer(Protocol):
    """The forward of one recurrent module over packed rows."""

    spec: RecurrentSpec
    is_rowwise: bool
    """True if the forward's elementwise functions are computed by `rowwise`."""
    plain_products: Sequence[str]
    """The module's own weights that torch multiplies rows by."""

    def attach(self, pool: StatePool) -> None:
        """Use the states of `pool` from now on."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the module's own forward, for packed rows."""


def make_layer(
    module: nn.Module, spec: RecurrentSpec, library: NativeLibrary | None
) -> PackedLayer:
    """Return the packed forward of a module, chosen by the functions it calls or by its parts."""
    if is_lightning(module):
        return LightningLayer(module, spec, library)
    if is_griffin(module):
        return GriffinLayer(module, spec, library)
    if is_rwkv(module):
        return RwkvLayer(module, spec, library)
    if is_recurrent(module):
        return RecurrentLayer(module, spec, library)
    return CachedStatesLayer(module, spec, library)


def install(module: nn.Module, layer: PackedLayer) -> None:
    """Make a module compute packed rows; it keeps its parts and parameters."""
    module.__dict__["recurrent_layer"] = layer
    module.__dict__["forward"] = layer.forward


def recurrent_layers(model: nn.Module) -> list[PackedLayer]:
    """Return the installed layers of a model."""
    found = (module.__dict__.get("recurrent_layer") for module in model.modules())
    return [layer for layer in found if layer is not None]


@contextmanager
def own_forwards(model: nn.Module) -> Iterator[None]:
    """Make recurrent modules compute rows of one text, as in transformers, within the context."""
    taken = {
        module: module.__dict__.pop("forward")
        for module in model.modules()
        if "recurrent_layer" in module.__dict__
    }
    try:
        yield
    finally:
        for module, forward in taken.items():
            module.__dict__["forward"] = forward

"""Models that divide weights and rows by powers of two, so that rows fit in float16 (RWKV).

transformers' method divides the weights of all layers in the first forward, after they have been
packed here. It is therefore called at load, also in a stage that has only some of the layers.
"""

from typing import Any

from torch import nn

from worker_proc.loading.unbuilt_parts import LeftOut

_RESCALE = "_rescale_layers"


class _Absent:
    """Stands for a missing layer, with all of its parts and methods."""

    def __getattr__(self, name: str) -> "_Absent":
        return self

    def __call__(self, *args: object) -> "_Absent":
        return self


def rescale(model: nn.Module) -> None:
    """Make a model divide the weights of the layers that it has."""
    for module in model.modules():
        method: Any = getattr(module, _RESCALE, None)
        if method is None:
            continue
        lists = {key: one for key, one in module.named_children() if isinstance(one, nn.ModuleList)}
        present = {
            key: [_Absent() if isinstance(layer, LeftOut) else layer for layer in layers]
            for key, layers in lists.items()
        }
        module.__dict__.update(present)  # found before the children
        try:
            method()
        finally:
            for key in present:
                del module.__dict__[key]


def divisor_behind(model: nn.Module, layer: int) -> float:
    """Return the power of two by which a model divides the rows after a layer; 1: it does not."""
    for module in model.modules():
        if hasattr(module, _RESCALE):
            config: Any = module.config
            every: int = config.rescale_every
            return 2.0 if every > 0 and (layer + 1) % every == 0 else 1.0
    return 1.0

"""Models that divide weights and rows by powers of two, so that float16 holds the rows (RWKV).

transformers' method divides the weights of all layers in the first forward, when they are packed
here. It is called at the load, also in a stage, which has some of the layers.
"""

from typing import Any

from torch import nn

from worker_proc.loading.text_model import LeftOut

_RESCALE = "_rescale_layers"


class _Absent:
    """Takes the place of a layer that is not there, with all of its parts and methods."""

    def __getattr__(self, name: str) -> "_Absent":
        return self

    def __call__(self, *args: object) -> "_Absent":
        return self


def rescale(model: nn.Module) -> None:
    """Let a model divide the weights of the layers that it has."""
    for module in model.modules():
        method: Any = getattr(module, _RESCALE, None)
        if method is None:
            continue
        lists = {key: one for key, one in module.named_children() if isinstance(one, nn.ModuleList)}
        present = {
            key: [_Absent() if isinstance(layer, LeftOut) else layer for layer in layers]
            for key, layers in lists.items()
        }
        module.__dict__.update(present)  # which are found before the children
        try:
            method()
        finally:
            for key in present:
                del module.__dict__[key]


def divisor_behind(model: nn.Module, layer: int) -> float:
    """Return the power of two by which a model divides the rows after a layer; 1: by none."""
    for module in model.modules():
        if hasattr(module, _RESCALE):
            config: Any = module.config
            every: int = config.rescale_every
            return 2.0 if every > 0 and (layer + 1) % every == 0 else 1.0
    return 1.0

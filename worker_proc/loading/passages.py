"""Passages, which move rows in and out of a model that has only some of the layers."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import nn


class LayerForm(NamedTuple):
    """The properties of a layer that the surrounding code uses."""

    num_outputs: int = 0
    """The length of the tuple that it returns; 0: it returns rows."""
    labels: Mapping[str, str] = {}
    """String attributes of the layer, such as the name of its kind."""


class Passage(nn.Module):
    """Replaces a layer of another stage."""

    def __init__(self, form: LayerForm) -> None:
        super().__init__()
        for name, label in form.labels.items():
            setattr(self, name, label)
        self._num_outputs = form.num_outputs
        self.given: torch.Tensor | None = None
        """Rows that it returns instead of its input."""
        self.factor = 1.0
        """A power of two that multiplies given rows, since the model divides by it afterwards."""
        self.seen: torch.Tensor | None = None
        """Its last input, if `keeps` is set."""
        self.keeps = False

    def forward(
        self, hidden_states: torch.Tensor, *_: object, **__: object
    ) -> torch.Tensor | tuple[torch.Tensor | None, ...]:
        if self.keeps:
            self.seen = hidden_states
        rows = hidden_states if self.given is None else self.given
        return (rows, *[None] * (self._num_outputs - 1)) if self._num_outputs else rows


class StageModel(NamedTuple):
    """The passages of a stage; None: it is the first stage, or the last."""

    inlet: Passage | None
    outlet: Passage | None
    division: str
    """The layers of each stage, in words."""
    first_layer: str
    """The first of its own layers, named like `last_layer`."""
    last_layer: str

    def take(self, rows: torch.Tensor) -> None:
        """Pass the previous stage's rows, `[1, T, width]`, to the next forward."""
        assert self.inlet is not None
        self.inlet.given = rows if self.inlet.factor == 1.0 else rows * self.inlet.factor

    def rows(self) -> torch.Tensor:
        """Return the rows, `[1, T, width]`, that the last forward computed for the next stage."""
        assert self.outlet is not None
        assert self.outlet.seen is not None
        return self.outlet.seen

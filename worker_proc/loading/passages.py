"""The ends of a model that has some of the layers only: what passes rows in and out."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import nn


class LayerForm(NamedTuple):
    """What the code around a layer finds there."""

    num_outputs: int = 0
    """Of the tuple that it returns; 0: it returns rows."""
    labels: Mapping[str, str] = {}
    """Texts that the layer has, such as the name of its kind."""


class Passage(nn.Module):
    """Takes the place of a layer of another stage."""

    def __init__(self, form: LayerForm) -> None:
        super().__init__()
        for name, label in form.labels.items():
            setattr(self, name, label)
        self._num_outputs = form.num_outputs
        self.given: torch.Tensor | None = None
        """What it passes on instead of its input."""
        self.factor = 1.0
        """A power of two by which given rows are multiplied: the model divides by it afterwards."""
        self.seen: torch.Tensor | None = None
        """Its last input, if that is to be kept."""
        self.keeps = False

    def forward(
        self, hidden_states: torch.Tensor, *_: object, **__: object
    ) -> torch.Tensor | tuple[torch.Tensor | None, ...]:
        if self.keeps:
            self.seen = hidden_states
        rows = hidden_states if self.given is None else self.given
        return (rows, *[None] * (self._num_outputs - 1)) if self._num_outputs else rows


class StageModel(NamedTuple):
    """What a stage takes in and gives away; None: it is the first, or the last."""

    inlet: Passage | None
    outlet: Passage | None
    division: str
    """Which layers each of the stages has."""
    first_layer: str
    """Of its own ones, as `last_layer`."""
    last_layer: str

    def take(self, rows: torch.Tensor) -> None:
        """Give the rows of the stage before to the next forward, `[1, T, width]`."""
        assert self.inlet is not None
        self.inlet.given = rows if self.inlet.factor == 1.0 else rows * self.inlet.factor

    def rows(self) -> torch.Tensor:
        """Return what the last forward has left for the next stage, `[1, T, width]`."""
        assert self.outlet is not None
        assert self.outlet.seen is not None
        return self.outlet.seen

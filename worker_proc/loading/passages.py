"""Modules that pass rows into and out of a model that has only some of the layers."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import nn

from worker_proc.loading.deferred_module import make_generator

_NUM_ROWS = 251
"""The number of rows of the table that replaces an embedding."""


class LayerForm(NamedTuple):
    """The properties of a layer that the surrounding code uses."""

    num_outputs: int = 0
    """The length of the tuple that the layer returns; 0: it returns rows."""
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
        """Rows that the passage returns instead of its input."""
        self.factor = 1.0
        """A power of two that multiplies given rows, since the model divides by it afterwards."""
        self.seen: torch.Tensor | None = None
        """The last input, if `keeps` is set."""
        self.keeps = False
        self.keeps_embedding = False
        """If True, `seen` has the values of the second input after those of the first one."""

    def forward(
        self, hidden_states: torch.Tensor, *others: object, **_: object
    ) -> torch.Tensor | tuple[torch.Tensor | None, ...]:
        if self.keeps and self.keeps_embedding:
            embedded = others[0]
            assert isinstance(embedded, torch.Tensor)
            self.seen = torch.cat([hidden_states, embedded.to(hidden_states.dtype)], -1)
        elif self.keeps:
            self.seen = hidden_states
        rows = hidden_states if self.given is None else self.given
        return (rows, *[None] * (self._num_outputs - 1)) if self._num_outputs else rows


class AnyRows(nn.Module):
    """Replaces an embedding by a table of random rows; neighbouring tokens have different rows."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        rows = torch.randn(_NUM_ROWS, width, generator=make_generator(2)).to(dtype)
        self._table: nn.Embedding = nn.Embedding.from_pretrained(rows)
        self.given: torch.Tensor | None = None
        """Rows that the module returns instead of those of the table."""

    @property
    def weight(self) -> torch.Tensor:
        """The table, from which models read their device and dtype."""
        return self._table.weight

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        if self.given is not None:
            return self.given
        rows: torch.Tensor = self._table(input_ids % _NUM_ROWS)
        return rows


class StageModel(NamedTuple):
    """The passages of a stage, and the rows between stages."""

    inlet: Passage | None
    """The passage that returns the rows of the previous stage; None in the first stage."""
    outlet: Passage | None
    """The passage that keeps the rows for the next stage; None in the last stage."""
    division: str
    """A description of the layers of each stage."""
    first_layer: str
    """The name of the module that is the stage's first layer."""
    last_layer: str
    row_width: int
    """The number of values of a row that passes between stages."""
    embedding: AnyRows | None = None
    """The module that returns the embedding's part of a row, if layers take that, too."""

    def take(self, rows: torch.Tensor) -> None:
        """Pass the previous stage's rows, `[1, T, row_width]`, to the next forward."""
        assert self.inlet is not None
        if self.embedding is not None:
            rows, embedded = rows.chunk(2, -1)
            self.embedding.given = embedded.to(self.embedding.weight.dtype)
        self.inlet.given = rows if self.inlet.factor == 1.0 else rows * self.inlet.factor

    def forget(self) -> None:
        """Make the next forward compute from tokens again."""
        if self.inlet is not None:
            self.inlet.given = None
        if self.embedding is not None:
            self.embedding.given = None

    def rows(self) -> torch.Tensor:
        """Return the next stage's rows of the last forward, `[1, T, row_width]`."""
        assert self.outlet is not None
        assert self.outlet.seen is not None
        return self.outlet.seen

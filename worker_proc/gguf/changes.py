"""How tensors of a file differ from those of a checkpoint with the same weights."""

from collections.abc import Callable
from typing import NamedTuple

import torch


class Change(NamedTuple):
    """What is done with a tensor that is read from a file."""

    rows: torch.Tensor | None = None
    """int64: the row of the file that stands at each place."""
    inputs: torch.Tensor | None = None
    """int64: the column of the file that stands at each place."""
    values: Callable[[torch.Tensor], torch.Tensor] | None = None
    """Returns what a checkpoint has, for values that are not codes; the shape may differ."""

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the result, for a tensor of a shape."""
        if self.rows is not None:
            stored = (len(self.rows), *stored[1:])
        if self.values is None:
            return stored
        return tuple(self.values(torch.empty(stored, device="meta")).shape)

    def apply(self, values: torch.Tensor) -> torch.Tensor:
        """Return the result for values that are not codes."""
        if self.rows is not None:
            values = values[self.rows]
        if self.inputs is not None:
            values = values[..., self.inputs]
        return values if self.values is None else self.values(values)


UNCHANGED = Change()


def as_channels(kernels: torch.Tensor) -> torch.Tensor:
    """Return the kernels of a convolution of each channel, which has one input."""
    return kernels.unsqueeze(1)


def as_matrix(row: torch.Tensor) -> torch.Tensor:
    """Return a matrix of one row, which some files have as a vector."""
    return row.view(1, -1)


def logarithm(rates: torch.Tensor) -> torch.Tensor:
    """Return the logarithms of decay rates, which files have as negative numbers."""
    return (-rates.float()).log().flatten()


def pairs_to_halves(num_rows: int, num_heads: int) -> torch.Tensor:
    """Return the order of rows in which halves of heads take the place of interleaved pairs."""
    return torch.arange(num_rows).view(num_heads, -1, 2).transpose(1, 2).flatten()

"""Differences between the tensors of a file and those of a checkpoint with the same weights."""

from collections.abc import Callable
from typing import NamedTuple

import torch


class Change(NamedTuple):
    """A transformation of a tensor that is read from a file."""

    rows: torch.Tensor | None = None
    """int64: for each row of the result, the row of the file."""
    inputs: torch.Tensor | None = None
    """int64: for each column of the result, the column of the file."""
    values: Callable[[torch.Tensor], torch.Tensor] | None = None
    """Converts uncoded values to those of a checkpoint; may change the shape."""
    transposes: bool = False
    """True if the rows of the file are the columns of the result; codes are then dequantized."""

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the result for a tensor of shape `stored`."""
        if self.rows is not None:
            stored = (len(self.rows), *stored[1:])
        if self.transposes:
            stored = stored[::-1]
        if self.values is None:
            return stored
        return tuple(self.values(torch.empty(stored, device="meta")).shape)

    def apply(self, values: torch.Tensor) -> torch.Tensor:
        """Return the result for uncoded values."""
        if self.rows is not None:
            values = values[self.rows]
        if self.inputs is not None:
            values = values[..., self.inputs]
        if self.transposes:
            values = values.t()
        return values if self.values is None else self.values(values)


UNCHANGED = Change()


def as_channels(kernels: torch.Tensor) -> torch.Tensor:
    """Return depthwise convolution kernels, `[channels, 1, width]`."""
    return kernels.unsqueeze(1)


def as_matrix(row: torch.Tensor) -> torch.Tensor:
    """Return a vector as a matrix of one row."""
    return row.view(1, -1)


def logarithm(rates: torch.Tensor) -> torch.Tensor:
    """Return the logarithms of decay rates, which are negative in files; otherwise ValueError."""
    if not rates.is_meta and not bool((rates < 0).all()):
        raise ValueError("has rates of decay that are not less than 0")
    return (-rates.float()).log()


def flat_logarithm(rates: torch.Tensor) -> torch.Tensor:
    """Return a vector of logarithms of decay rates, which files have as a matrix."""
    return logarithm(rates).flatten()


def pairs_to_halves(num_rows: int, num_heads: int) -> torch.Tensor:
    """Return the row order that turns interleaved pairs of a head into halves."""
    return torch.arange(num_rows).view(num_heads, -1, 2).transpose(1, 2).flatten()

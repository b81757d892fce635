"""Biases by head and position that a model's own code adds to scores, as tables for the kernels."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from worker_proc.attention.probed_layer import ProbedLayer
from worker_proc.attention.stand_ins import OwnCall
from worker_proc.errors import UnsupportedModel

MAX_BIASED_LEN = 2**20
"""The longest context: bias tables, and tensors of modules, have a column for each position."""
_ROOM = 128
"""Padding columns, which kernels may read but never use."""
_SAME = 1e-6
"""The greatest relative difference from the product of a slope and a position."""


class Biases(NamedTuple):
    """Biases that are added to scores; see `PagedLayer`."""

    values: torch.Tensor  # float32 [num_heads, columns]
    origin: int | None = None

    def is_same(self, other: "Biases") -> bool:
        return self.origin == other.origin and torch.equal(self.values, other.values)

    def of_rows(self, rows: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Return `[num_heads, rows, keys]`, given positions `[rows, 1]` and `[keys]`.

        Biases by key position have 1 instead of rows. Biases of keys after the row are not used.
        """
        columns = keys[None] if self.origin is None else keys - rows + self.origin
        return self.values[:, columns.clamp(0, self.values.shape[1] - 1)]

    def padded(self) -> "Biases":
        """Return a copy whose rows end with the padding that kernels may read."""
        values = nn.functional.pad(self.values, (0, _ROOM))
        return self._replace(values=values.contiguous())


def check_length(length: int, source: str) -> None:
    """Raise UnsupportedModel for a context that is too long; `source` names its setting."""
    if length > MAX_BIASED_LEN:
        raise UnsupportedModel(
            f"{source} is {length}, and a model that attends by code of its own has a context of"
            f" at most {MAX_BIASED_LEN} tokens; set a smaller max_model_len"
        )


def table_bytes(layers: Sequence[ProbedLayer], length: int) -> int:
    """Return the most bytes that the biases for a context of `length` tokens take."""
    num_heads = max((layer.spec.num_heads for layer in layers), default=0)
    return num_heads * (length + _ROOM) * torch.float32.itemsize


def observed_biases(call: OwnCall, length: int) -> Biases | None:
    """Return the biases that are added to the scores of the last row, or None."""
    num_heads = call.query.shape[1]
    table = torch.zeros(num_heads, length, device=call.query.device)
    for tensor, factor in call.terms.biases:
        if not tensor.is_meta:
            shape = (-1, *tensor.shape[-2:])
            table += tensor.reshape(shape)[:, -1, -length:].float() * factor
    if not table.any():
        return None
    return _by_distance(table) or Biases(table)


def _by_distance(table: torch.Tensor) -> Biases | None:
    """Return biases by distance if `table` holds slopes times positions (ALiBi), else None.

    MPT's biases are zero at the last key and Bloom's at the first. Differences between large
    products would lose precision in long texts.
    """
    last = table.shape[1] - 1
    if last > 0 and not table[:, 0].any():
        slopes, zero = table[:, 1], 0
    elif last > 0 and not table[:, last].any():
        slopes, zero = -table[:, last - 1], last
    else:
        return None
    positions = torch.arange(last + 1, device=table.device)
    difference = table - slopes[:, None] * (positions - zero)
    if not bool((difference.abs() <= _SAME * table.abs()).all()):
        return None
    return Biases(slopes[:, None] * (positions - last), last)

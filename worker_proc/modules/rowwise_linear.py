"""Linear layers in which a row's bits do not depend on the batch."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

Multiply = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""Returns rows · weightᵀ + bias."""


class RowwiseForward(NamedTuple):
    """Replaces a linear layer's forward; the module keeps its weights."""

    linear: nn.Linear
    multiply: Multiply

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return self.multiply(rows, self.linear.weight, self.linear.bias)


def multiply_rowwise(model: nn.Module, multiply: Multiply) -> None:
    """Make all linear layers of a model multiply by a function that treats rows separately."""
    for module in model.modules():
        if type(module) is nn.Linear and not module.weight.is_meta:
            module.__dict__["forward"] = RowwiseForward(module, multiply)


def is_rowwise(module: nn.Module) -> bool:
    """Return whether `multiply_rowwise` has changed a module."""
    return isinstance(module.__dict__.get("forward"), RowwiseForward)

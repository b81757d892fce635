"""Linear layers of which each row has the same bits in every batch."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

Multiply = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""Returns rows · weightᵀ + bias."""


class RowwiseForward(NamedTuple):
    """Takes the place of a linear layer's forward; its weights stay the module's."""

    linear: nn.Linear
    multiply: Multiply

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return self.multiply(rows, self.linear.weight, self.linear.bias)


def multiply_rowwise(model: nn.Module, multiply: Multiply) -> None:
    """Let all linear layers of a model multiply by a function that takes the rows one by one."""
    for module in model.modules():
        if type(module) is nn.Linear and not module.weight.is_meta:
            module.__dict__["forward"] = RowwiseForward(module, multiply)


def is_rowwise(module: nn.Module) -> bool:
    """Return whether `multiply_rowwise` has changed a module."""
    return isinstance(module.__dict__.get("forward"), RowwiseForward)

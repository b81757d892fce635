"""Makes the bits of an encoder's activations independent of the number of rows."""

import torch
from torch import nn

_ACTIVATIONS = frozenset({"act", "activation", "act_fn", "intermediate_act_fn"})
"""Names of children that are activations, in models of transformers."""


class _DenseInput(nn.Module):
    """Makes an activation's input contiguous.

    torch computes a part of a tensor with separate rows differently, depending on the number of
    rows.
    """

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        activated: torch.Tensor = self.activation(hidden.contiguous())
        return activated


def activate_dense_rows(model: nn.Module) -> None:
    """Make the inputs of all activations of a model contiguous."""
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if name in _ACTIVATIONS and next(child.parameters(), None) is None:
                setattr(parent, name, _DenseInput(child))

"""The module of a transformers model that computes logits."""

from typing import cast

from torch import nn


def output_layer(model: nn.Module) -> nn.Module | None:
    """Return the module of a transformers model that computes logits, or None."""
    find = getattr(model, "get_output_embeddings", None)
    return None if find is None else cast(nn.Module | None, find())

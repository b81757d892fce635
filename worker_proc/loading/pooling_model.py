"""A transformers model without an output layer, with the interface of one that has it."""

from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

INNER = "inner"
POOLER = "pooler"
"""The part of some models that converts the first hidden state to a vector, for classification."""


class PoolingModel(nn.Module):
    """Returns hidden states instead of a language model's logits.

    The same code can therefore check and compute a model that only pools.
    """

    def __init__(self, model: PreTrainedModel, position_offset: int = 0) -> None:
        """`position_offset`: the position id of a text's first token."""
        super().__init__()
        self.inner = model
        self._position_offset = position_offset

    @property
    def config(self) -> PretrainedConfig:
        return self.inner.config

    @property
    def base_model(self) -> nn.Module:
        """The part that computes the hidden states."""
        return cast(nn.Module, self.inner.base_model)

    def get_decoder(self) -> nn.Module:
        return self.base_model

    def get_input_embeddings(self) -> nn.Module:
        return cast(nn.Module, self.inner.get_input_embeddings())

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        logits_to_keep: torch.Tensor | None = None,
        **options: Any,
    ) -> SimpleNamespace:
        """Return hidden states of some rows as `logits`; without positions, of one text."""
        if position_ids is not None:
            position_ids = position_ids + self._position_offset
        output = self.base_model(input_ids=input_ids, position_ids=position_ids, **options)
        rows = output.last_hidden_state
        if logits_to_keep is not None:
            rows = rows.index_select(1, logits_to_keep)
        return SimpleNamespace(logits=rows)


def drop_pooler(model: PreTrainedModel) -> None:
    """Remove a part that no vector depends on; many checkpoints lack its weights."""
    if getattr(model, POOLER, None) is not None:
        setattr(model, POOLER, None)


def is_of_head(key: str, model: PreTrainedModel) -> bool:
    """Return whether a tensor belongs to a head that `model` does not have, given its name."""
    first, _, rest = key.partition(".")
    if first == model.base_model_prefix:
        first = rest.partition(".")[0]
    return first not in dict(model.named_children())

"""Sparse attention whose indexers choose some of the tokens before each one (DeepSeek-V3.2, GLM-5).

An indexer chooses `index_topk` tokens, and all where there are no more. The context of such a model
ends there, so that attention is that to all tokens, and no indexer is computed.
"""

import inspect
from collections.abc import Iterator
from types import MethodType
from typing import Any

from torch import nn
from transformers import PreTrainedModel

_PLAIN = (None, "eager", "sdpa")
"""The forms of attention for which an indexer's own forward is computed."""
_ARGUMENTS = {"hidden_states", "attention_mask", "past_key_values"}


class _AllTokens:
    """Takes the place of chosen tokens, and of a mask that shows which may be chosen."""

    def __getitem__(self, place: object) -> "_AllTokens":
        return self


ALL_TOKENS = _AllTokens()


def indexers_of(model: nn.Module) -> Iterator[tuple[nn.Module, Any]]:
    """Yield the attention modules that have an indexer, with it."""
    for module in model.modules():
        indexer = getattr(module, "indexer", None)
        if isinstance(indexer, nn.Module) and isinstance(getattr(indexer, "index_topk", None), int):
            names = inspect.signature(type(indexer).forward).parameters
            if set(names) >= _ARGUMENTS:
                yield module, indexer


def choose_all(model: PreTrainedModel) -> int | None:
    """Let the indexers of a model choose all tokens, wherever it attends as it is served.

    Returns how many tokens a text has for which that is right; None: there are no indexers.
    """
    lengths = []
    for module, indexer in indexers_of(model):
        lengths.append(indexer.index_topk)
        indexer.__dict__["forward"] = MethodType(_choose, indexer)
        module.register_forward_pre_hook(_give_mask, with_kwargs=True)
    return min(lengths, default=None)


def _choose(indexer: Any, *args: Any, **kwargs: Any) -> Any:
    """Take the place of an indexer's forward, also in a copy of the indexer."""
    is_plain = indexer.config._attn_implementation in _PLAIN
    return type(indexer).forward(indexer, *args, **kwargs) if is_plain else ALL_TOKENS


def _give_mask(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Give a mask to a module that takes a part of it for its indexer."""
    if kwargs.get("attention_mask") is None:
        kwargs = kwargs | {"attention_mask": ALL_TOKENS}
    return args, kwargs

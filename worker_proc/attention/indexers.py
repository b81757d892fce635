"""Sparse attention whose indexers choose some of the tokens before each one (DeepSeek-V3.2, GLM-5).

An indexer chooses `index_topk` tokens, and all where there are no more. The context of such a model
ends there, so that attention is that to all tokens, and no indexer is computed.
"""

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from types import MethodType
from typing import Any

from torch import nn
from transformers import PreTrainedModel

_PLAIN = (None, "eager", "sdpa")
"""The forms of attention for which an indexer's own forward is computed."""
_ARGUMENTS = {"hidden_states", "attention_mask", "past_key_values"}
_MASK_ARGUMENTS = {"topk_indices", "kv_length"}
"""Of a method that makes a mask of the tokens that an indexer has chosen."""


class _AllTokens:
    """Takes the place of chosen tokens, and of a mask that shows which may be chosen."""

    def __getitem__(self, place: object) -> "_AllTokens":
        return self


ALL_TOKENS = _AllTokens()


def indexers_of(model: nn.Module) -> Iterator[tuple[nn.Module, Any]]:
    """Yield the attention modules that have an indexer, with it."""
    for module in model.modules():
        indexer = getattr(module, "indexer", None)
        has_number = isinstance(getattr(indexer, "index_topk", None), int)
        if isinstance(indexer, nn.Module) and has_number:
            names = _takes(type(indexer).forward)
            if names >= _ARGUMENTS:
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
    for module in model.modules() if lengths else ():
        for name in _makers_of_masks(type(module)):
            module.__dict__[name] = MethodType(partial(_show_all, name), module)
    return min(lengths, default=None)


def _makers_of_masks(kind: type[nn.Module]) -> Iterator[str]:
    """Yield the names of a class's methods that make masks of chosen tokens."""
    for name, method in vars(kind).items():
        if inspect.isfunction(method) and _takes(method) >= _MASK_ARGUMENTS:
            yield name


def _takes(method: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(method).parameters)


def _show_all(name: str, module: Any, *args: Any, **kwargs: Any) -> Any:
    """Take the place of a method that makes a mask, also in a copy of the module."""
    is_plain = module.config._attn_implementation in _PLAIN
    return getattr(type(module), name)(module, *args, **kwargs) if is_plain else ALL_TOKENS


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

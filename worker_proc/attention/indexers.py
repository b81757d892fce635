"""Sparse attention whose indexers choose some of the tokens before each one (DeepSeek-V3.2, GLM-5).

An indexer chooses `index_topk` tokens, and all where there are no more. That of Qwen4-Exp chooses
`block_topk` blocks of `compress_ratio` tokens, and those after the last whole block. The context
of such a model ends where not all are chosen, so that attention is that to all tokens, and no
indexer is computed.
"""

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

_PLAIN = (None, "eager", "sdpa")
"""The forms of attention for which an indexer's own forward is computed."""
_ARGUMENTS = {"hidden_states", "attention_mask", "past_key_values"}
_MASK_ARGUMENTS = {"topk_indices", "kv_length"}
"""Of a method that makes a mask of the tokens that an indexer has chosen."""


class _AllTokens:
    """Takes the place of chosen tokens, and of a mask that shows which may be chosen."""

    dtype = torch.bool

    def __getitem__(self, place: object) -> "_AllTokens":
        return self

    def __and__(self, other: object) -> "_AllTokens":
        return self


ALL_TOKENS = _AllTokens()


def indexers_of(model: nn.Module) -> Iterator[tuple[nn.Module, Any]]:
    """Yield the attention modules that have an indexer, with it."""
    for module in model.modules():
        indexer = getattr(module, "indexer", None)
        if isinstance(indexer, nn.Module) and _num_chosen(indexer) is not None:
            names = _takes(type(indexer).forward)
            if names >= _ARGUMENTS:
                yield module, indexer


def _num_chosen(indexer: nn.Module) -> int | None:
    """Return how many tokens a text has at most of which an indexer chooses all."""
    number: Any = getattr(indexer, "index_topk", None)
    num_blocks: Any = getattr(indexer, "block_topk", None)
    size: Any = getattr(indexer, "compress_ratio", None)
    if isinstance(number, int):
        return number
    has_blocks = isinstance(num_blocks, int) and isinstance(size, int)
    return num_blocks * size + size - 1 if has_blocks else None


def choose_all(model: PreTrainedModel) -> int | None:
    """Let the indexers of a model choose all tokens, wherever it attends as it is served.

    Returns how many tokens a text has for which that is right; None: there are no indexers.
    """
    lengths: list[Any] = []
    for module, indexer in indexers_of(model):
        lengths.append(_num_chosen(indexer))
        indexer.__dict__.setdefault("config", module.config)  # which names the form of attention
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

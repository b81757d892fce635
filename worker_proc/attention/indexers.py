"""Sparse attention whose indexers choose some of the preceding tokens (DeepSeek-V3.2, GLM-5).

An indexer chooses `index_topk` tokens, or all if there are no more than that. Qwen4-Exp's indexer
chooses `block_topk` blocks of `compress_ratio` tokens, plus the tokens after the last whole block.
The context of such a model is limited to the length at which all tokens are chosen. Its attention
is then full attention, and no indexer is computed.
"""

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from worker_proc.recurrent.cache_argument import CACHE

_PLAIN = (None, "eager", "sdpa")
"""The attention implementations for which an indexer's own forward is computed."""
_ARGUMENTS = {"hidden_states", "attention_mask", CACHE}
_MASK_ARGUMENTS = {"topk_indices", "kv_length"}
"""Arguments of a method that builds a mask of the tokens chosen by an indexer."""


class _AllTokens:
    """Replaces an indexer's choice, and the mask of the tokens that it may choose."""

    dtype = torch.bool

    def __getitem__(self, place: object) -> "_AllTokens":
        return self

    def __and__(self, other: object) -> "_AllTokens":
        return self


ALL_TOKENS = _AllTokens()


def indexers_of(model: nn.Module) -> Iterator[tuple[nn.Module, Any]]:
    """Yield each attention module that has an indexer, and the indexer."""
    for module in model.modules():
        indexer = getattr(module, "indexer", None)
        if isinstance(indexer, nn.Module) and _num_chosen(indexer) is not None:
            names = _takes(type(indexer).forward)
            if names >= _ARGUMENTS:
                yield module, indexer


def _num_chosen(indexer: nn.Module) -> int | None:
    """Return the greatest number of tokens of which an indexer chooses all; None: unknown."""
    number: Any = getattr(indexer, "index_topk", None)
    num_blocks: Any = getattr(indexer, "block_topk", None)
    size: Any = getattr(indexer, "compress_ratio", None)
    if isinstance(number, int):
        return number
    has_blocks = isinstance(num_blocks, int) and isinstance(size, int)
    return num_blocks * size + size - 1 if has_blocks else None


def choose_all(model: PreTrainedModel) -> int | None:
    """Make the indexers of a model choose all tokens whenever it runs with paged attention.

    Returns the longest text for which this is exact, in tokens; None: there are no indexers.
    """
    lengths: list[Any] = []
    for module, indexer in indexers_of(model):
        lengths.append(_num_chosen(indexer))
        indexer.__dict__.setdefault("config", module.config)  # names the implementation
        indexer.__dict__["forward"] = MethodType(_choose, indexer)
        module.register_forward_pre_hook(_give_mask, with_kwargs=True)
    for module in model.modules() if lengths else ():
        for name in _makers_of_masks(type(module)):
            module.__dict__[name] = MethodType(partial(_show_all, name), module)
    return min(lengths, default=None)


def _makers_of_masks(kind: type[nn.Module]) -> Iterator[str]:
    """Yield the names of a class's methods that build masks of chosen tokens."""
    for name, method in vars(kind).items():
        if inspect.isfunction(method) and _takes(method) >= _MASK_ARGUMENTS:
            yield name


def _takes(method: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(method).parameters)


def _show_all(name: str, module: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace a method that builds a mask; works in copies of the module, too."""
    is_plain = module.config._attn_implementation in _PLAIN
    return getattr(type(module), name)(module, *args, **kwargs) if is_plain else ALL_TOKENS


def _choose(indexer: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace an indexer's forward; works in copies of the indexer, too."""
    is_plain = indexer.config._attn_implementation in _PLAIN
    return type(indexer).forward(indexer, *args, **kwargs) if is_plain else ALL_TOKENS


def _give_mask(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Pass a mask to a module that slices its mask for the indexer."""
    if kwargs.get("attention_mask") is None:
        kwargs = kwargs | {"attention_mask": ALL_TOKENS}
    return args, kwargs

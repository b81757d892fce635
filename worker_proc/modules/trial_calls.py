"""Call arguments and float32 copies of modules, for trials."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from worker_proc.attention.interface import transformers_attention
from worker_proc.loading.loaded_model import LoadedModel
from worker_proc.modules.coded_weights import dequantized

Call = dict[str, Any]
"""The arguments of a module, by name."""
Arguments = tuple[tuple[Any, ...], Call]
"""Positional arguments of a module, and those by name."""


class _Recorded(Exception):
    """Ends a forward once the arguments of all kinds of modules have been recorded."""


def record_calls(
    loaded: LoadedModel, modules: Sequence[nn.Module], num_tokens: int
) -> dict[type[nn.Module], Call]:
    """Return each kind of module's arguments in a text's own forward, in float32."""
    with transformers_attention(loaded.model):
        calls = first_calls(modules, lambda: compute_text(loaded, 0, num_tokens))
    return {kind: as_float(kwargs) for kind, (_, kwargs) in calls.items()}


def compute_text(loaded: LoadedModel, first_position: int, num_tokens: int) -> None:
    """Run a model's own forward over a text without a cache."""
    positions = torch.arange(first_position, first_position + num_tokens).unsqueeze(0)
    tokens = positions % loaded.vocab_size
    loaded.model(input_ids=tokens, position_ids=positions, use_cache=False)


def first_calls(
    modules: Sequence[nn.Module], forward: Callable[[], None]
) -> dict[type[nn.Module], Arguments]:
    """Run `forward` until each kind of module was called; return the first arguments of each."""
    calls: dict[type[nn.Module], Arguments] = {}
    kinds = {type(module) for module in modules}

    def record(module: nn.Module, args: tuple[Any, ...], kwargs: Call) -> None:
        calls.setdefault(type(module), (args, kwargs))
        if set(calls) == kinds:
            raise _Recorded

    handles = [module.register_forward_pre_hook(record, with_kwargs=True) for module in modules]
    try:
        with suppress(_Recorded):
            forward()
    finally:
        for handle in handles:
            handle.remove()
    return calls


def as_float(value: Any) -> Any:
    """Return an argument, or a collection of arguments, with floating-point tensors in float32."""
    if isinstance(value, tuple):
        return tuple(map(as_float, value))
    if isinstance(value, dict):
        return {key: as_float(one) for key, one in value.items()}
    is_real = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.float() if is_real else value


def at_positions(value: Any, positions: torch.Tensor, num_tokens: int) -> Any:
    """Return an argument restricted to some positions of its `[1, T, ...]` tensors."""
    if isinstance(value, tuple):
        return tuple(at_positions(one, positions, num_tokens) for one in value)
    if isinstance(value, dict):
        return {key: at_positions(one, positions, num_tokens) for key, one in value.items()}
    if isinstance(value, torch.Tensor) and value.shape[:2] == (1, num_tokens):
        return value.index_select(1, positions)
    return value


@contextmanager
def in_float32(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a float32 copy with the same configuration object, which names the attention."""
    shared = {
        id(value): value
        for part in module.modules()
        for value in part.__dict__.values()
        if isinstance(value, PretrainedConfig)
    }
    with dequantized(module):
        yield copy.deepcopy(module, shared).float()

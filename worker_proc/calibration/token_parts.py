"""The parts of a model that compute each token separately, and their arguments in a forward."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from worker_proc.attention.within_tokens import attends_in_tokens
from worker_proc.calibration.plain_products import multiplies_by_elements
from worker_proc.modules.packed_matrix import PackedMatrix
from worker_proc.recurrent.rowwise import computes_rowwise

Calls = dict[nn.Module, tuple[torch.Tensor, ...]]
"""The arguments of each part, by module."""


class TokenPart(NamedTuple):
    """A part of a model without attention."""

    name: str
    module: nn.Module
    is_entered: bool
    """True if an enclosing module computes its elementwise functions by `rowwise`."""


@contextmanager
def recorded_calls(model: nn.Module) -> Iterator[Calls]:
    """Record the arguments of each part of a model that does not mix tokens."""
    calls: Calls = {}

    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # A part with other arguments is tried only as a part of the whole forward.
        has_streams = _has_packed_matrices(module) or attends_in_tokens(module)
        dims = (3, 4) if has_streams else (3,)
        if kwargs or not all(isinstance(v, torch.Tensor) and v.dim() in dims for v in args):
            return
        if len({value.shape[1] for value in args}) == 1 and not _has_factors_of(module, args):
            calls[module] = args

    parts = _parts_without_attention("", model)
    handles = [part.module.register_forward_pre_hook(record, with_kwargs=True) for part in parts]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def distinct_parts(
    model: nn.Module, calls: Calls
) -> Iterator[tuple[TokenPart, tuple[torch.Tensor, ...]]]:
    """Yield one part of each type, shape and input shape, with its arguments."""
    seen = set()
    for part in _parts_without_attention("", model):
        if (args := calls.get(part.module)) is not None:
            shapes = (tuple(t.shape) for t in (*part.module.parameters(), *args))
            kind = type(part.module), part.is_entered, *shapes
            if kind not in seen:
                seen.add(kind)
                yield part, args


def _parts_without_attention(
    name: str, module: nn.Module, is_entered: bool = False
) -> Iterator[TokenPart]:
    if not any(_mixes_tokens(part) for part in module.modules()):
        yield TokenPart(name, module, is_entered)
        return
    is_entered |= computes_rowwise(module)
    for child_name, child in module.named_children():
        # Embeddings compute nothing; convolutions are parts of recurrent layers, and take columns.
        if not isinstance(child, nn.Embedding | nn.Conv1d):
            path = f"{name}.{child_name}".lstrip(".")
            yield from _parts_without_attention(path, child, is_entered)


def _has_packed_matrices(module: nn.Module) -> bool:
    """Return whether a module itself multiplies by packed matrices; its rows may have streams."""
    return any(isinstance(value, PackedMatrix) for value in module.__dict__.values())


def _mixes_tokens(module: nn.Module) -> bool:
    return "paged_layer" in module.__dict__ or "recurrent_layer" in module.__dict__


def _has_factors_of(module: nn.Module, args: tuple[torch.Tensor, ...]) -> bool:
    """Return whether a module multiplies each row by elements, and rows are the first dimension.

    Norms of heads in Chameleon take tokens, heads and values, without a batch. The second dimension
    is then one of the factors. `multiplies_by_elements` tries them with various numbers of rows.
    """
    shapes = {tuple(weight.shape) for weight in module.parameters()}
    return shapes == {tuple(args[0].shape[1:])} and multiplies_by_elements(module)

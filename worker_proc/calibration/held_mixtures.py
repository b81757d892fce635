"""Lets mixtures of experts return for a token what they have returned for it before.

Two ways to compute a row round differently, and the row may then go to other experts, which
compute something else. So where two ways are compared that differ in attention, the outputs of
mixtures may be held: each of them computes every row by itself, and is proven apart.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from worker_proc.modules.experts import FusedExperts

_EXPERTS = "experts"


class Rows(NamedTuple):
    """Consecutive tokens of a text."""

    text: int
    start: int
    end: int


def mixtures_of(model: nn.Module) -> list[nn.Module]:
    """Return the modules that choose experts for each row."""
    return [
        module
        for module in model.modules()
        if isinstance(module, FusedExperts)
        or isinstance(getattr(module, _EXPERTS, None), nn.Module)
    ]


class HeldMixtures:
    """What the mixtures of a model have returned for the tokens of some texts."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = mixtures_of(model)
        self._outputs: dict[tuple[nn.Module, int], torch.Tensor] = {}

    @contextmanager
    def recorded(self, text: int) -> Iterator[None]:
        """Keep what is returned for a text that is computed by itself, at once."""

        def record(module: nn.Module, args: Any, output: Any) -> None:
            self._outputs[module, text] = _first(output).flatten(0, -2).clone()

        with self._hooked(record):
            yield

    @contextmanager
    def returned(self, rows: Sequence[Rows]) -> Iterator[None]:
        """Return again what was kept, for a step over these rows."""

        def replace(module: nn.Module, args: Any, output: Any) -> Any:
            parts = [self._outputs[module, text][start:end] for text, start, end in rows]
            held = torch.cat(parts).view(_first(output).shape)
            return (held, *output[1:]) if isinstance(output, tuple) else held

        with self._hooked(replace):
            yield

    @contextmanager
    def _hooked(self, hook: Any) -> Iterator[None]:
        handles = [module.register_forward_hook(hook) for module in self._modules]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _first(output: Any) -> torch.Tensor:
    found: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return found

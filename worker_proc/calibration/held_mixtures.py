"""Holds the outputs of mixtures of experts when two computations of a token are compared.

Two computations of a row round differently, and the row may then go to other experts, with a very
different result. When two computations are compared that differ in attention, the outputs of
mixtures can therefore be held. The outputs of each mixture for the same rows are then compared
separately.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from worker_proc.modules.experts.mixture import FusedExperts

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
    """The outputs of a model's mixtures for the tokens of some texts."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = mixtures_of(model)
        self._inputs: dict[tuple[nn.Module, int], list[torch.Tensor]] = {}
        self._outputs: dict[tuple[nn.Module, int], torch.Tensor] = {}
        self._errors: dict[nn.Module, list[float]] = {}

    @property
    def error(self) -> float:
        """The median relative error of a mixture's rows, for the mixture with the largest one."""
        return max(map(statistics.median, self._errors.values()), default=0.0)

    @contextmanager
    def recorded(self, text: int) -> Iterator[None]:
        """Keep inputs and outputs while a text is computed alone, at once."""

        def record(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            given = filter(_has_rows, (*args, *kwargs.values()))
            self._inputs[module, text] = [_rows(one).clone() for one in given]
            self._outputs[module, text] = _rows(_first(output)).clone()

        with self._hooked(record):
            yield

    @contextmanager
    def returned(self, rows: Sequence[Rows]) -> Iterator[None]:
        """Substitute the kept inputs and outputs in a step over these rows; adds to `error`."""

        def give(module: nn.Module, args: Any, kwargs: Any) -> Any:
            kept = zip(*(self._inputs[module, text] for text, _, _ in rows), strict=True)

            def give_one(value: Any) -> Any:
                if not _has_rows(value):
                    return value
                held = next(kept, None)
                if held is None:
                    raise ValueError("a mixture of experts takes more rows in a step than alone")
                return _cut(held, rows).view(value.shape)

            args = tuple(map(give_one, args))
            return args, {name: give_one(value) for name, value in kwargs.items()}

        def replace(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            held = _cut([self._outputs[module, text] for text, _, _ in rows], rows)
            found = _first(output)
            difference = (_rows(found).float() - held.float()).norm(dim=-1)
            errors = difference / held.float().norm(dim=-1).clamp_min(1e-6)
            errors = errors.nan_to_num(torch.inf)  # greater than any bound
            self._errors.setdefault(module, []).extend(errors.tolist())
            held = held.view(found.shape)
            return (held, *output[1:]) if isinstance(output, tuple) else held

        with self._hooked(replace, give):
            yield

    @contextmanager
    def _hooked(
        self, hook: Callable[..., Any], pre_hook: Callable[..., Any] | None = None
    ) -> Iterator[None]:
        modules = self._modules
        handles = [one.register_forward_hook(hook, with_kwargs=True) for one in modules]
        if pre_hook is not None:
            handles += [
                one.register_forward_pre_hook(pre_hook, with_kwargs=True) for one in modules
            ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _has_rows(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 1


def _rows(value: torch.Tensor) -> torch.Tensor:
    return value.flatten(0, -2)


def _cut(kept: Sequence[torch.Tensor], rows: Sequence[Rows]) -> torch.Tensor:
    """Return these rows of the kept tensors, one for each text."""
    cut = [one[start:end] for one, (_, start, end) in zip(kept, rows, strict=True)]
    return torch.cat(cut)


def _first(output: Any) -> torch.Tensor:
    found: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return found

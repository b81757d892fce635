"""A layout of a model's weights in GGUF files, and layouts that change names."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from transformers import PretrainedConfig

Weights = Mapping[str, torch.Tensor]


class Layout(NamedTuple):
    """What is done with the weights of one type of model."""

    apart: Callable[[Weights, PretrainedConfig], dict[str, torch.Tensor]]
    together: Callable[[Weights, PretrainedConfig], dict[str, torch.Tensor]]


def renamed(weights: Weights, names: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """Return weights of which ends of names have changed."""
    changed = {}
    for name, tensor in weights.items():
        old = next((old for old in names if name.endswith(old)), None)
        changed[name if old is None else name.removesuffix(old) + names[old]] = tensor
    return changed


def renamed_starts(weights: Weights, old: str, new: str) -> dict[str, torch.Tensor]:
    """Return weights of which the starts of names have changed."""
    return {new + name.removeprefix(old): tensor for name, tensor in weights.items()}


def inverse(names: Mapping[str, str]) -> dict[str, str]:
    return {new: old for old, new in names.items()}


def named(names: Mapping[str, str]) -> Layout:
    """Return a layout in which ends of names have changed."""
    return Layout(
        lambda weights, config: renamed(weights, names),
        lambda parts, config: renamed(parts, inverse(names)),
    )


def then(*layouts: Layout) -> Layout:
    """Return what layouts do one after the other."""

    def apart(weights: Weights, config: PretrainedConfig) -> dict[str, torch.Tensor]:
        for layout in layouts:
            weights = layout.apart(weights, config)
        return dict(weights)

    def together(parts: Weights, config: PretrainedConfig) -> dict[str, torch.Tensor]:
        for layout in reversed(layouts):
            parts = layout.together(parts, config)
        return dict(parts)

    return Layout(apart, together)

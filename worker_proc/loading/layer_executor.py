"""What computes decoder layers in place of their modules: C++ on the CPU, Triton on CUDA."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn

from worker_proc.attention.interface import AttentionBackend
from worker_proc.loading.ranks import Ranks

Angles = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines of a step's positions: `[1, T, num_rotated]` each."""


class Stack(Protocol):
    """Computes consecutive layers that an executor has read."""

    def forward(self, hidden_states: torch.Tensor, angles: Sequence[Angles]) -> torch.Tensor:
        """Return `[1, T, hidden_size]` after the last layer, given the angles of each layer."""

    def take_ranks(self, ranks: Ranks) -> None:
        """Add up the rows of all ranks after each attention and MLP, in all later steps."""


class LayerExecutor(Protocol):
    """Reads layers off their modules, and computes them; the type of a layer is its own."""

    @property
    def name(self) -> str:
        """The `decoder` of the model's facts."""

    def covers(self, backend: AttentionBackend) -> bool:
        """Return whether its layers can attend by this backend."""

    def read(self, module: nn.Module, factor: float) -> Any | None:
        """Return what a layer computes, given the factor on its residual; None: it cannot."""

    def stack(self, layers: Sequence[Any], settings: Sequence[Any], dtype: torch.dtype) -> Stack:
        """Return what computes layers that were read, given the `LayerSettings` of each."""

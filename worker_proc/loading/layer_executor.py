"""Interfaces of the decoders that replace layers' modules: C++ on the CPU, Triton on CUDA."""

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
        """Sum the rows of all ranks after each attention and MLP, in all later steps."""


class LayerExecutor(Protocol):
    """Reads layers off their modules and computes them; each executor has its own layer type."""

    @property
    def name(self) -> str:
        """The name of the executor in the model's facts (`decoder`)."""

    def covers(self, backend: AttentionBackend) -> bool:
        """Return whether the executor's layers can attend through this backend."""

    def read(self, module: nn.Module, factor: float) -> Any | None:
        """Return a layer's description, given its residual factor; None: it is not supported."""

    def stack(self, layers: Sequence[Any], settings: Sequence[Any], dtype: torch.dtype) -> Stack:
        """Return a stack that computes layers, given the `LayerSettings` of each."""

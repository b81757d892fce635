"""Norms of all heads are divided among ranks if they are proven, on small and on large rows."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from worker_proc.errors import UnsupportedModel
from worker_proc.parallel.division.gated_rank_norm import divide_gated_norm
from worker_proc.parallel.division.rank_norm import divide_norm
from worker_proc.parallel.share import Section, Share

SIZE = 8
GREATEST = 20.0
"""Less than some values of the largest rows that are tried, and more than those of all others."""


class Norm(nn.Module):
    """A root-mean-square norm, after gates if there are any."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(SIZE) + 0.5, requires_grad=False)
        self.eps = 1e-5

    def forward(self, hidden: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        if gate is not None:
            hidden = hidden * functional.silu(gate)
        squares = hidden.pow(2).mean(-1, keepdim=True)
        return self.weight * hidden * torch.rsqrt(squares + self.eps)


class Overflowing(Norm):
    """A norm that is not computed for large values."""

    def forward(self, hidden: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        is_large = hidden.abs().amax(-1, keepdim=True) > GREATEST
        return super().forward(hidden, gate).where(~is_large, torch.nan)


def test_a_norm_is_divided_unless_results_for_large_rows_are_not_numbers() -> None:
    assert len(divide_norm(Norm(), slice(0, SIZE // 2), 2).factors) == SIZE // 2
    with pytest.raises(UnsupportedModel, match="relative error inf"):
        divide_norm(Overflowing(), slice(0, SIZE // 2), 2)


def test_a_gated_norm_is_divided_unless_results_for_large_rows_are_not_numbers() -> None:
    groups, share = Section(2, SIZE // 2), Share(0, 2)
    whole = Section(1, SIZE)
    assert len(divide_gated_norm(Norm(), whole, share).factors) == SIZE // 2
    with pytest.raises(UnsupportedModel, match="relative error inf"):
        divide_gated_norm(Overflowing(), whole, share)
    with pytest.raises(UnsupportedModel, match="2 groups"):
        divide_gated_norm(Norm(), groups, share)

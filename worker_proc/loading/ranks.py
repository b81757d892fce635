"""The decoder's interface to the other ranks, which have other parts of the same layers."""

from typing import Protocol

import torch

from worker_proc.native.structures import ProgramArgs, RunArgs


class Ranks(Protocol):
    """All ranks of a model, as seen by one of them; each rank makes the same calls."""

    def check_row(self, row_bytes: int) -> None:
        """Raise ValueError if the ranks cannot exchange rows of this size."""

    def add(self, rows: torch.Tensor) -> None:
        """Replace rows, `[T, width]`, by the sums of all ranks' rows."""

    def execute(self, program: ProgramArgs, run: RunArgs) -> None:
        """Execute a program in which the ranks sum rows."""

    def gather(self, columns: torch.Tensor) -> torch.Tensor:
        """Return the columns of all ranks, concatenated."""

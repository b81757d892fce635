"""The interface for sums of rows on the devices of ranks (implemented by cuda/rank_group.py)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch

DIFFERS = -2
"""Replaces a token if the devices of two ranks have chosen different ones."""


class DeviceGroup(Protocol):
    """One rank's view of the group; every rank makes the same calls in the same order.

    A call returns before the device has computed it, and the device then waits for the devices of
    all ranks. No call may therefore begin before all ranks have received the step
    (`RankExchange.begin_step`).
    """

    def join(self, path: Path, members: Sequence[int]) -> None:
        """Connect with the other ranks through a file at `path`, which is unused so far.

        `members` are the pids of all ranks. Raises RuntimeError if they differ from those of the
        last call: captured graphs would contain connections to dead processes.
        """

    def add(self, rows: torch.Tensor) -> None:
        """Replace dense rows, `[T, width]`, by the sums of all ranks' rows; all get equal bits."""

    def gather(self, columns: torch.Tensor) -> torch.Tensor:
        """Return the columns of all ranks, `[T, num_ranks * width]`, in the order of the ranks."""

    def mark_differences(self, token_ids: torch.Tensor) -> None:
        """Replace tokens, `[T]`, by `DIFFERS` where two ranks have chosen different ones."""

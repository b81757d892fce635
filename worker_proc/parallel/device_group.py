"""What adds up the rows of ranks on their devices, as the exchange sees it (cuda/rank_group.py)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch

DIFFERS = -2
"""Stands for a token that the ranks' devices have chosen differently."""


class DeviceGroup(Protocol):
    """One rank's side; every rank makes the same calls in the same order.

    A call returns before the device has computed it, and a device waits for those of all ranks. So
    no call may begin before all ranks have the step (`RankExchange.begin_step`).
    """

    def join(self, path: Path, members: Sequence[int]) -> None:
        """Connect with the other ranks, which meet at a file that no earlier ranks have used.

        `members` are their processes. RuntimeError: they are others than at the last call, so what
        was captured belongs to ranks that are gone.
        """

    def add(self, rows: torch.Tensor) -> None:
        """Replace dense rows, `[T, width]`, by the sums of all ranks' rows; all get equal bits."""

    def gather(self, columns: torch.Tensor) -> torch.Tensor:
        """Return the columns of all ranks, `[T, num_ranks * width]`, in the order of the ranks."""

    def mark_differences(self, token_ids: torch.Tensor) -> None:
        """Replace tokens, `[T]`, by `DIFFERS` where another rank has chosen another one."""

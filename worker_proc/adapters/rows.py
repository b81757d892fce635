"""The adapters of the current step's rows, for the code that computes projections."""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from worker_proc.adapters.matrices import LoadedAdapter
from worker_proc.adapters.sites import Site
from worker_proc.native.kernels import NativeLibrary
from worker_proc.native.structures import AdaptationArgs, AdaptedRowsArgs, AdaptedSiteArgs

MAX_SITES = 3
"""Maximum number of sites of one instruction: queries, keys and values."""
_LANES = 16
Part = tuple[LoadedAdapter, Sequence[int]]
"""An adapter, and its rows."""


class StepRows:
    """The adapted rows of a step; there are none before `begin`."""

    def __init__(self, library: NativeLibrary) -> None:
        self._library = library
        self._inner = torch.empty(0)
        self._kept: list[Any] = []
        """Memory that the arguments point to."""
        self.num_rows = 0
        self.parts: Sequence[Part] = ()
        self.args: AdaptationArgs | None = None
        """Arguments for native calls; None: no row of the step has an adapter."""

    @property
    def address(self) -> int | None:
        return None if self.args is None else ctypes.addressof(self.args)

    def clear(self) -> None:
        """Begin a step without adapters."""
        self.args, self.parts, self._kept = None, (), []

    def begin(self, parts: Sequence[Part], num_rows: int) -> None:
        """Begin a step of `num_rows` rows; `parts` are adapters with their rows."""
        max_rank = max(1, *(adapter.max_rank for adapter, _ in parts))  # 0: in other stages only
        stride = -(-max_rank // _LANES) * _LANES
        if self._inner.numel() < MAX_SITES * num_rows * stride:
            self._inner = torch.empty(MAX_SITES * num_rows * stride)
        columns = [(ctypes.c_int32 * len(rows))(*rows) for _, rows in parts]
        table = (AdaptedRowsArgs * len(parts))(
            *(
                AdaptedRowsArgs(ctypes.addressof(column), adapter.address, len(column))
                for (adapter, _), column in zip(parts, columns, strict=True)
            )
        )
        self._kept = [columns, table]
        self.parts, self.num_rows = parts, num_rows
        self.args = AdaptationArgs(
            ctypes.addressof(table),
            self._inner.data_ptr(),
            len(parts),
            stride,
            num_rows * stride,
        )

    def add_products(
        self, number: int, site: Site, rows: torch.Tensor, outputs: torch.Tensor
    ) -> None:
        """Add products to the outputs of a site, `[num_rows, num_outputs]`, in place."""
        assert self.args is not None
        if len(rows) != self.num_rows:
            raise ValueError(f"{site.module} got {len(rows)} rows of a step of {self.num_rows}")
        args = AdaptedSiteArgs(number, site.num_outputs, 0)
        self._library.adapt(args, rows, outputs, self.args)

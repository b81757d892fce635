"""The state space model of Mamba-2, with one decay for each token and head."""

import math
from typing import Any

import torch
from torch.nn import functional

from worker_proc.native.kernels import NativeLibrary
from worker_proc.recurrent.calls import check_arguments
from worker_proc.recurrent.rowwise import rowwise
from worker_proc.recurrent.scan import Scan, ScanRows, tiled_shape
from worker_proc.recurrent.state_pool import StatePool
from worker_proc.recurrent.state_spec import StateSpec

_UNBOUNDED = (0.0, math.inf)


class Mamba2Scan:
    """Replaces transformers' `mamba2_chunk_scan` in one module.

    All tensors except parameters have a first dimension of 1. `hidden_states` are `[T, num_heads,
    num_values]`, `dt` is `[T, num_heads]`, and `B` and `C` are `[T, num_groups, num_keys]`.
    """

    function = "mamba2_chunk_scan"

    def __init__(
        self, pool: StatePool, states: torch.Tensor, library: NativeLibrary | None
    ) -> None:
        self._scan = Scan(pool, states, library, corrects=False)

    @staticmethod
    def describe(  # noqa: PLR0917 (the signature is transformers')
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        chunk_size: int,
        **others: Any,
    ) -> tuple[StateSpec, torch.Tensor]:
        """Return the state of a call on the meta device, and its result."""
        check_arguments(Mamba2Scan.function, others)
        shape = tiled_shape(hidden_states.shape[2], B.shape[3], hidden_states.shape[3])
        spec = StateSpec(Mamba2Scan.function, shape, is_window=False)
        return spec, torch.empty_like(hidden_states)

    def __call__(  # noqa: PLR0917
        self,
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        chunk_size: int,
        D: torch.Tensor | None = None,
        dt_bias: torch.Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = _UNBOUNDED,
        **others: Any,
    ) -> torch.Tensor:
        """Return `[1, T, num_heads, num_values]`."""
        rates = dt[0].float()
        if dt_bias is not None:
            rates = rates + dt_bias.float()
        if dt_softplus:
            rates = rowwise(functional.softplus, rates)
        rates = rates.clamp(*dt_limit)
        decays = rowwise(torch.exp, rates * A.float())
        skips = None if D is None else D.float()
        rows = ScanRows(C[0], B[0], hidden_states[0], decays, rates, skips)
        return self._scan(rows).unsqueeze(0)

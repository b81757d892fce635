"""The modules of RWKV's blocks, which mix each token with the previous one.

transformers' modules shift rows by a child, `time_shift`, which assumes that all rows belong to one
text. Their own forward runs with another shift, and with another average instead of transformers'
function.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from worker_proc.native.kernels import NativeLibrary
from worker_proc.recurrent.convolution import CausalConvolution
from worker_proc.recurrent.functions import forward_with
from worker_proc.recurrent.rowwise import RowwiseFunctions
from worker_proc.recurrent.state_pool import StatePool
from worker_proc.recurrent.state_spec import RecurrentSpec, StateSpec
from worker_proc.recurrent.weighted_average import WeightedAverage

_SHIFT_BY_ONE = (0, 0, 1, -1)


def is_rwkv(module: nn.Module) -> bool:
    """Return whether a module mixes rows with the previous ones, like RWKV's modules."""
    shift = getattr(module, "time_shift", None)
    is_shift = isinstance(shift, nn.ZeroPad2d) and tuple(shift.padding) == _SHIFT_BY_ONE
    return is_shift and hasattr(module, "time_mix_receptance")


def rwkv_spec(module: nn.Module, name: str) -> RecurrentSpec:
    """Return a module's states: the last row and, if it has averages, their sums."""
    parts: Any = module
    width = parts.time_mix_receptance.shape[-1]
    states = [StateSpec("time_shift", (1, width), is_window=True)]
    if hasattr(module, "time_decay"):
        shape = 3, len(parts.time_decay)
        states.append(StateSpec(WeightedAverage.function, shape, is_window=False))
    return RecurrentSpec(name, width, tuple(states))


class RwkvLayer:
    """The forward of one module over packed rows."""

    def __init__(
        self, module: nn.Module, spec: RecurrentSpec, library: NativeLibrary | None
    ) -> None:
        self.spec = spec
        self.is_rowwise = True
        self.plain_products: Sequence[str] = ()
        self._module: Any = module
        self._library = library
        self._shift: CausalConvolution | None = None
        self._average: WeightedAverage | None = None
        weight = torch.zeros(spec.input_size, 2)
        weight[:, 0] = 1.0
        self._weight = weight
        """Weight of a convolution whose result is the previous row."""
        self._forward = forward_with(module, {WeightedAverage.function: self._averages})

    def attach(self, pool: StatePool) -> None:
        """Use the states of `pool` from now on."""
        windows, *sums = pool.tensors[self.spec.module_name]
        self._shift = CausalConvolution(pool, windows, self._library)
        self._average = WeightedAverage(pool, sums[0], self._library) if sums else None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the module's own forward, for packed rows."""
        self._module.__dict__["time_shift"] = self._shifted  # the child is not called
        try:
            with RowwiseFunctions():
                return self._forward(*args, **kwargs)
        finally:
            del self._module.__dict__["time_shift"]

    def _shifted(self, rows: torch.Tensor) -> torch.Tensor:
        assert self._shift is not None
        return self._shift(rows.transpose(1, 2), self._weight).transpose(1, 2)

    def _averages(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        assert self._average is not None
        return self._average(*args, **kwargs)

"""The recurrent block of Griffin (RecurrentGemma): a convolution and a gated state of each channel.

transformers' block keeps its states in itself and has no function whose place could be taken. Its
forward is written here again, over its parts; the gates are computed by the module's own code.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from worker_proc.native.kernels import NativeLibrary
from worker_proc.recurrent.convolution import CausalConvolution
from worker_proc.recurrent.gated_recurrence import GatedRecurrence
from worker_proc.recurrent.rowwise import RowwiseFunctions
from worker_proc.recurrent.state_pool import StatePool
from worker_proc.recurrent.state_spec import RecurrentSpec, StateSpec

_CHILDREN = {"act_fn", "conv_1d", "linear_out", "linear_x", "linear_y", "rg_lru"}


def is_griffin(module: nn.Module) -> bool:
    """Return whether a module has the parts of Griffin's recurrent block."""
    children = {name for name, _ in module.named_children()}
    return children == _CHILDREN and hasattr(module.rg_lru, "_rnn_scan")


def griffin_spec(module: nn.Module, name: str) -> RecurrentSpec:
    """Return the states of a block: a window of its convolution, and a number of each channel."""
    block: Any = module
    width, _, num_taps = block.conv_1d.weight.shape
    window = StateSpec(CausalConvolution.function, (num_taps - 1, width), is_window=True)
    state = StateSpec("gated recurrence", (width,), is_window=False)
    return RecurrentSpec(name, block.linear_x.in_features, (window, state))


class GriffinLayer:
    """The forward of one block over packed rows."""

    def __init__(
        self, module: nn.Module, spec: RecurrentSpec, library: NativeLibrary | None
    ) -> None:
        self.spec = spec
        self.is_rowwise = True
        self.plain_products: Sequence[str] = ()
        self._block: Any = module
        self._library = library
        self._convolution: CausalConvolution | None = None
        self._recurrence: GatedRecurrence | None = None

    def attach(self, pool: StatePool) -> None:
        """Compute with the states of a pool from now on."""
        windows, states = pool.tensors[self.spec.module_name]
        self._convolution = CausalConvolution(pool, windows, self._library)
        self._recurrence = GatedRecurrence(pool, states, self._library)

    def forward(
        self, hidden: torch.Tensor, *, position_ids: torch.Tensor, **others: Any
    ) -> tuple[torch.Tensor, None]:
        """Return `[1, T, hidden_size]` for as much, and nothing else."""
        assert self._convolution is not None
        block = self._block
        with RowwiseFunctions():
            gates = block.act_fn(block.linear_y(hidden))
            channels = block.linear_x(hidden).transpose(1, 2)
            weight, bias = block.conv_1d.weight.squeeze(1), block.conv_1d.bias
            convolved = self._convolution(channels, weight, bias).transpose(1, 2)
            block.rg_lru.__dict__["_rnn_scan"] = self._scan
            try:
                mixed = block.rg_lru(convolved, position_ids)
            finally:
                del block.rg_lru.__dict__["_rnn_scan"]
            return block.linear_out(mixed * gates), None

    def _scan(
        self, hidden_states: torch.Tensor, recurrent_gate: torch.Tensor, **others: Any
    ) -> tuple[torch.Tensor, None]:
        """Take the place of the module's scan, of `[1, T, num_channels]`."""
        assert self._recurrence is not None
        out = self._recurrence(hidden_states[0].float(), recurrent_gate[0].float())
        return out.to(hidden_states.dtype).unsqueeze(0), None

"""The recurrent block of Griffin (RecurrentGemma): a convolution, and a gated state per channel.

transformers' block keeps its states in itself and calls no function that could be replaced. Its
forward is therefore rewritten here in terms of its parts; the module's own code computes the gates.
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
    """Return a block's states: the convolution's window, and a number for each channel."""
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
        """Use the states of `pool` from now on."""
        windows, states = pool.tensors[self.spec.module_name]
        self._convolution = CausalConvolution(pool, windows, self._library)
        self._recurrence = GatedRecurrence(pool, states, self._library)

    def forward(
        self, hidden: torch.Tensor, *, position_ids: torch.Tensor, **others: Any
    ) -> tuple[torch.Tensor, None]:
        """Return `[1, T, hidden_size]`, given the same shape, and None."""
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
        """Replace the module's scan of `[1, T, num_channels]`."""
        assert self._recurrence is not None
        out = self._recurrence(hidden_states[0].float(), recurrent_gate[0].float())
        return out.to(hidden_states.dtype).unsqueeze(0), None

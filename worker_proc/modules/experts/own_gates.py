"""Experts whose gates only their own code computes, for example with soft caps (Inkling-2).

The rows of a step are sorted by expert. Products use packed matrices, and the module's own method,
computed row by row, connects them. A row's experts are added in float32 in ascending order, so that
its bits do not depend on the other rows.
"""

from collections.abc import Callable

import torch
from torch import nn

from worker_proc.modules.experts.grouped import (
    ExpertModule,
    agrees,
    own_results,
    read_experts,
    trials,
)
from worker_proc.modules.packed_linear import NativeLinear, make_linear
from worker_proc.native.kernels import NativeLibrary
from worker_proc.recurrent.rowwise import RowwiseFunctions

_GATE = "_apply_gate"
"""The method of transformers' experts that takes concatenated gates and factors."""


class OwnGatedExperts(nn.Module):
    """The sum of down(gate(up(x))) over each row's experts, multiplied by the given weights."""

    def __init__(
        self,
        library: NativeLibrary,
        gate: Callable[[torch.Tensor], torch.Tensor],
        experts: ExpertModule,
    ) -> None:
        """Pack all experts' weights; `gate` converts first products to inputs of the second."""
        super().__init__()
        self.num_experts = len(experts.down)
        self._gate = gate
        self._dtype = experts.down.weights.dtype
        self._up, self._down = (
            [self._packed(library, part[number]) for number in range(len(part))]
            for part in (experts.up, experts.down)
        )

    @staticmethod
    def _packed(library: NativeLibrary, matrix: torch.Tensor) -> NativeLinear:
        linear = make_linear(matrix.detach().contiguous(), None, library)
        assert isinstance(linear, NativeLinear)
        return linear

    def forward(
        self, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return `[num_rows, hidden_size]`, given `[num_rows, top_k]` experts and weights.

        An expert number out of range contributes 0.
        """
        out = torch.zeros(hidden.shape, dtype=torch.float32)
        with RowwiseFunctions():
            for number in top_k_index.unique().tolist():  # in ascending order
                if not 0 <= number < self.num_experts:
                    continue
                rows, places = torch.where(top_k_index == number)
                gated = self._gate(self._up[number](hidden[rows]))
                weights = top_k_weights[rows, places, None].float()
                out.index_add_(0, rows, self._down[number](gated).float() * weights)
        return out.to(self._dtype)


@torch.inference_mode()
def own_gated_experts(
    module: nn.Module, library: NativeLibrary, *, is_proven: bool
) -> OwnGatedExperts | None:
    """Return a module's replacement, if its experts are proven equivalent."""
    experts = read_experts(module)
    gate = getattr(module, _GATE, None)
    if experts is None or not experts.is_gated or not callable(gate):
        return None
    if experts.up.biases is not None or experts.takes_row_codes:
        return None
    if is_proven:
        return OwnGatedExperts(library, gate, experts)
    tried = trials(experts.sizes, experts.down.weights.dtype)
    expected = own_results(module, tried)
    if expected is None:
        return None
    candidate = OwnGatedExperts(library, gate, experts)
    return candidate if agrees(candidate(*tried), expected, tried) else None

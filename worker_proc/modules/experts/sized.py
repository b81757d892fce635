"""Experts that take rows sorted by expert, and the number of rows for each (JetMoE).

A module multiplies by one matrix for each expert; the code that chooses, sorts and adds stays
transformers' own. The matrices are packed, so that a row's bits do not depend on the other rows.
"""

from collections.abc import Sequence
from inspect import signature

import torch
from torch import nn

from worker_proc.loading.deferred_module import make_generator
from worker_proc.modules.packed_linear import PackedLinear, make_linear
from worker_proc.modules.trial_errors import TRIAL_SCALES, greatest_error
from worker_proc.native.kernels import NativeLibrary

ARGUMENTS = ["inputs", "expert_size"]
MAX_ERROR = {torch.float32: 1e-5, torch.bfloat16: 0.02}
"""Relative to the largest value."""


class SizedExperts(nn.Module):
    """Multiplies sorted rows by packed matrices."""

    def __init__(self, weight: torch.Tensor, library: NativeLibrary | None) -> None:
        """Pack `[num_experts, out_features, in_features]`."""
        super().__init__()
        self.num_experts, self.output_size, self.input_size = weight.shape
        self.layers: Sequence[PackedLinear] = [make_linear(one, None, library) for one in weight]

    def forward(self, inputs: torch.Tensor, expert_size: Sequence[int]) -> torch.Tensor:
        """Return `[T, out_features]` for `[T, in_features]`."""
        parts = zip(self.layers, inputs.split(list(expert_size)), strict=True)
        return torch.cat([layer(rows) for layer, rows in parts if len(rows)])


@torch.inference_mode()
def pack_sized_experts(model: nn.Module, library: NativeLibrary | None) -> None:
    """Replace such modules of a model, if the replacement agrees with them."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if _is_sized(child):
                packed = SizedExperts(child.get_parameter("weight"), library)
                if _agree(child, packed):
                    setattr(parent, name, packed)


def _is_sized(module: nn.Module) -> bool:
    parameters = dict(module.named_parameters())
    return (
        list(signature(type(module).forward).parameters)[1:] == ARGUMENTS
        and list(parameters) == ["weight"]
        and parameters["weight"].dim() == 3
        and not parameters["weight"].is_meta
    )


def _agree(module: nn.Module, packed: SizedExperts) -> bool:
    """Return whether both give the same results for rows of several scales."""
    sizes = [1 + number % 3 for number in range(packed.num_experts)]
    dtype = module.get_parameter("weight").dtype
    rows = torch.randn(sum(sizes), packed.input_size, generator=make_generator(1))
    for scale in TRIAL_SCALES:
        trial = (rows * scale).to(dtype)
        expected, found = module(trial, sizes), packed(trial, sizes)
        if not greatest_error(found.float(), expected.float()) <= MAX_ERROR[dtype]:
            return False
    return True

"""Experts that take sorted rows equal transformers' own, and a row's bits depend on it alone."""

import pytest
import torch
from torch import nn
from transformers.models.jetmoe.modeling_jetmoe import JetMoeParallelExperts

from worker_proc.modules.experts.sized import SizedExperts, pack_sized_experts
from worker_proc.native.build import compiler
from worker_proc.native.kernels import NativeLibrary

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")

SIZES = [3, 0, 1, 17]


def experts(dtype: torch.dtype) -> JetMoeParallelExperts:
    torch.manual_seed(3)
    module = JetMoeParallelExperts(len(SIZES), 40, 24)
    nn.init.normal_(module.weight)
    return module.to(dtype).requires_grad_(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_experts_equal_the_module(dtype: torch.dtype, library: NativeLibrary) -> None:
    module = experts(dtype)
    holder = nn.ModuleDict({"experts": module})
    rows = torch.randn(sum(SIZES), 40).to(dtype)
    expected = module(rows, SIZES)
    pack_sized_experts(holder, library)
    packed = holder["experts"]
    assert isinstance(packed, SizedExperts)
    found = packed(rows, SIZES)
    largest = float(expected.abs().max())
    bound = 0.02 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(found, expected, rtol=0.0, atol=bound * largest)
    first = packed(rows[-1:], [0, 0, 0, 1])
    assert torch.equal(found[-1:], first)


def test_experts_that_compute_something_else_stay(library: NativeLibrary) -> None:
    class Doubled(JetMoeParallelExperts):  # type: ignore[misc]
        def forward(self, inputs: torch.Tensor, expert_size: list[int]) -> torch.Tensor:
            doubled: torch.Tensor = 2 * super().forward(inputs, expert_size)
            return doubled

    module = Doubled(len(SIZES), 40, 24)
    nn.init.normal_(module.weight)
    holder = nn.ModuleDict({"experts": module})
    pack_sized_experts(holder, library)
    assert holder["experts"] is module

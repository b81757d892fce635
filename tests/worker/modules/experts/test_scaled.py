"""Experts whose rows are scaled first are computed by the kernels, if they give the same."""

import pytest
import torch
from transformers import Llama4TextConfig
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe

from tests.worker.checkpoints import SHAPE
from worker_proc.modules.experts.grouped import GroupedExperts
from worker_proc.modules.fusing import SCALED_KEY, fuse_modules
from worker_proc.native.build import compiler
from worker_proc.native.kernels import NativeLibrary
from worker_proc.native.packed_weights import Format

pytestmark = [
    pytest.mark.skipif(compiler() is None, reason="no C++ compiler"),
    pytest.mark.usefixtures("two_threads"),
]


def make_mixture(dtype: torch.dtype, num_chosen: int) -> torch.nn.Module:
    config = Llama4TextConfig(**SHAPE, num_local_experts=6, num_experts_per_tok=num_chosen)
    torch.manual_seed(4)
    mixture = Llama4TextMoe(config)
    for parameter in mixture.parameters():
        torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    whole = torch.nn.ModuleDict({"feed_forward": mixture.to(dtype)})
    return whole.requires_grad_(False).eval()


@torch.inference_mode()
@pytest.mark.parametrize("num_chosen", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_mixture_computes_the_same_with_the_experts_of_each_row(
    dtype: torch.dtype, num_chosen: int, library: NativeLibrary
) -> None:
    whole, rows = make_mixture(dtype, num_chosen), torch.randn(1, 9, 64).to(dtype)
    expected, logits = whole["feed_forward"](rows)
    fused = fuse_modules(whole, library, dtype)
    assert f"feed_forward{SCALED_KEY}" in fused
    assert isinstance(whole["feed_forward"].experts, GroupedExperts)
    found, own_logits = whole["feed_forward"](rows)
    tolerance = 1e-5 if dtype == torch.float32 else 0.03
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(own_logits, logits, rtol=tolerance, atol=tolerance)
    again = make_mixture(dtype, num_chosen)
    assert fuse_modules(again, library, dtype, fused) == fused
    assert torch.equal(again["feed_forward"](rows)[0], found)


def test_a_mixture_that_scales_otherwise_stays_as_it_is(
    library: NativeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Llama4TextMoe.forward

    def forward(self: Llama4TextMoe, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, logits = plain(self, hidden)
        return out * 1.01, logits

    monkeypatch.setattr(Llama4TextMoe, "forward", forward)
    whole = make_mixture(torch.float32, 1)
    fused = fuse_modules(whole, library, torch.float32)
    assert f"feed_forward{SCALED_KEY}" not in fused
    assert not isinstance(whole["feed_forward"].experts, GroupedExperts)


@torch.inference_mode()
def test_weights_in_codes_are_rounded_first(library: NativeLibrary) -> None:
    whole, rows = make_mixture(torch.bfloat16, 1), torch.randn(1, 9, 64).bfloat16()
    expected, _ = whole["feed_forward"](rows)
    fused = fuse_modules(whole, library, torch.bfloat16, format=Format.INT8)
    assert f"feed_forward{SCALED_KEY}" in fused
    found, _ = whole["feed_forward"](rows)
    error = (found - expected).norm() / expected.norm()
    assert 0 < float(error) < 0.03

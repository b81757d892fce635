"""Fused modules equal transformers' own, and replace them only where they do."""

import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from worker_proc.modules.fusing import fuse_modules
from worker_proc.modules.mlp import FusedMLP
from worker_proc.modules.packed_linear import pack_linears
from worker_proc.modules.pointwise import FusedActivation, FusedRMSNorm
from worker_proc.native.build import compiler
from worker_proc.native.kernels import NATIVE_DTYPES, NativeLibrary

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")

SIZE = 74
"""Not a multiple of a vector."""


def make_mlp(
    activation: str = "silu", bias: bool = False, size: int = SIZE, inner: int | None = None
) -> LlamaMLP:
    config = LlamaConfig(
        hidden_size=size,
        intermediate_size=2 * size if inner is None else inner,
        num_attention_heads=1,
        hidden_act=activation,
        mlp_bias=bias,
    )
    return LlamaMLP(config)


def assert_close(want: torch.Tensor, got: torch.Tensor) -> None:
    assert want.dtype == got.dtype
    tolerance = 1e-5 if want.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(want, got, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", NATIVE_DTYPES, ids=str)
@pytest.mark.parametrize("norm", [LlamaRMSNorm, Gemma2RMSNorm])
@torch.inference_mode()
def test_fused_norms_of_both_kinds_equal_the_modules(
    norm: type[nn.Module], dtype: torch.dtype, library: NativeLibrary
) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(norm(SIZE))
    nn.init.normal_(model[0].get_parameter("weight"))
    model = model.to(dtype)
    heads = torch.randn(1, 9, 4 * SIZE).to(dtype).view(1, 9, 4, SIZE)
    inputs = [heads, heads.transpose(1, 2), heads[0, :1], heads[:, :, 0], heads[:, :0]]
    wanted = [model(rows) for rows in inputs]
    assert len(fuse_modules(model, library, dtype)) == 1
    assert isinstance(model[0], FusedRMSNorm)
    for rows, want in zip(inputs, wanted, strict=True):
        assert_close(want, model(rows))


@pytest.mark.parametrize("dtype", NATIVE_DTYPES, ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh", "gelu", "relu2"])
@torch.inference_mode()
def test_fused_mlps_equal_the_modules(
    activation: str, bias: bool, dtype: torch.dtype, library: NativeLibrary
) -> None:
    torch.manual_seed(2)
    model = nn.Sequential(make_mlp(activation, bias=bias).to(dtype))
    inputs = [torch.randn(*shape, SIZE).to(dtype) * 3 for shape in ((1, 1), (1, 40), (200,))]
    wanted = [model(rows) for rows in inputs]
    assert len(fuse_modules(model, library, dtype)) == 1
    assert isinstance(model[0], FusedMLP)
    for rows, want in zip(inputs, wanted, strict=True):
        assert_close(want, model(rows))


@pytest.mark.parametrize("dtype", NATIVE_DTYPES, ids=str)
@pytest.mark.parametrize("name", ["silu", "swish", "gelu_pytorch_tanh", "gelu_new", "gelu"])
@torch.inference_mode()
def test_fused_activations_equal_the_modules(
    name: str, dtype: torch.dtype, library: NativeLibrary
) -> None:
    """Rows may be strided, and arguments so large that the result is 0 or the argument."""
    torch.manual_seed(3)
    model = nn.Sequential(ACT2FN[name])
    wide = torch.randn(1, 40, 2 * SIZE).to(dtype) * 4
    inputs = [wide, wide[..., :SIZE], wide[:, :0], torch.tensor([[-1e30, -90.0, 90.0, 1e30]])]
    wanted = [model(rows) for rows in inputs]
    assert len(fuse_modules(model, library, dtype)) == 1
    assert isinstance(model[0], FusedActivation)
    for rows, want in zip(inputs, wanted, strict=True):
        assert_close(want, model(rows))
    whole = model(wide[..., :SIZE])
    for first, count in ((0, 1), (7, 2), (11, 29)):
        part = model(wide[:, first : first + count, :SIZE].contiguous())
        assert torch.equal(whole[:, first : first + count], part)


@pytest.mark.parametrize("name", ["silu", "gelu_pytorch_tanh"])
@torch.inference_mode()
def test_activations_are_right_for_all_bfloat16_values(name: str, library: NativeLibrary) -> None:
    """Nearly all are what float64 rounds to, and the others are next to it."""
    values = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    model = nn.Sequential(ACT2FN[name])
    assert len(fuse_modules(model, library, torch.bfloat16)) == 1
    got = model(values)
    assert got[values.isnan()].isnan().all()
    is_usual = values.isfinite() & (values.abs() > 1e-30) & (values > -6)
    want = ACT2FN[name](values[is_usual].double())
    assert ((got[is_usual].double() - want).abs() <= want.abs() * 2**-7).all()
    assert (got[is_usual] == want.bfloat16()).double().mean() > 0.9995


@pytest.mark.parametrize("dtype", NATIVE_DTYPES, ids=str)
@torch.inference_mode()
def test_modules_that_compute_something_else_stay(
    dtype: torch.dtype, library: NativeLibrary
) -> None:
    size = 4096  # the means of random rows are close to 0 here
    model = nn.Sequential(
        nn.LayerNorm(size),
        nn.LayerNorm(size, bias=False),
        make_mlp("mish", size=64),
        nn.Linear(size, 8),
        nn.Tanh(),
        nn.ReLU(),
        nn.Dropout(),
    ).to(dtype)
    before = [type(module) for module in model]
    assert fuse_modules(model, library, dtype) == {}
    assert before == [type(module) for module in model]


@pytest.mark.parametrize("dtype", NATIVE_DTYPES, ids=str)
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@torch.inference_mode()
def test_an_mlp_of_no_experts_adds_nothing(dtype: torch.dtype, library: NativeLibrary) -> None:
    """As of a mixture with 0 shared experts: its matrices are empty."""
    model = nn.Sequential(make_mlp(inner=0)).to(dtype)
    fuse_modules(model, library, dtype)
    pack_linears(model, library, lambda done, total: None)
    rows = torch.randn(1, 5, SIZE).to(dtype)
    assert torch.equal(torch.zeros(1, 5, SIZE, dtype=dtype), model(rows))


def test_a_later_start_fuses_the_same_and_tries_nothing(
    library: NativeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Modules that another start has not fused stay, too."""

    def make_model() -> nn.Sequential:
        torch.manual_seed(5)
        return nn.Sequential(
            *(LlamaRMSNorm(SIZE), Gemma2RMSNorm(SIZE), nn.LayerNorm(SIZE)),
            *(make_mlp("gelu_pytorch_tanh"), make_mlp("mish"), ACT2FN["silu"]),
        )

    first, later = make_model(), make_model()
    fused = fuse_modules(first, library, torch.float32)
    assert set(fused) == {"0", "1", "3", "5"}
    rows = torch.randn(3, SIZE)
    monkeypatch.setattr(torch, "randn", None)  # of which trials are made
    monkeypatch.setattr(torch, "linspace", None)
    assert fuse_modules(later, library, torch.float32, fused) == fused
    assert [type(module) for module in later] == [type(module) for module in first]
    for one, other in zip(first, later, strict=True):
        assert torch.equal(one(rows), other(rows))


@torch.inference_mode()
def test_a_row_has_the_same_bits_in_every_batch(library: NativeLibrary) -> None:
    rows = torch.randn(300, 576)
    model = nn.Sequential(LlamaRMSNorm(576), make_mlp(size=576))
    fuse_modules(model, library, torch.float32)
    together = model(rows)
    for first, count in ((0, 1), (17, 2), (100, 33)):
        assert torch.equal(together[first : first + count], model(rows[first : first + count]))


class ClampedMLP(LlamaMLP):
    """Bounds its gate, as some models do; ordinary rows never reach the bound."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        gate = self.gate_proj(hidden).clamp(max=10.0)
        out: torch.Tensor = self.down_proj(self.act_fn(gate) * self.up_proj(hidden))
        return out


class ClampedSiLU(nn.Module):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return nn.functional.silu(hidden.clamp(max=10.0))


class ClampedRMSNorm(LlamaRMSNorm):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = super().forward(hidden.clamp(max=10.0))
        return out


class OtherEpsilon(LlamaRMSNorm):
    """Its attribute is not what it computes with."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.variance_epsilon = 1e-12

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return LlamaRMSNorm.forward(_Epsilon(self.weight), hidden)


class _Epsilon:
    variance_epsilon = 1e-5

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight


@pytest.mark.parametrize("dtype", NATIVE_DTYPES, ids=str)
@torch.inference_mode()
def test_a_bound_that_ordinary_values_never_reach_is_not_lost(
    dtype: torch.dtype, library: NativeLibrary
) -> None:
    torch.manual_seed(4)
    config = LlamaConfig(hidden_size=SIZE, intermediate_size=2 * SIZE, num_attention_heads=1)
    model = nn.Sequential(
        ClampedMLP(config), ClampedSiLU(), ClampedRMSNorm(SIZE), OtherEpsilon(SIZE)
    ).to(dtype)
    rows = (torch.randn(1, 9, SIZE) * 60).to(dtype)
    wanted = [module(rows) for module in model]
    before = [type(module) for module in model]
    fuse_modules(model, library, dtype)  # the plain activation inside the MLP may go
    assert before == [type(module) for module in model]
    for module, want in zip(model, wanted, strict=True):
        assert_close(want / want.abs().max(), module(rows) / want.abs().max())

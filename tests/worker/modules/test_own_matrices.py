"""Matrices in modules' own code are packed where that changes no result, and rows are exact."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import DeepseekV4Config, Glm5NextTextConfig, HYV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperHead
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextHyperConnection
from transformers.models.hy_v4.modeling_hy_v4 import HYV4HyperConnection

from tests.families.configs import FAMILIES
from tests.worker.attention.test_probe import inspect
from worker_proc.calibration.plain_products import plain_products
from worker_proc.calibration.row_trials import ROW_COUNTS, repeats_rows
from worker_proc.calibration.token_products import TokenProducts
from worker_proc.modules.own_matrices import pack_own_matrices
from worker_proc.modules.packed_matrix import PackedMatrix
from worker_proc.native.build import compiler
from worker_proc.native.kernels import NATIVE_DTYPES, NativeLibrary

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")

SIZES: dict[str, Any] = {"hidden_size": 36, "hc_mult": 3}
KINDS: dict[str, tuple[type[nn.Module], Any]] = {
    "glm5_next": (Glm5NextTextHyperConnection, Glm5NextTextConfig),
    "hy_v4": (HYV4HyperConnection, HYV4Config),
    "head": (DeepseekV4HyperHead, DeepseekV4Config),
}


def make(name: str) -> nn.Module:
    kind, config = KINDS[name]
    torch.manual_seed(4)
    module = kind(config(**SIZES)).requires_grad_(False)
    for parameter in module.parameters():
        parameter.normal_(0.0, 0.3)
    return module


def pack(module: nn.Module, library: NativeLibrary, dtype: torch.dtype, **options: Any) -> bool:
    holder = nn.ModuleDict({"hc": module})
    return bool(pack_own_matrices(holder, {"hc": (3, 36)}, library, dtype, **options))


@pytest.mark.parametrize("dtype", NATIVE_DTYPES, ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_a_row_has_the_same_bits_among_any_others(
    name: str, dtype: torch.dtype, library: NativeLibrary
) -> None:
    """In some checkpoints only the matrix is in bfloat16."""
    module = make(name)
    matrix = next(one for one, weight in module.named_parameters() if weight.dim() == 2)
    module._parameters[matrix] = nn.Parameter(module.get_parameter(matrix).to(dtype), False)
    rows = torch.randn(1, 5, 3, 36).to(dtype)
    before = module(rows)
    assert pack(module, library, dtype)
    assert isinstance(module.__dict__[matrix], PackedMatrix)
    torch.testing.assert_close(module(rows), before, rtol=1e-4, atol=1e-4)
    for count in range(1, 80):
        assert repeats_rows(module, (rows,), count), count


def test_what_an_earlier_start_has_proven_is_not_tried(library: NativeLibrary) -> None:
    """A module that was not proven stays, too."""
    module = make("hy_v4")
    assert not pack(module, library, torch.float32, proven=[])
    assert "fn" in module._parameters
    module.register_forward_pre_hook(lambda *_: pytest.fail("it is tried"))
    assert pack(module, library, torch.float32, proven=["hc"])
    assert "fn" not in module._parameters


class Own(nn.Module):
    """Has a matrix, with which subclasses compute."""

    def __init__(self) -> None:
        super().__init__()
        self.fn = nn.Parameter(torch.randn(4, 3 * 36), requires_grad=False)


class Transposed(Own):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(rows.flatten(2) @ self.fn.T)


class Unused(Own):
    """Uses its matrix for other rows alone."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return functional.linear(rows, self.fn) if rows.dim() == 2 else torch.sigmoid(rows)


@pytest.mark.parametrize("kind", [Transposed, Unused])
def test_a_module_that_computes_in_another_way_stays(
    kind: type[Own], library: NativeLibrary
) -> None:
    module = kind()
    attributes = set(module.__dict__)
    assert not pack(module, library, torch.float32)
    assert set(module.__dict__) == attributes
    assert list(module._parameters) == ["fn"]
    assert list(plain_products(nn.ModuleList([module])))


def test_rows_with_streams_are_found(tmp_path: Any) -> None:
    """They are found without weights, by what modules with matrices of their own are given."""
    probed = inspect(FAMILIES["hy_v4"](), tmp_path).probed
    layers = [f"model.layers.{n}.{part}_hc" for n in (0, 1) for part in ("attn", "ffn")]
    assert {probed.row_shapes[name] for name in (*layers, "model.hc_head")} == {(4, 64)}


def test_products_of_each_token_are_tried_among_more_and_fewer() -> None:
    """A product with a weight, and one of all tokens, are not of this kind."""

    def observed(depends: bool) -> str:
        with TokenProducts(8) as products:
            mixed, rows = torch.rand(1, 8, 3, 3).mT, torch.rand(1, 8, 3, 36)
            assert (mixed @ rows).shape == rows.shape
            assert torch.matmul(rows.flatten(2), nn.Parameter(torch.rand(108, 2))).dim() == 3
            assert (rows.flatten(2).mT @ rows.flatten(2)).dim() == 3
        assert len(products._found) == 1
        if depends:
            (key, (one, other)) = products._found.popitem()
            products._found[key] = one.as_subclass(Depending), other
        return products.difference(ROW_COUNTS)

    assert observed(depends=False) == ""
    assert observed(depends=True) == (
        "a product of [3, 3] by [3, 36] for each token has other bits among 17"
    )


class Depending(torch.Tensor):
    """Has other products among many tokens."""

    def __matmul__(self, other: torch.Tensor) -> torch.Tensor:
        own = self.as_subclass(torch.Tensor)
        return own @ other * (1 + own.shape[1] // 17)

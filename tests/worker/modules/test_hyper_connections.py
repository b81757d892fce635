"""Hyper-connections are computed by a kernel where that changes no result, and rows are exact."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DeepseekV4Config, Glm5NextTextConfig, HYV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperConnection
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextHyperConnection
from transformers.models.hy_v4.modeling_hy_v4 import HYV4HyperConnection

from worker_proc.calibration.row_trials import repeats_rows
from worker_proc.modules.hyper_connections import HyperConnection, install_hyper_connections
from worker_proc.modules.own_matrices import pack_own_matrices
from worker_proc.native.build import compiler
from worker_proc.native.kernels import NativeLibrary

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")

KINDS: dict[str, tuple[type[nn.Module], Any]] = {
    "deepseek_v4": (DeepseekV4HyperConnection, DeepseekV4Config),
    "glm5_next": (Glm5NextTextHyperConnection, Glm5NextTextConfig),
    "hy_v4": (HYV4HyperConnection, HYV4Config),
}
SHAPES = ((4, 64), (3, 36), (1, 20), (8, 24))
"""Numbers and sizes of streams: a vector of the kernel has 16 values."""


def make(
    library: NativeLibrary, shape: tuple[int, int], dtype: torch.dtype, name: str = "deepseek_v4"
) -> nn.Module:
    """Return a holder of a module whose matrix is packed."""
    kind, config = KINDS[name]
    torch.manual_seed(4)
    module = kind(config(hc_mult=shape[0], hidden_size=shape[1])).requires_grad_(False)
    for parameter in module.parameters():
        parameter.normal_(0.0, 0.3)
    holder = nn.ModuleDict({"hc": module})
    assert pack_own_matrices(holder, {"hc": shape}, library, dtype) == ["hc"]
    return holder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_results_are_those_of_the_module_itself(
    shape: tuple[int, int], dtype: torch.dtype, library: NativeLibrary
) -> None:
    """A row has the same bits among any others, too."""
    holder = make(library, shape, dtype)
    rows = torch.randn(2, 5, *shape).to(dtype)
    before = holder["hc"](rows)
    assert install_hyper_connections(holder, {"hc": shape}, library, dtype) == ["hc"]
    assert isinstance(holder["hc"].forward, HyperConnection)
    found = holder["hc"](rows)
    assert [(one.shape, one.dtype) for one in found] == [(one.shape, one.dtype) for one in before]
    error = 1e-5 if dtype == torch.float32 else 1e-2
    for one, other in zip(found, before, strict=True):
        torch.testing.assert_close(one, other, rtol=error, atol=error)
    for count in (1, 2, 3, 16, 17, 79):
        assert repeats_rows(holder["hc"], (rows,), count), count


def _scaled(forward: Callable[..., Any]) -> Callable[..., Any]:
    def changed(rows: torch.Tensor) -> Any:
        gates, matrix, out = forward(rows)
        return gates, matrix * 1.01, out

    return changed


def _less(forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda rows: forward(rows)[1:]


@pytest.mark.parametrize("change", [_scaled, _less])
def test_modules_that_compute_something_else_stay(
    change: Callable[..., Any], library: NativeLibrary
) -> None:
    holder = make(library, (4, 64), torch.float32)
    module = holder["hc"]
    module.__dict__["forward"] = own = change(module.forward)
    assert install_hyper_connections(holder, {"hc": (4, 64)}, library, torch.float32) == []
    assert module.forward is own


def test_modules_without_these_parts_stay(library: NativeLibrary) -> None:
    """Hy-V4's have no matrix that is divided by sums; more than 16 streams fit in no vector."""
    for holder, shape in (
        (make(library, (4, 64), torch.float32, "hy_v4"), (4, 64)),
        (make(library, (17, 16), torch.float32), (17, 16)),
    ):
        own = holder["hc"].forward
        assert install_hyper_connections(holder, {"hc": shape}, library, torch.float32) == []
        assert holder["hc"].forward == own


def test_what_an_earlier_start_has_proven_is_not_tried(library: NativeLibrary) -> None:
    holder = make(library, (4, 64), torch.float32, "glm5_next")
    arguments = (holder, {"hc": (4, 64)}, library, torch.float32)
    own = holder["hc"].forward
    assert install_hyper_connections(*arguments, []) == []
    assert holder["hc"].forward is own
    holder["hc"].register_forward_pre_hook(lambda *_: pytest.fail("it is tried"))
    assert install_hyper_connections(*arguments, ["hc"]) == ["hc"]

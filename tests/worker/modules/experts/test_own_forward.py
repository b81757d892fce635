"""Experts that their own forward connects: packed matrices change no result, and rows are exact."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LongcatFlashConfig
from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashExperts
from transformers.models.muse_spark.configuration_muse_spark import MuseSparkTextConfig
from transformers.models.muse_spark.modeling_muse_spark import MuseSparkExperts

from tests.worker.modules.experts.holders import (
    HIDDEN_SIZE,
    NUM_EXPERTS,
    SIZE,
    Holder,
    assert_close,
    definition,
    randomized,
    rows_and_choices,
)
from worker_proc.modules.fusing import OWN_FORWARD, fuse_modules
from worker_proc.modules.packed_matrix import PackedMatrices
from worker_proc.native.build import compiler
from worker_proc.native.kernels import NATIVE_DTYPES, NativeLibrary
from worker_proc.native.packed_weights import Format

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")


def longcat() -> nn.Module:
    """The last two of its experts return their rows."""
    sizes = {"hidden_size": HIDDEN_SIZE, "expert_ffn_hidden_size": SIZE}
    return LongcatFlashExperts(
        LongcatFlashConfig(**sizes, n_routed_experts=NUM_EXPERTS - 2, zero_expert_num=2)
    )


def muse_spark() -> nn.Module:
    """It normalizes the rows of each expert."""
    sizes = {"moe_hidden_size": HIDDEN_SIZE, "moe_intermediate_size": SIZE}
    return MuseSparkExperts(MuseSparkTextConfig(**sizes, num_local_experts=NUM_EXPERTS))


KINDS: dict[str, Callable[[], nn.Module]] = {"longcat_flash": longcat, "muse_spark": muse_spark}


@pytest.mark.parametrize("dtype", NATIVE_DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_a_row_equals_the_modules_and_has_the_same_bits_among_any_others(
    kind: str, dtype: torch.dtype, library: NativeLibrary
) -> None:
    holder = Holder(randomized(KINDS[kind](), dtype))
    rows, index, weights = rows_and_choices(300, dtype)
    want = definition(holder.experts, rows, index, weights)
    assert fuse_modules(holder, library, dtype)["experts"] == OWN_FORWARD
    assert all(parameter.dim() < 3 for parameter in holder.parameters())
    num_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        together = holder.experts(rows, index, weights)
        assert_close(together, want)
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            for first, count in ((0, 1), (17, 2), (100, 33), (5, 290)):
                part = slice(first, first + count)
                alone = holder.experts(rows[part], index[part], weights[part])
                assert torch.equal(together[part], alone)
    finally:
        torch.set_num_threads(num_threads)


@torch.inference_mode()
def test_what_an_earlier_start_has_proven_is_not_tried(library: NativeLibrary) -> None:
    """A module that was not proven stays, as does one whose weights become codes."""
    holder = Holder(randomized(longcat(), torch.float32))
    rows, index, weights = rows_and_choices(40, torch.float32)
    want = definition(holder.experts, rows, index, weights)
    others: tuple[dict[str, Any], ...] = ({"proven": {}}, {"format": Format.INT8})
    for options in others:
        fuse_modules(holder, library, torch.float32, **options)
        assert "down_proj" in holder.experts._parameters
    handle = holder.experts.register_forward_pre_hook(lambda *_: pytest.fail("it is tried"))
    fuse_modules(holder, library, torch.float32, {"experts": OWN_FORWARD})
    assert isinstance(holder.experts.down_proj, PackedMatrices)
    handle.remove()
    assert_close(holder.experts(rows, index, weights), want)


@torch.inference_mode()
def test_the_unpacked_weights_are_not_kept(library: NativeLibrary) -> None:
    """They would take as much memory as the packed ones."""
    module = randomized(longcat(), torch.float32)
    arrays = []
    for name, parameter in [*module.named_parameters()]:
        array = parameter.detach().numpy().copy()
        setattr(module, name, nn.Parameter(torch.from_numpy(array), requires_grad=False))
        arrays.append(weakref.ref(array))
    del array, parameter
    holder = Holder(module)
    assert all(array() is not None for array in arrays)
    assert fuse_modules(holder, library, torch.float32)["experts"] == OWN_FORWARD
    gc.collect()
    assert not any(array() is not None for array in arrays)


class Summed(LongcatFlashExperts):
    """Uses a matrix in another operation."""

    def forward(
        self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        out: torch.Tensor = super().forward(hidden, index, weights)
        return out + self.down_proj[0].sum()


class Depending(LongcatFlashExperts):
    """Computes something else with packed matrices."""

    def forward(
        self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        out: torch.Tensor = super().forward(hidden, index, weights)
        return out * 1.001 if isinstance(self.down_proj, PackedMatrices) else out


@pytest.mark.parametrize("kind", [Summed, Depending])
def test_a_module_that_computes_in_another_way_stays(
    kind: type[nn.Module], library: NativeLibrary
) -> None:
    module = randomized(longcat(), torch.float32)
    module.__class__ = kind
    holder = Holder(module)
    attributes = set(module.__dict__)
    assert "experts" not in fuse_modules(holder, library, torch.float32)
    assert set(module.__dict__) == attributes
    assert set(module._parameters) == {"gate_up_proj", "down_proj"}

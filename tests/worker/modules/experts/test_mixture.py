"""Mixtures of experts equal transformers' own, and a row's bits depend on nothing but the row.

Experts with codes have the bits of the layers that have the same codes.
"""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from transformers import MixtralConfig, OlmoeConfig, Qwen3MoeConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.olmoe.modeling_olmoe import OlmoeSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import (
    Qwen3MoeSparseMoeBlock,
    Qwen3MoeTopKRouter,
)

from tests.combinations import in_turn
from worker_proc.modules import trial_candidates
from worker_proc.modules.experts.grouped import GroupedExperts
from worker_proc.modules.experts.mixture import (
    ExpertWeights,
    FusedExperts,
    Routing,
    computing_expert_codes,
    round_experts,
)
from worker_proc.modules.fusing import fuse_modules
from worker_proc.modules.mlp import FusedMLP
from worker_proc.native.build import compiler
from worker_proc.native.kernels import NATIVE_DTYPES, NativeLibrary
from worker_proc.native.packed_weights import Format
from worker_proc.native.structures import Activation

pytestmark = [
    pytest.mark.skipif(compiler() is None, reason="no C++ compiler"),
    pytest.mark.usefixtures("two_threads"),
]

HIDDEN_SIZE, SIZE = 74, 44
"""Not multiples of a vector."""
NUM_EXPERTS = 21
CODED = (Format.INT8, Format.INT4, Format.INT8_FOR_CODES)


def random_experts(num_experts: int, hidden_size: int, size: int) -> ExpertWeights:
    """Weights of experts of many sizes, and a router that sends rows to all of them."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

    scales = torch.logspace(-2, 1, num_experts).view(-1, 1, 1)
    return ExpertWeights(
        router=normal(num_experts, hidden_size).bfloat16(),
        gate_up=(normal(num_experts, 2 * size, hidden_size) * scales).bfloat16(),
        down=normal(num_experts, hidden_size, size).bfloat16(),
    )


def make_block(kind: str, dtype: torch.dtype, num_chosen: int = 5) -> nn.Sequential:
    torch.manual_seed(1)
    sizes: dict[str, Any] = {"hidden_size": HIDDEN_SIZE, "num_experts_per_tok": num_chosen}
    block: nn.Module
    if kind == "mixtral":
        block = MixtralSparseMoeBlock(
            MixtralConfig(**sizes, num_local_experts=NUM_EXPERTS, intermediate_size=SIZE)
        )
    elif kind == "olmoe":
        block = OlmoeSparseMoeBlock(
            OlmoeConfig(**sizes, num_experts=NUM_EXPERTS, intermediate_size=SIZE)
        )
    else:
        block = Qwen3MoeSparseMoeBlock(
            Qwen3MoeConfig(
                **sizes,
                num_experts=NUM_EXPERTS,
                moe_intermediate_size=SIZE,
                norm_topk_prob=kind == "qwen3_moe",
            )
        )
    for parameter in block.parameters():
        nn.init.normal_(parameter, 0.0, 1.5 * parameter.shape[-1] ** -0.5)
    return nn.Sequential(block.to(dtype)).eval()


def assert_most_rows_close(want: torch.Tensor, got: torch.Tensor) -> None:
    """In bfloat16 a few rows are sent to other experts, whose logits are equal within rounding."""
    assert (want.shape, want.dtype) == (got.shape, got.dtype)
    tolerance = 1e-5 if want.dtype == torch.float32 else 2e-2
    errors = (want.float() - got.float()).abs().amax(dim=-1).flatten()
    share = (errors <= tolerance * want.float().abs().max()).float().mean()
    assert share >= (1.0 if want.dtype == torch.float32 else 0.9)


@pytest.mark.parametrize(
    ("kind", "num_chosen", "dtype"),
    in_turn(
        ["mixtral", "olmoe", "qwen3_moe", "qwen3_moe_plain"], [5, NUM_EXPERTS, 1], NATIVE_DTYPES
    ),
    ids=str,
)
@torch.inference_mode()
def test_blocks_of_each_kind_are_fused(
    kind: str, num_chosen: int, dtype: torch.dtype, library: NativeLibrary
) -> None:
    model = make_block(kind, dtype, num_chosen)
    inputs = [torch.randn(1, count, HIDDEN_SIZE).to(dtype) for count in (1, 2, 40, 300)]
    wanted = [model(rows) for rows in inputs]
    assert len(fuse_modules(model, library, dtype)) == 1
    experts = model[0]
    assert isinstance(experts, FusedExperts)
    assert next(experts.parameters(), None) is None
    assert experts.routing.num_chosen == num_chosen
    if num_chosen > 1:
        all_chosen = num_chosen == NUM_EXPERTS
        assert experts.routing.normalizes is (kind in ("mixtral", "qwen3_moe") or all_chosen)
    for rows, want in zip(inputs, wanted, strict=True):
        assert_most_rows_close(want, model(rows))


PRODUCTS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "linear": nn.functional.linear,
    "linear by keywords": lambda rows, weight: nn.functional.linear(input=rows, weight=weight),
    "matmul": lambda rows, weight: torch.matmul(rows, weight.t()),
    "operator": lambda rows, weight: rows @ weight.T,
    "einsum": lambda rows, weight: torch.einsum("rh,eh->re", rows, weight),
}
"""Products of rows and the weight of a router."""


class FloatRouter(Qwen3MoeTopKRouter):
    """A router that multiplies in float32, as those of many families do."""

    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = self.product(hidden_states.float(), self.weight.float())
        weights, index = logits.softmax(-1).topk(self.top_k, dim=-1)
        return logits, (weights / weights.sum(-1, keepdim=True)).to(hidden_states.dtype), index


@pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS)
@torch.inference_mode()
def test_a_router_that_multiplies_in_float32_keeps_its_choices(
    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], library: NativeLibrary
) -> None:
    """Logits that are rounded to bfloat16 would send some rows to other experts."""
    model = make_block("qwen3_moe", torch.bfloat16)
    model[0].gate.__class__ = FloatRouter
    model[0].gate.product = product
    rows = torch.randn(1, 300, HIDDEN_SIZE).bfloat16()
    _, weights, index = model[0].gate(rows[0])
    fuse_modules(model, library, torch.bfloat16)
    assert isinstance(model[0].experts, GroupedExperts)
    _, own_weights, own_index = model[0].gate(rows[0])
    assert torch.equal(index, own_index)
    assert torch.equal(weights, own_weights)


@pytest.mark.parametrize(("format", "shape"), in_turn(CODED, [(74, 44), (300, 160)]), ids=str)
@torch.inference_mode()
def test_a_single_expert_has_the_bits_of_a_layer_with_the_same_codes(
    format: Format, shape: tuple[int, int], kernels: NativeLibrary
) -> None:
    """The weight of the expert is 1; it has few rows, and many."""
    num_experts, hidden_size, size = 3, *shape
    weights = random_experts(num_experts, hidden_size, size)
    routing = Routing(num_chosen=1, normalizes=True, rounds_weights=True)
    mixture = FusedExperts(kernels, Activation.SILU, routing, weights, format)
    rows = torch.randn(700, hidden_size).bfloat16()
    rows[5, 3] = 1e4
    choices = nn.functional.linear(rows, weights.router).float().argmax(dim=-1)
    assert int(choices.bincount(minlength=num_experts).min()) > 128
    for count in (1, 3, 20, 100, 700):
        found = mixture(rows[:count])
        for expert in range(num_experts):
            down = weights.down[expert], None
            gates = weights.gate_up[expert], None
            alone = FusedMLP(kernels, Activation.SILU, gates, down, format)
            mine = choices[:count] == expert
            assert torch.equal(alone(rows[:count])[mine], found[mine]), (count, expert)


@pytest.mark.parametrize(("format", "kind"), in_turn(CODED, ["mixtral", "qwen3_moe"]), ids=str)
@torch.inference_mode()
def test_blocks_are_compared_with_modules_of_the_same_codes(
    kind: str, format: Format, library: NativeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without these codes, the modules compute something else than the kernels.

    What is proven already is not compared, and has the same bits.
    """
    model, rows = make_block(kind, torch.bfloat16), torch.randn(40, 1, HIDDEN_SIZE).bfloat16()
    rows[:, 0, 5] = 60.0  # coded rows lose most of their other values
    model[0].gate.weight[:, 5] = 0.0
    model[0].experts.gate_up_proj[:, :, 5] = 0.0
    plain = model(rows).float()
    rounded, proven = copy.deepcopy(model), copy.deepcopy(model)
    experts = rounded.get_submodule("0.experts")
    round_experts(experts, library, format)
    codes_rows = format is Format.INT8_FOR_CODES
    codes = computing_expert_codes(experts, of_rows=codes_rows)
    with nullcontext() if format is Format.INT4 else codes:
        want = rounded(rows).float()
    # Less than the codes change; processors sum in other orders, and each may round otherwise.
    monkeypatch.setattr(trial_candidates, "MAX_ERROR", {torch.bfloat16: 0.01, torch.float32: 1e-5})
    numbers = fuse_modules(model, library, torch.bfloat16, format=format)
    assert len(numbers) == 1
    assert isinstance(model[0], FusedExperts)
    found = model(rows).float()
    fuse_modules(proven, library, torch.bfloat16, numbers, format=format)
    assert torch.equal(proven(rows).float(), found)

    def typical_error(got: torch.Tensor) -> float:
        errors = (got - want).norm(dim=-1) / want.norm(dim=-1)
        return float(errors.median())

    assert typical_error(found) < 0.005
    assert typical_error(plain) > 2 * typical_error(found)


@pytest.mark.parametrize(
    ("dtype", "format"),
    [
        *((dtype, Format.UNITS) for dtype in NATIVE_DTYPES),
        *((torch.bfloat16, each) for each in CODED),
    ],
    ids=str,
)
@torch.inference_mode()
def test_a_row_has_the_same_bits_among_any_others(
    dtype: torch.dtype, format: Format, library: NativeLibrary
) -> None:
    """Alone and in any part of a batch, where experts get other numbers of rows; any threads."""
    model = make_block("qwen3_moe", dtype)
    assert len(fuse_modules(model, library, dtype, format=format)) == 1
    rows = torch.randn(300, HIDDEN_SIZE).to(dtype)
    num_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        together = model(rows)
        for number in (1, 2, 4):
            torch.set_num_threads(number)
            assert torch.equal(together, model(rows))
            for first, count in ((0, 1), (17, 2), (100, 33), (5, 290)):
                part = slice(first, first + count)
                assert torch.equal(together[part], model(rows[part]))
            order = torch.randperm(300)
            assert torch.equal(together[order], model(rows[order]))
    finally:
        torch.set_num_threads(num_threads)


@torch.inference_mode()
def test_of_equal_experts_the_first_are_chosen(library: NativeLibrary) -> None:
    model = make_block("qwen3_moe", torch.float32, 2)
    router = model[0].gate
    assert isinstance(router, Qwen3MoeTopKRouter)
    router.weight.zero_()
    router.weight[7] = 1.0
    gate_up = model[0].experts.gate_up_proj.clone()
    down = model[0].experts.down_proj.clone()
    fused = fuse_modules(model, library, torch.float32, {"0": 2})
    assert fused == {"0": 2}
    rows = torch.ones(1, HIDDEN_SIZE)
    weight = torch.tensor([0.0] * 7 + [float(HIDDEN_SIZE)] + [0.0] * 13).softmax(dim=0)
    expected = torch.zeros(HIDDEN_SIZE)
    for expert in (7, 0):
        gate, up = (gate_up[expert] @ rows[0]).chunk(2)
        share = weight[expert] / (weight[7] + weight[0])
        expected += share * (down[expert] @ (nn.functional.silu(gate) * up))
    torch.testing.assert_close(model(rows)[0], expected, rtol=1e-4, atol=1e-5)


class _SigmoidRouter(Qwen3MoeTopKRouter):
    """Weighs by the sigmoid of the logits, as DeepSeek does."""

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = nn.functional.linear(hidden.reshape(-1, self.hidden_dim), self.weight)
        weights, indices = logits.float().sigmoid().topk(self.top_k, dim=-1)
        return logits, (weights / weights.sum(dim=-1, keepdim=True)).to(logits.dtype), indices


class _OddRouter(Qwen3MoeTopKRouter):
    """Sends a third of all rows to other experts."""

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits, weights, indices = super().forward(hidden)
        rows = hidden.reshape(-1, self.hidden_dim)
        is_odd = rows[:, :1] > rows.mean(dim=-1, keepdim=True) + 0.4 * rows.std(
            dim=-1, keepdim=True
        )
        return logits, weights, torch.where(is_odd, (indices + 1) % NUM_EXPERTS, indices)


@pytest.mark.parametrize("dtype", NATIVE_DTYPES, ids=str)
@torch.inference_mode()
def test_blocks_that_compute_some_rows_otherwise_stay(
    dtype: torch.dtype, library: NativeLibrary
) -> None:
    model = make_block("qwen3_moe", dtype)
    model[0].gate.__class__ = _OddRouter
    assert "0" not in fuse_modules(model, library, dtype)


@torch.inference_mode()
def test_blocks_that_compute_something_else_stay(library: NativeLibrary) -> None:
    model = make_block("qwen3_moe", torch.float32)
    model[0].gate.__class__ = _SigmoidRouter
    fuse_modules(model, library, torch.float32)
    assert isinstance(model[0], Qwen3MoeSparseMoeBlock)
    model = make_block("qwen3_moe", torch.float32)
    model[0].experts.act_fn = nn.Tanh()
    fuse_modules(model, library, torch.float32)
    assert isinstance(model[0], Qwen3MoeSparseMoeBlock)

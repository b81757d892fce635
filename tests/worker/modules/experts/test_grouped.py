"""Experts beside a router equal transformers' own, and a row's bits depend on the row alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import (
    AriaTextConfig,
    DbrxConfig,
    DeepseekV3Config,
    GptOssConfig,
    Lfm2MoeConfig,
    NemotronHConfig,
    PhimoeConfig,
    PretrainedConfig,
)
from transformers.models.afmoe.configuration_afmoe import AfmoeConfig
from transformers.models.afmoe.modeling_afmoe import AfmoeSparseMoeBlock
from transformers.models.aria.modeling_aria import AriaExperts
from transformers.models.dbrx.modeling_dbrx import DbrxExperts
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Experts, DeepseekV3MoE
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts, GptOssMLP
from transformers.models.lfm2_moe.modeling_lfm2_moe import Lfm2MoeSparseMoeBlock
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.phimoe.modeling_phimoe import PhimoeSparseMoeBlock

from tests.combinations import in_turn
from tests.worker.modules.experts.holders import (
    HIDDEN_SIZE,
    NUM_CHOSEN,
    NUM_EXPERTS,
    SIZE,
    TOLERANCE,
    Holder,
    assert_close,
    definition,
    randomized,
    rows_and_choices,
)
from worker_proc.modules.experts.coded import computing_expert_codes, round_experts
from worker_proc.modules.experts.grouped import GroupedExperts
from worker_proc.modules.experts.router import ONE_THREAD_VALUES
from worker_proc.modules.fusing import ROUTER_KEY, fuse_modules
from worker_proc.modules.packed_linear import pack_linears
from worker_proc.modules.packed_matrix import PackedMatrix
from worker_proc.native.build import compiler
from worker_proc.native.kernels import NATIVE_DTYPES, NativeLibrary
from worker_proc.native.packed_weights import Format

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")

_SIZES: dict[str, Any] = {"hidden_size": HIDDEN_SIZE, "num_experts_per_tok": NUM_CHOSEN}


def deepseek(activation: str = "silu") -> nn.Module:
    sizes = _SIZES | {"moe_intermediate_size": SIZE, "hidden_act": activation}
    return DeepseekV3Experts(DeepseekV3Config(**sizes, n_routed_experts=NUM_EXPERTS))


def limited() -> nn.Module:
    """Return experts like DeepSeek-V4's: gates and factors are clamped before the activation."""
    module = deepseek()
    module.limit = 1.5

    def apply_gate(gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate.clamp(max=1.5)) * up.clamp(-1.5, 1.5)

    return as_class(module, apply_gate)


def as_class(module: nn.Module, apply_gate: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    """Let a module activate in another way, by a class of its own."""

    def forward(
        self: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        out = torch.zeros_like(hidden)
        for expert in range(NUM_EXPERTS):
            share = (weights * (index == expert)).sum(dim=-1, keepdim=True)
            inner = apply_gate(functional.linear(hidden, self.gate_up_proj[expert]))
            out += (functional.linear(inner, self.down_proj[expert]) * share).to(out.dtype)
        return out

    kind = type(module)
    module.__class__ = type(f"Odd{kind.__name__}", (kind,), {"forward": forward})
    return module


EXPERTS: dict[str, Callable[[], nn.Module]] = {
    "silu": deepseek,
    "gelu": lambda: deepseek("gelu"),
    "gelu_tanh": lambda: deepseek("gelu_pytorch_tanh"),
    "limited_silu": limited,
    "gpt_oss": lambda: GptOssExperts(
        GptOssConfig(**_SIZES, intermediate_size=SIZE, num_local_experts=NUM_EXPERTS)
    ),
    "aria_transposed": lambda: AriaExperts(
        AriaTextConfig(
            hidden_size=HIDDEN_SIZE,
            num_attention_heads=1,
            intermediate_size=SIZE,
            moe_num_experts=NUM_EXPERTS,
        )
    ),
    "relu2_without_gates": lambda: NemotronHExperts(
        NemotronHConfig(
            **_SIZES,
            moe_intermediate_size=SIZE,
            n_routed_experts=NUM_EXPERTS,
            mlp_hidden_act="relu2",
        )
    ),
}


def dbrx() -> nn.Module:
    """Its matrices lie below each other."""
    sizes = {"ffn_hidden_size": SIZE, "moe_num_experts": NUM_EXPERTS}
    config = DbrxConfig(d_model=HIDDEN_SIZE, ffn_config={"hidden_size": HIDDEN_SIZE, **sizes})
    return DbrxExperts(config.ffn_config)


IN_UNITS = EXPERTS | {"dbrx": dbrx}
"""Those whose weights are not rounded to codes, too."""


@pytest.mark.parametrize(("kind", "dtype"), in_turn(IN_UNITS, NATIVE_DTYPES), ids=str)
@torch.inference_mode()
def test_experts_equal_the_module(kind: str, dtype: torch.dtype, library: NativeLibrary) -> None:
    """The module keeps no weights, and the weights of experts may have either dtype.

    DBRX's own code takes only that of the rows.
    """
    holder = Holder(randomized(IN_UNITS[kind](), dtype))
    inputs = [rows_and_choices(count, dtype) for count in (1, 2, 40, 500)]
    rows, index, weights = inputs[-1]
    inputs.append((rows, index, weights.to(dtype)))
    if kind == "dbrx":
        inputs = [(rows, index, weights.to(dtype)) for rows, index, weights in inputs]
    wanted = [definition(holder.experts, *each).view_as(each[0]) for each in inputs]
    assert list(fuse_modules(holder, library, dtype)) == ["experts"]
    assert isinstance(holder.experts, GroupedExperts)
    assert next(holder.parameters(), None) is None
    for each, want in zip(inputs, wanted, strict=True):
        assert_close(holder.experts(*each), want)
    rows, *choices = inputs[-1]  # rows of a text, as DBRX passes them
    assert torch.equal(holder.experts(rows[None], *choices)[0], holder.experts(rows, *choices))


@pytest.mark.parametrize("dtype", NATIVE_DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["silu", "gpt_oss", "relu2_without_gates"])
@torch.inference_mode()
def test_a_row_has_the_same_bits_among_any_others(
    kind: str, dtype: torch.dtype, library: NativeLibrary
) -> None:
    """The order in which its experts are given does not count, either."""
    holder = Holder(randomized(EXPERTS[kind](), dtype))
    fuse_modules(holder, library, dtype)
    rows, index, weights = rows_and_choices(500, dtype)
    num_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        together = holder.experts(rows, index, weights)
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            for first, count in ((0, 1), (17, 2), (100, 33), (5, 490)):
                part = slice(first, first + count)
                alone = holder.experts(rows[part], index[part], weights[part])
                assert torch.equal(together[part], alone)
            turned = holder.experts(rows, index.flip(1), weights.flip(1))
            assert torch.equal(together, turned)
    finally:
        torch.set_num_threads(num_threads)


@torch.inference_mode()
def test_an_expert_that_does_not_exist_counts_as_zero(library: NativeLibrary) -> None:
    holder = Holder(randomized(deepseek(), torch.float32))
    module = holder.experts
    rows, index, weights = rows_and_choices(40, torch.float32)
    index[::3, 1], weights[::3, 1] = NUM_EXPERTS, 5.0
    want = definition(module, rows, index, weights)
    fuse_modules(holder, library, torch.float32)
    assert_close(holder.experts(rows, index, weights), want)


def _clamped_later(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).clamp(max=7.0) * up


def _twice(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up * 1.001


@pytest.mark.parametrize("apply_gate", [_clamped_later, _twice])
@pytest.mark.parametrize("dtype", NATIVE_DTYPES, ids=str)
def test_experts_that_compute_something_else_stay(
    apply_gate: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype, library: NativeLibrary
) -> None:
    if apply_gate is _twice and dtype == torch.bfloat16:
        pytest.skip("bfloat16 rounds more than that")
    holder = Holder(as_class(randomized(deepseek(), dtype), apply_gate))
    fuse_modules(holder, library, dtype)
    assert not isinstance(holder.experts, GroupedExperts)


@pytest.mark.parametrize(
    ("kind", "format"),
    in_turn(EXPERTS, [Format.INT8, Format.INT4, Format.INT8_FOR_CODES]),
    ids=str,
)
@torch.inference_mode()
def test_experts_with_codes_equal_modules_with_the_same_codes(
    kind: str, format: Format, library: NativeLibrary
) -> None:
    holder = Holder(randomized(EXPERTS[kind](), torch.bfloat16))
    module = holder.experts
    inputs = rows_and_choices(60, torch.bfloat16)
    plain = definition(module, *inputs).float()
    assert fuse_modules(holder, library, torch.bfloat16, format=format)
    found = holder.experts(*inputs).float()
    again = randomized(EXPERTS[kind](), torch.bfloat16)
    round_experts(again, library, format)
    want = definition(again, *inputs)
    if format is Format.INT8_FOR_CODES:
        with computing_expert_codes(again):
            want = again(*inputs)
    typical = [
        float(((each - want.float()).norm(dim=-1) / want.float().norm(dim=-1)).median())
        for each in (found, plain)
    ]
    assert typical[0] < 0.01
    assert typical[1] > 1.5 * typical[0]


def _block(kind: type[nn.Module], config: PretrainedConfig, dtype: torch.dtype) -> nn.Module:
    config._experts_implementation = "eager"
    return nn.Sequential(randomized(kind(config), dtype))


BLOCKS: dict[str, tuple[type[nn.Module], Callable[[int], PretrainedConfig]]] = {
    "deepseek_v3": (
        DeepseekV3MoE,
        lambda n: DeepseekV3Config(
            **_SIZES,
            moe_intermediate_size=SIZE,
            n_routed_experts=n,
            n_group=2,
            topk_group=1,
        ),
    ),
    "afmoe": (
        AfmoeSparseMoeBlock,
        lambda n: AfmoeConfig(**_SIZES, moe_intermediate_size=SIZE, num_experts=n),
    ),
    "phimoe": (
        PhimoeSparseMoeBlock,
        lambda n: PhimoeConfig(
            hidden_size=HIDDEN_SIZE, intermediate_size=SIZE, num_local_experts=n
        ),
    ),
    "gpt_oss": (
        GptOssMLP,
        lambda n: GptOssConfig(**_SIZES, intermediate_size=SIZE, num_local_experts=n),
    ),
    "lfm2_moe": (  # whose router takes biases that it does not have here
        Lfm2MoeSparseMoeBlock,
        lambda n: Lfm2MoeConfig(
            **_SIZES, moe_intermediate_size=SIZE, num_experts=n, use_expert_bias=False
        ),
    ),
}


def output(block: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    out = block(rows.unsqueeze(0))
    found: torch.Tensor = (out[0] if isinstance(out, tuple) else out)[0]
    return found


@pytest.mark.parametrize(
    ("name", "dtype", "num_experts"), in_turn(BLOCKS, NATIVE_DTYPES, [6, 64]), ids=str
)
@torch.inference_mode()
def test_a_routed_row_has_the_same_bits_among_any_others(
    name: str, num_experts: int, dtype: torch.dtype, library: NativeLibrary
) -> None:
    """Threads may share the values of all rows, and their number makes no difference."""
    kind, make_config = BLOCKS[name]
    block = _block(kind, make_config(num_experts), dtype)
    rows = torch.randn(800, HIDDEN_SIZE).to(dtype)
    want = output(block, rows)
    fused = fuse_modules(block, library, dtype)
    assert fused[f"0{ROUTER_KEY}"] == num_experts
    pack_linears(block, library, lambda *_: None)
    assert not any(parameter.numel() > num_experts for parameter in block.parameters())
    num_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        together = output(block, rows)
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            for first, count in ((0, 800), (3, 1), (5, 7), (9, 530), (1, 799)):
                part = slice(first, first + count)
                assert torch.equal(together[part], output(block, rows[part]))
    finally:
        torch.set_num_threads(num_threads)
    if num_experts == 64:
        assert num_experts * len(rows) > ONE_THREAD_VALUES
    error = (together - want).float().norm(dim=-1) / want.float().norm(dim=-1)
    assert float(error.quantile(0.9)) < TOLERANCE[dtype]


def test_a_packed_weight_can_only_be_multiplied_by(library: NativeLibrary) -> None:
    weight = torch.randn(5, HIDDEN_SIZE)
    packed = PackedMatrix(library, nn.Parameter(weight))
    rows, bias = torch.randn(3, HIDDEN_SIZE), torch.randn(5)
    found = functional.linear(rows, packed, bias)  # type: ignore[arg-type]
    torch.testing.assert_close(found, functional.linear(rows, weight, bias))
    half = functional.linear(rows.bfloat16(), packed.to(torch.bfloat16))  # type: ignore[arg-type]
    assert half.dtype == torch.bfloat16
    with pytest.raises(TypeError, match="has no"):
        torch.mm(rows, packed)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"rows of torch\.bfloat16"):
        functional.linear(rows.bfloat16(), packed)  # type: ignore[arg-type]

"""Some outputs or inputs of a weight in codes are those of the weight that it stands for."""

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from gguf import GGMLQuantizationType
from transformers import LlamaConfig, Qwen3MoeConfig

from protocol.sampling import SamplingParams
from scripts.gguf.directory import make_directory
from tests.worker.gguf import gguf_files
from tests.worker.parallel.ranks import Ranks
from tests.worker.parity import make_prompts
from tests.worker.quantization.bitsandbytes_layouts import bitsandbytes_table
from tests.worker.quantization.float_layouts import fp8_blocks
from tests.worker.quantization.integer_layouts import awq, gptq, int_quantized, pack_quantized
from tests.worker.quantization.layouts import WIDE, Layout
from tests.worker.quantization.quantized_checkpoints import write_quantized
from worker_proc.gguf.blocks import read_blocks
from worker_proc.modules.experts.grouped import GroupedExperts
from worker_proc.modules.experts.mixture import FusedExperts
from worker_proc.modules.mlp import FusedMLP
from worker_proc.modules.packed_linear import NativeLinear
from worker_proc.native.packed_weights import GROUPED, Format, PackedWeight
from worker_proc.quantization.coded_tensor import CodedTensor
from worker_proc.quantization.packing import obstacle
from worker_proc.quantization.selection import select_inputs, select_outputs
from worker_proc.quantization.weight import CodeKind, QuantizedWeight

SAMPLED = SamplingParams(max_tokens=8, temperature=1.3, seed=1, logprobs=2, ignore_eos=True)
MIXTURE = Qwen3MoeConfig(
    **WIDE | {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}
)


def random_weight(num_inputs: int, group_size: int, order: torch.Tensor | None) -> QuantizedWeight:
    num_groups = -(-num_inputs // group_size)
    return QuantizedWeight(
        CodeKind.INT4,
        torch.randint(16, (32, num_inputs), dtype=torch.uint8),
        torch.rand(32, num_groups),
        torch.randint(16, (32, num_groups)).float(),
        group_size,
        order,
    )


def weights() -> dict[str, QuantizedWeight]:
    torch.manual_seed(0)
    blocks = torch.from_numpy(gguf_files.random_blocks((32, 512), GGMLQuantizationType.Q4_K))
    return {
        "groups": random_weight(256, 32, None),
        "a short last group": random_weight(240, 32, None),
        "one group": random_weight(256, 256, None),
        "groups in an order": random_weight(256, 32, torch.randint(8, (256,))),
        "sections": read_blocks(GGMLQuantizationType.Q4_K, blocks.view(32, 2, -1)),
    }


@pytest.mark.parametrize("name", weights())
def test_a_part_of_the_codes_decodes_to_that_part_of_the_values(name: str) -> None:
    weight = weights()[name]
    values = weight.dequantize(torch.float32)
    outputs = torch.tensor([3, 0, 17, 31])
    chosen = select_outputs(weight, outputs)
    assert torch.equal(chosen.dequantize(torch.float32), values[outputs])
    num_inputs = values.shape[1]
    half = num_inputs // 2
    for inputs in (range(half), range(half, num_inputs), range(32, 96), range(40, 200)):
        part = select_inputs(weight, inputs)
        assert torch.equal(part.dequantize(torch.float32), values[:, inputs.start : inputs.stop])
        begins_group = inputs.start % weight.group_size == 0 or weight.scales.shape[1] == 1
        assert (obstacle(part) == "") == (begins_group and weight.order is None)
        if name == "sections":
            is_whole = inputs.start % 256 == 0 and inputs.stop % 256 == 0
            assert (part.scale_multiples is not None) == is_whole


@pytest.mark.parametrize(
    ("layout", "config", "num_ranks"),
    [
        (pack_quantized(4, 32, is_symmetric=False), LlamaConfig(**WIDE), 2),
        (int_quantized(codes_rows=True), MIXTURE, 2),
        *(
            pytest.param(layout, LlamaConfig(**WIDE), num_ranks, marks=pytest.mark.slow)
            for num_ranks in (2, 4)
            for layout in (
                awq(32),
                gptq(4, 32, is_symmetric=True),
                fp8_blocks(),
                bitsandbytes_table("nf4", is_nested=True),
            )
        ),
    ],
    ids=lambda value: getattr(value, "name", None) or getattr(value, "model_type", value),
)
def test_ranks_have_parts_of_the_codes(
    layout: Layout, config: Any, num_ranks: int, tmp_path: Path
) -> None:
    """Tokens in fp32 are those of one worker; in bfloat16 they do not depend on the batch."""
    write_quantized(tmp_path / "model", layout, config)
    check_ranks(tmp_path / "model", num_ranks)


def test_the_proof_of_a_division_dequantizes_no_layer_like_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise each rank would dequantize all layers again. Attention is tried nowhere else."""
    dequantized: list[str] = []
    own = CodedTensor.dequantize

    def note(tensor: CodedTensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        dequantized.append(tensor.experts[0][0].name)
        return own(tensor, dtype)

    monkeypatch.setattr(CodedTensor, "dequantize", note)
    config = LlamaConfig(**WIDE | {"num_hidden_layers": 3})
    write_quantized(tmp_path / "model", int_quantized(codes_rows=False), config)
    Ranks(tmp_path / "model", 2)
    assert {name.split(".")[2] for name in dequantized if "self_attn" in name} == {"0"}


@pytest.mark.slow
@pytest.mark.parametrize("type", [GGMLQuantizationType.Q4_K, GGMLQuantizationType.Q8_0])
def test_ranks_have_parts_of_the_blocks_of_a_gguf_file(
    type: GGMLQuantizationType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scripts.gguf.cache.cache_directory", lambda: tmp_path / "cache")
    config = LlamaConfig(**gguf_files.WIDE)
    gguf_files.write_random_gguf(tmp_path / "model.gguf", config, type)
    (tmp_path / "model").symlink_to(make_directory(tmp_path / "model.gguf"))
    check_ranks(tmp_path / "model", 2)


def check_ranks(directory: Path, num_ranks: int) -> None:
    prompts = make_prompts()
    one = Ranks(directory, 1)
    expected = one.drive(prompts).output_token_ids
    ranks = Ranks(directory, num_ranks)
    assert ranks.drive(prompts).output_token_ids == expected
    assert ranks.drive(prompts, max_num_batched_tokens=16).output_token_ids == expected
    whole, part = (num_code_bytes(each.runners[-1]) for each in (one, ranks))
    assert 0 < part <= whole // num_ranks
    ranks = Ranks(directory, num_ranks, dtype="bfloat16")
    together = ranks.drive(prompts, SAMPLED)
    for settings in ({"max_num_seqs": 1}, {"max_num_batched_tokens": 7}):
        assert ranks.drive(prompts, SAMPLED, **settings).logprobs == together.logprobs
    assert ranks.runners[0].facts.exact_resume, ranks.runners[0].facts.exact_resume_reason


def num_code_bytes(runner: Any) -> int:
    """Return the bytes of the codes of the MLPs and experts, which are all in codes."""
    packed: list[PackedWeight] = []
    for module in runner._model.modules():
        if isinstance(module, FusedMLP):
            packed += [module.gate_up, cast(NativeLinear, module.down_proj).packed]
        if isinstance(module, FusedExperts | GroupedExperts):
            packed += [module.products.up, module.products.down]
    assert packed
    assert {weight.format for weight in packed} <= {*GROUPED, Format.INT8_FOR_CODES}
    return sum(weight.panels.numel() * weight.panels.itemsize for weight in packed)

"""Quantized checkpoints: what codes stand for, and the tokens of models that are made of them.

The reference of a layout is a plain checkpoint with the weights that its codes stand for.
"""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    BitNetConfig,
    LlamaConfig,
    Qwen2MoeConfig,
    Qwen3_5TextConfig,
    Qwen3MoeConfig,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from protocol.config import Quantization
from protocol.config.settings import configure
from protocol.sampling import SamplingParams
from tests.worker.bitwise import NUM_THREADS, compare, engine_config
from tests.worker.checkpoints import SHAPE, change_config, load_model
from tests.worker.driving import drive
from tests.worker.parity import generate_all, make_prompts, make_runner
from tests.worker.quantization.bitsandbytes_layouts import bitsandbytes_int8, bitsandbytes_table
from tests.worker.quantization.coded_models import coded_formats, open_files
from tests.worker.quantization.float_layouts import (
    float_quantized,
    fp8_blocks,
    fp8_number,
    fp8_tensor,
    modelopt,
    mxfp4_pack_quantized,
    mxfp8_quantized,
    nvfp4_pack_quantized,
)
from tests.worker.quantization.integer_layouts import (
    auto_round,
    awq,
    bitnet,
    gptq,
    int_quantized,
    pack_quantized,
)
from tests.worker.quantization.layouts import WIDE, Layout
from tests.worker.quantization.quantized_checkpoints import LAYOUTS, write_quantized
from tests.worker.runners import make_runners
from worker_proc.errors import UnsupportedModel
from worker_proc.model_runner import ModelRunner
from worker_proc.native.build import compiler
from worker_proc.native.packed_weights import GROUPED, Format
from worker_proc.startup.load_runner import load_model_runner

TIED: dict[str, Any] = {"tie_word_embeddings": True}
MAX_TOKENS = 12
UNEVEN = LlamaConfig(**WIDE | {"hidden_size": 96, "intermediate_size": 160})
"""No block of 128 divides its sizes."""


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_codes_are_read_as_the_weights_that_they_stand_for(layout: Layout, tmp_path: Path) -> None:
    """Scales of 16 bits make every product exact in float32, and others are rounded once."""
    dense = write_quantized(tmp_path / "coded", layout, UNEVEN if "fp8" in layout.name else None)
    files, expected = open_files(tmp_path / "coded"), load_file(dense / "model.safetensors")
    assert len(files.weights) == 2 * 7
    assert files.plain.keys() == expected.keys() - files.weights.keys()
    for name, stored in files.weights.items():
        assert torch.equal(stored.read().dequantize(torch.float32), expected[name]), name


MOE = Qwen3MoeConfig(
    **SHAPE | {"hidden_size": 128},
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=64,
)
OTHER_ROUTER = Qwen2MoeConfig(
    **SHAPE | {"hidden_size": 128, "intermediate_size": 128},
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=64,
    shared_expert_intermediate_size=64,
)
"""Its router and its shared expert are modules of their own."""
RECURRENT = Qwen3_5TextConfig(
    **SHAPE | {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32},
    linear_num_value_heads=4,
    linear_num_key_heads=2,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    layer_types=["linear_attention", "full_attention"],
)
BITNET = BitNetConfig(**WIDE | {"head_dim": 32})
"""Its layers have norms before two of their products."""
SERVED = (
    (gptq(4, 128, is_symmetric=True), None),
    (gptq(4, 64, is_symmetric=False, has_order=True), None),
    (gptq(8, -1, is_symmetric=False, version=2), MOE),
    (awq(64), MOE),
    (pack_quantized(4, 32, is_symmetric=False), MOE),
    (pack_quantized(8, -1, is_symmetric=True), None),
    (int_quantized(codes_rows=False), MOE),
    (int_quantized(codes_rows=True), None),
    (float_quantized("channel"), None),
    (float_quantized("tensor"), MOE),
    (fp8_blocks(), MOE),
    (fp8_tensor(), None),
    (float_quantized("channel"), OTHER_ROUTER),
    (float_quantized("channel"), RECURRENT),
    (bitsandbytes_int8(), MOE),
    (bitsandbytes_table("nf4", is_nested=True), MOE),
    (bitsandbytes_table("nf4", is_nested=True), None),
    (bitsandbytes_table("fp4", is_nested=False), None),
    *(
        pytest.param(layout, config, marks=pytest.mark.slow, id=layout.name)
        for layout, config in (
            (bitnet("bitlinear"), None),
            (bitnet("autobitlinear"), BITNET),
            (fp8_number("weight_scale_inv"), None),
            (nvfp4_pack_quantized(), None),
            (mxfp4_pack_quantized(), MOE),
            (mxfp8_quantized(), None),
            (modelopt("NVFP4"), MOE),
            (modelopt("MXFP8"), MOE),
            (auto_round(gptq(4, 128, is_symmetric=True)), None),
        )
    ),
)


def check_decoder(runner: ModelRunner, config: Any) -> None:
    assert runner.facts.decoder == (
        "modules" if config in (BITNET, OTHER_ROUTER, RECURRENT) else "native"
    )
    assert runner.facts.exact_resume


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize(("layout", "config"), SERVED, ids=lambda value: getattr(value, "name", ""))
def test_tokens_in_float32_are_those_of_the_dequantized_checkpoint(
    layout: Layout, config: Any, tmp_path: Path
) -> None:
    """The kernels compute them from the codes: no weight is dequantized in memory."""
    dense = write_quantized(tmp_path / "coded", layout, config)
    model = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
    prompts = make_prompts()[:6]
    expected = generate_all(model, prompts, MAX_TOKENS)
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)
    runner = make_runner(tmp_path / "coded", 200)
    assert len(coded_formats(runner)) == 1
    assert coded_formats(runner) <= set(GROUPED)
    assert runner.facts.quantization == layout.description
    check_decoder(runner, config)
    run = drive(runner, prompts, params, max_num_seqs=6)
    assert run.output_token_ids == expected
    assert len(set(map(tuple, expected))) == len(prompts)


SCHEDULED = (
    (gptq(4, 64, is_symmetric=False, has_order=True), None),
    (pack_quantized(4, 32, is_symmetric=False), MOE),
    (int_quantized(codes_rows=True), MOE),
    (int_quantized(codes_rows=True), OTHER_ROUTER),
    (int_quantized(codes_rows=True), None),
    (fp8_blocks(), None),
    (bitsandbytes_table("nf4", is_nested=True), MOE),
)


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize(
    ("layout", "config"), SCHEDULED, ids=lambda value: getattr(value, "name", "")
)
def test_logits_are_the_same_bits_in_every_schedule(
    layout: Layout, config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_quantized(tmp_path, layout, config)
    change_config(tmp_path, max_position_embeddings=512)

    def checked(runner: ModelRunner) -> ModelRunner:
        check_decoder(runner, config)
        rounds_rows = layout.name == "int_quantized_w8a8"
        assert (Format.INT8_FOR_CODES in coded_formats(runner)) == rounds_rows
        return runner

    configs = [engine_config(tmp_path, "bfloat16", threads) for threads in NUM_THREADS]
    compare(map(checked, make_runners(configs)), monkeypatch)


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
def test_weights_that_no_kernel_reads_are_dequantized_and_a_line_states_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Tiles of codes have 32 inputs, so 48 of them cannot be a group."""
    layout = fp8_blocks()
    changed = layout.settings | {"weight_block_size": [128, 48]}
    write_quantized(tmp_path, replace(layout, settings=changed))
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    for name in [name for name in tensors if name.endswith("weight_scale_inv")]:
        columns = -(-tensors[name.replace("weight_scale_inv", "weight")].shape[1] // 48)
        tensors[name] = torch.full((len(tensors[name]), columns), 0.01)
    save_file(tensors, path, {"format": "pt"})
    with caplog.at_level(logging.INFO):
        runner = make_runner(tmp_path, 200)
    assert "fp8: 14 weights are dequantized to float32: groups of 48 inputs" in caplog.text
    assert runner.facts.quantization == ""
    assert coded_formats(runner) == {Format.UNITS}


def test_shards_may_be_in_subdirectories(tmp_path: Path) -> None:
    """transformers joins the directory and the paths of the index, too."""
    dense = write_quantized(tmp_path / "coded", awq(64))
    expected = load_file(dense / "model.safetensors")
    for directory, shard in ((tmp_path / "coded", "a/1.safetensors"), (dense, "b/c/1.safetensors")):
        (directory / shard).parent.mkdir(parents=True)
        (directory / "model.safetensors").rename(directory / shard)
        index = {"metadata": {}, "weight_map": dict.fromkeys(load_file(directory / shard), shard)}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    for name, stored in open_files(tmp_path / "coded").weights.items():
        assert torch.equal(stored.read().dequantize(torch.float32), expected[name]), name
    plain = load_model(dense, "float32").model.state_dict()
    assert all(torch.equal(plain[name], tensor) for name, tensor in expected.items())


def test_blocks_of_a_table_may_cross_the_ends_of_rows(tmp_path: Path) -> None:
    layout = bitsandbytes_table("nf4", is_nested=True)
    sizes = {"hidden_size": 80, "intermediate_size": 96, "head_dim": 20}
    dense = write_quantized(tmp_path / "coded", layout, LlamaConfig(**SHAPE | sizes))
    expected = load_file(dense / "model.safetensors")
    for name, stored in open_files(tmp_path / "coded").weights.items():
        assert torch.equal(stored.read().dequantize(torch.float32), expected[name]), name


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize("quantization", [Quantization.W8A16, Quantization.W8A8])
def test_the_output_layer_of_a_quantized_checkpoint_can_be_rounded(
    quantization: Quantization, tmp_path: Path
) -> None:
    """The codes of all other layers stay as they are stored."""
    write_quantized(tmp_path, gptq(4, 128, is_symmetric=True), LlamaConfig(**WIDE | TIED))
    config = engine_config(tmp_path, "bfloat16", 1)
    model = msgspec.structs.replace(config.model, quantization=quantization)
    runner = load_model_runner(msgspec.structs.replace(config, model=model), lambda *_: None)
    assert runner._model.lm_head.packed.format is Format.INT8
    assert coded_formats(runner) == {Format.GROUPED_INT4}
    assert runner.facts.quantization == "gptq int4, output layer int8"
    assert runner.facts.exact_resume


def test_an_output_layer_that_is_codes_is_not_rounded_again(tmp_path: Path) -> None:
    layout = awq(64)
    write_quantized(tmp_path, layout)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    parts, _ = layout.encode(tensors.pop("lm_head.weight"))
    tensors |= {f"lm_head.{part}": value.contiguous() for part, value in parts.items()}
    save_file(tensors, path, {"format": "pt"})
    config = configure(model=str(tmp_path), device="cpu", dtype="bfloat16", quantization="w8a16")
    with pytest.raises(UnsupportedModel, match=r"already \(awq\), its output layer included"):
        load_model_runner(config, lambda *_: None)

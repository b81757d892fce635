"""Quantized checkpoints: what codes stand for, and the tokens of models that are made of them.

The reference of a layout is a plain checkpoint with the weights that its codes stand for.
"""

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, Qwen2MoeConfig, Qwen3_5TextConfig, Qwen3MoeConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from protocol.config import Quantization
from protocol.config.settings import configure
from protocol.sampling import SamplingParams
from tests.worker.bitwise import NUM_THREADS, compare, engine_config
from tests.worker.checkpoints import SHAPE, build_checkpoint
from tests.worker.driving import drive
from tests.worker.loading.test_loader import change_config, load
from tests.worker.parity import generate, make_prompts, make_runner
from tests.worker.quantization.quantized_checkpoints import (
    LAYOUTS,
    WIDE,
    Layout,
    auto_round,
    awq,
    bitsandbytes_int8,
    bitsandbytes_table,
    float_quantized,
    fp8_blocks,
    fp8_number,
    fp8_tensor,
    gptq,
    int_quantized,
    modelopt,
    mxfp4_pack_quantized,
    mxfp8_quantized,
    nvfp4_pack_quantized,
    pack_quantized,
    write_quantized,
)
from tests.worker.runners import make_runners
from tests.worker.score_term_models import SCORE_TERMS
from worker_proc.errors import CheckpointError, UnsupportedModel
from worker_proc.loading.inspection import inspect_config
from worker_proc.model_runner import ModelRunner
from worker_proc.modules.experts import FusedExperts
from worker_proc.modules.fused import FusedMLP
from worker_proc.modules.grouped_experts import GroupedExperts
from worker_proc.modules.packed_linear import NativeLinear
from worker_proc.native.build import compiler
from worker_proc.native.packed_weights import GROUPED, Format
from worker_proc.quantization.compressed_tensors import IntScheme
from worker_proc.quantization.files import QuantizedFiles
from worker_proc.quantization.headers import StoredTensor, read_headers
from worker_proc.startup.early_refusals import refuse_config
from worker_proc.startup.load_runner import load_model_runner

CPU = torch.device("cpu")
TIED: dict[str, Any] = {"tie_word_embeddings": True}
MAX_TOKENS = 12
UNEVEN = LlamaConfig(**WIDE | {"hidden_size": 96, "intermediate_size": 160})
"""No block of 128 divides its sizes."""


def open_files(directory: Path) -> QuantizedFiles:
    format = inspect_config(str(directory), "auto", CPU).format
    assert format is not None
    return QuantizedFiles(str(directory), read_headers(str(directory)), format)


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


def coded_formats(runner: ModelRunner) -> set[Format]:
    """Return the formats of all weights but those of the output layer and of routers."""
    formats = set()
    for module in runner._model.modules():
        if isinstance(module, NativeLinear) and module is not runner._model.lm_head:
            formats.add(module.packed.format)
        if isinstance(module, FusedMLP):
            formats.add(module.gate_up.format)
        if isinstance(module, FusedExperts | GroupedExperts):
            formats |= {module.products.up.format, module.products.down.format}
    return formats


def check_decoder(runner: ModelRunner, config: Any) -> None:
    assert runner.facts.decoder == ("modules" if config in (OTHER_ROUTER, RECURRENT) else "native")
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
    expected = [generate(model, prompt, MAX_TOKENS) for prompt in prompts]
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


def test_blocks_of_a_table_may_cross_the_ends_of_rows(tmp_path: Path) -> None:
    layout = bitsandbytes_table("nf4", is_nested=True)
    sizes = {"hidden_size": 80, "intermediate_size": 96, "head_dim": 20}
    dense = write_quantized(tmp_path / "coded", layout, LlamaConfig(**SHAPE | sizes))
    expected = load_file(dense / "model.safetensors")
    for name, stored in open_files(tmp_path / "coded").weights.items():
        assert torch.equal(stored.read().dequantize(torch.float32), expected[name]), name


def compressed(**changes: Any) -> dict[str, Any]:
    """Settings of compressed-tensors with changes of the only group's weights."""
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32} | changes
    group = {"targets": ["Linear"], "weights": weights}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"a": group},
    }


GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 128}


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


BNB: dict[str, Any] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 128}
FP8: dict[str, Any] = {"quant_method": "fp8"}
MODELOPT: dict[str, Any] = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
ROUNDED = auto_round(awq(64)).settings
GROUP = r"config_groups\.a"
ROTATED_ROWS = {"config_groups": {"R4": {"type": "hadamard", "apply": [{"location": "input"}]}}}
"""What llm-compressor writes for rotations that are computed with the rows."""


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ("gptq", 'quantization_config is "gptq", and must be an object'),
        ({"quant_method": "hqq"}, r"quant_method is 'hqq'; supported: auto-round, awq, "),
        ({}, "quant_method is None"),
        (GPTQ | {"bits": 3}, "quantization_config.bits is 3; supported: 4 or 8"),
        (GPTQ | {"bits": True}, "bits is true"),
        (GPTQ | {"group_size": 16}, "group_size is 16; supported: -1 or 32 or 64 or 128"),
        (GPTQ | {"checkpoint_format": "marlin"}, 'checkpoint_format is "marlin"'),
        (GPTQ | {"format": "gptq_p"}, 'quantization_config.format is "gptq_p"; supported: "gptq"'),
        (
            GPTQ | {"format": "gptq_v2", "checkpoint_format": "gptq"},
            'format is "gptq_v2"; supported: the value of checkpoint_format',
        ),
        (GPTQ | {"rotation": "hadamard"}, 'rotation is "hadamard"; layers whose rows are rotated'),
        (
            GPTQ | {"dynamic": {"+:.*down": {"bits": 3}}},
            r"dynamic\.\+:\.\*down\.bits is 3; support",
        ),
        (GPTQ | {"dynamic": {"+:(": {"bits": 8}}}, r"dynamic\.\+:\( is .*regular expressions"),
        (
            GPTQ | {"dynamic": {".*down": {"method": "awq"}}},
            r'down\.method is "awq"; supported: "g',
        ),
        (GPTQ | {"dynamic": ["a"]}, r'dynamic is \["a"\], and must be an object'),
        (AWQ | {"format": "gemv"}, 'format is "gemv"; supported: "gemm"'),
        (AWQ | {"dynamic": {"a": {"group_size": 48}}}, r"dynamic\.a\.group_size is 48"),
        (AWQ | {"bits": 8}, "bits is 8; supported: 4"),
        (AWQ | {"version": "gemv"}, 'version is "gemv"; supported: "gemm"'),
        (AWQ | {"zero_point": False}, "zero_point is false"),
        (BNB | {"load_in_4bit": False}, "load_in_4bit is false; supported: true"),
        (BNB | {"bnb_4bit_quant_type": "int4"}, 'quant_type is "int4"; supported: "nf4" or "fp4"'),
        (BNB | {"bnb_4bit_quant_storage": "bfloat16"}, 'storage is "bfloat16"; supported: "uint8"'),
        (FP8 | {"weight_block_size": [128]}, r"weight_block_size is \[128\]; supported: two"),
        (FP8 | {"fmt": "e5m2"}, 'fmt is "e5m2"'),
        (MODELOPT | {"quant_algo": "NVFP4_AWQ"}, 'quant_algo is "NVFP4_AWQ"; supported: "FP8" or'),
        (
            MODELOPT | {"quantized_layers": {"a": {"quant_algo": "INT4"}}},
            r"layers\.a\.quant_algo is",
        ),
        (ROUNDED | {"packing_format": "auto_round:fake"}, 'packing_format is "auto_round:fake"; s'),
        (
            ROUNDED | {"rotation_config": {"block_size": 32}},
            'rotation_config is {"block_size": 32}',
        ),
        (
            ROUNDED | {"extra_config": {"a": {"rotation_config": {"block_size": 32}}}},
            r"config\.a\.rotation_config is .*supported: null",
        ),
        (ROUNDED | {"act_bits": 8}, "act_bits is 8; supported: 16 or 32"),
        (ROUNDED | {"data_type": "int_asym_dq"}, 'data_type is "int_asym_dq"; supported: "int"'),
        (ROUNDED | {"extra_config": {"a": {"bits": 8}}}, r"config\.a\.bits is 8; supported: 4"),
        (ROUNDED | {"extra_config": {".*(": {"bits": 4}}}, r"\.\*\( is .*regular expressions"),
        (
            ROUNDED | {"extra_config": {"a": {"bits": "16"}}},
            r'config\.a\.bits is "16"; supported: 4',
        ),
        (compressed() | {"format": "marlin-24"}, 'format is "marlin-24"; supported: "pack-q'),
        (compressed() | {"config_groups": {}}, "config_groups is {}; supported: at least one"),
        (compressed() | {"config_groups": {"a": 1}}, rf"{GROUP} is 1, and must be an object"),
        (
            compressed() | {"sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparsity_config.form",
        ),
        (
            compressed() | {"transform_config": ROTATED_ROWS},
            r'transform_config\.config_groups\.R4\.apply is .*"location": "input".*supported: the',
        ),
        (
            compressed() | {"config_groups": {"a": {"targets": ["re:("]}}},
            rf'{GROUP}\.targets is \["re:\("\]; supported: a list of names, and of regular',
        ),
        (compressed(num_bits=3), rf"{GROUP}\.weights\.num_bits is 3; supported: 4 or 8"),
        (compressed(group_size=48), rf"{GROUP}\.weights\.group_size is 48"),
        (compressed(strategy="tensor_group"), rf"{GROUP}\.weights\.strategy is"),
        (compressed(actorder="group"), rf"{GROUP}\.weights\.actorder is"),
        (compressed(type="float"), rf"{GROUP}\.weights\.type is"),
    ],
    ids=str,
)
def test_settings_are_refused_before_weights_are_read(
    settings: Any, reason: str, tmp_path: Path
) -> None:
    """The directory has no weights: a hub's check refuses them before it fetches any."""
    LlamaConfig(**WIDE).save_pretrained(tmp_path)
    change_config(tmp_path, quantization_config=settings)
    with pytest.raises((UnsupportedModel, CheckpointError), match=reason) as caught:
        inspect_config(str(tmp_path), "auto", CPU)
    assert "config.json: quantization_config" in str(caught.value)


def test_codes_of_joined_experts_are_refused_before_weights_are_read(tmp_path: Path) -> None:
    config = SCORE_TERMS[0].config()
    assert config.model_type == "inkling_text"
    config.save_pretrained(tmp_path)
    change_config(tmp_path, quantization_config=MODELOPT)
    for refuse in (refuse_config, lambda path: inspect_config(path, "auto", CPU)):
        with pytest.raises(UnsupportedModel, match="codes of all experts of a layer in one tensor"):
            refuse(str(tmp_path))


LAYER = "model.layers.1.mlp.up_proj"


@pytest.mark.parametrize(
    ("layout", "part", "value", "reason"),
    [
        (awq(64), "scales", None, f"{LAYER} misses scales"),
        (awq(64), "qzeros", torch.zeros(2, 3, dtype=torch.int32), r"qzeros of shape \[2, 3\] inst"),
        (awq(64), "scales", torch.full((2, 256), torch.inf), "scales that are not finite"),
        (gptq(4, 64, is_symmetric=True), "qweight", torch.zeros(2), "qweight stored as F32"),
        (
            gptq(4, 64, is_symmetric=True),
            "g_idx",
            torch.full((128,), 2, dtype=torch.int32),
            "g_idx outside of its 2 groups",
        ),
        (gptq(4, 64, is_symmetric=True, has_order=True), "g_idx", None, f"{LAYER} misses g_idx"),
        (
            pack_quantized(4, 32, is_symmetric=True),
            "weight_shape",
            torch.tensor([256, 120]),
            r"weight_shape of \[256, 120\] instead of \[256, 128\]",
        ),
        (
            fp8_blocks(),
            "weight",
            torch.full((256, 128), torch.nan).to(torch.float8_e4m3fn),
            "codes that are not numbers",
        ),
        (fp8_blocks(), "weight", torch.zeros(256, 64).to(torch.float8_e4m3fn), "another shape"),
        (fp8_blocks(), "weight", torch.zeros(256, 130).to(torch.float8_e4m3fn), "weight_scale_inv"),
        (awq(64), "qweight", torch.zeros(128, 16, dtype=torch.int32), "scales of shape"),
        (bitsandbytes_int8(), "SCB", None, f"{LAYER} misses SCB"),
        (
            bitsandbytes_int8(),
            "weight_format",
            torch.tensor(1, dtype=torch.uint8),
            "other than rows",
        ),
        (
            bitsandbytes_table("nf4", is_nested=True),
            "weight.quant_state.bitsandbytes__nf4",
            torch.tensor([1], dtype=torch.uint8),
            "that cannot be read",
        ),
        (
            bitsandbytes_table("nf4", is_nested=True),
            "weight.nested_absmax",
            None,
            f"{LAYER} misses weight.nested_absmax",
        ),
        (
            bitsandbytes_table("fp4", is_nested=False),
            "weight.absmax",
            torch.full((512,), torch.nan),
            "scales that are not finite",
        ),
        (
            bitsandbytes_table("fp4", is_nested=False),
            "weight.quant_map",
            torch.full((16,), torch.nan),
            "a table of values that are not finite",
        ),
        (awq(64), "extra", torch.zeros(3), f"has {LAYER}.extra, which llama does not use"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_tensors_that_do_not_fit_are_named(
    layout: Layout, part: str, value: torch.Tensor | None, reason: str, tmp_path: Path
) -> None:
    write_quantized(tmp_path / "coded", layout)
    path = tmp_path / "coded" / "model.safetensors"
    tensors = load_file(path)
    tensors.pop(f"{LAYER}.{part}", None)
    if value is not None:
        tensors[f"{LAYER}.{part}"] = value
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(CheckpointError, match=reason) as caught:
        make_runner(tmp_path / "coded", 200)  # the values are checked when codes are packed
    assert LAYER in str(caught.value)


STATE = "weight.quant_state.bitsandbytes__nf4"
NESTED = bitsandbytes_table("nf4", is_nested=True)
PLAIN_TABLE = bitsandbytes_table("nf4", is_nested=False)


def state(text: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what replaces the text of a layer."""
    return lambda _: torch.tensor(list(text.encode()), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("layout", "part", "change", "reason"),
    [
        (NESTED, "weight", lambda one: one.to(torch.int8), "weight stored as I8 instead of U8"),
        (NESTED, "weight.absmax", torch.Tensor.float, "absmax stored as F32 instead of U8"),
        (PLAIN_TABLE, "weight.absmax", torch.Tensor.byte, "absmax stored as U8 instead of F32"),
        (PLAIN_TABLE, "weight.quant_map", torch.Tensor.byte, "quant_map stored as U8 instead of"),
        (NESTED, "weight.nested_absmax", torch.Tensor.half, "nested_absmax stored as F16 inste"),
        (NESTED, "weight.nested_quant_map", torch.Tensor.half, "nested_quant_map stored as F16"),
        (bitsandbytes_int8(), "SCB", torch.Tensor.half, "SCB stored as F16 instead of F32"),
        (bitsandbytes_int8(), "weight_format", torch.Tensor.float, "weight_format stored as F32"),
        (NESTED, STATE, torch.Tensor.int, f"{STATE} stored as I32 instead of U8"),
        (NESTED, STATE, lambda one: one.repeat(1000), "of more than 65536 bytes"),
        (NESTED, STATE, state('{"shape": [256, 128], "blocksize": Infinity}'), "cannot be read"),
        (NESTED, STATE, state('{"a": ' + "[" * 60_000), "nested too deeply"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_types_of_tensors_are_checked_by_their_headers(
    layout: Layout,
    part: str,
    change: Callable[[torch.Tensor], torch.Tensor],
    reason: str,
    tmp_path: Path,
) -> None:
    write_quantized(tmp_path / "coded", layout)
    path = tmp_path / "coded" / "model.safetensors"
    tensors = load_file(path)
    tensors[f"{LAYER}.{part}"] = change(tensors[f"{LAYER}.{part}"])
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(CheckpointError, match=reason) as caught:
        open_files(tmp_path / "coded")
    assert LAYER in str(caught.value)


def encode_down_proj(directory: Path, expected: dict[str, torch.Tensor], layout: Layout) -> None:
    """Write the weights of each `down_proj` anew in a layout; `expected` gets their values."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for name in [name for name in expected if name.endswith("down_proj.weight")]:
        parts, values = layout.encode(expected[name])
        layer = name.removesuffix("weight")
        tensors = {key: value for key, value in tensors.items() if not key.startswith(layer)}
        tensors |= {layer + part: value.contiguous() for part, value in parts.items()}
        expected[name] = values.float()
    save_file(tensors, path, {"format": "pt"})


@pytest.mark.parametrize(
    ("key", "rules"),
    [
        ("dynamic", {r"-:.*\.gate": {}, r"+:.*\.down_proj": {"bits": 8, "group_size": -1}}),
        ("dynamic", {r"model\.layers\.\d\.mlp\.down": {"bits": 8, "group_size": -1}}),
        ("extra_config", {r".*\.down_proj$": {"bits": 8, "group_size": -1}}),
        (
            "extra_config",
            {
                **{
                    f"model.layers.{number}.mlp.down_proj": {"bits": 8, "group_size": -1}
                    for number in range(2)
                },
                ".*layers.*": {"bits": 4, "group_size": 64},
            },
        ),
    ],
    ids=["prefixes", "none", "regex", "names"],
)
def test_rules_give_layers_their_own_bits(key: str, rules: dict[str, Any], tmp_path: Path) -> None:
    """Down projections have 8 bits and one group; other settings do not fit their tensors."""
    four, eight = gptq(4, 64, is_symmetric=False), gptq(8, -1, is_symmetric=False)
    layout = auto_round(four) if key == "extra_config" else four
    dense = write_quantized(tmp_path / "coded", layout)
    expected = load_file(dense / "model.safetensors")
    encode_down_proj(tmp_path / "coded", expected, eight)
    change_config(tmp_path / "coded", quantization_config=layout.settings | {key: rules})
    for name, stored in open_files(tmp_path / "coded").weights.items():
        assert torch.equal(stored.read().dequantize(torch.float32), expected[name]), name
    change_config(tmp_path / "coded", quantization_config=layout.settings)
    with pytest.raises(CheckpointError, match=r"down_proj has a (scales|g_idx) of shape"):
        open_files(tmp_path / "coded")


@pytest.mark.parametrize("key", ["format", "checkpoint_format"])
def test_either_key_states_the_version_of_gptq(key: str, tmp_path: Path) -> None:
    layout = gptq(4, 64, is_symmetric=False, version=2)
    layout.settings.pop("checkpoint_format")
    dense = write_quantized(
        tmp_path / "coded", replace(layout, settings=layout.settings | {key: "gptq_v2"})
    )
    expected = load_file(dense / "model.safetensors")
    for name, stored in open_files(tmp_path / "coded").weights.items():
        assert torch.equal(stored.read().dequantize(torch.float32), expected[name]), name


def test_groups_of_layers_have_their_own_schemes(tmp_path: Path) -> None:
    """A group that names a layer comes before that of all layers."""
    four, eight = (pack_quantized(bits, 64, is_symmetric=True) for bits in (4, 8))
    groups = [layout.settings["config_groups"]["group_0"] for layout in (four, eight)]
    settings = four.settings | {
        "config_groups": {"all": groups[0], "down": groups[1] | {"targets": [r"re:.*down_proj$"]}}
    }
    dense = write_quantized(tmp_path / "coded", four)
    expected = load_file(dense / "model.safetensors")
    encode_down_proj(tmp_path / "coded", expected, eight)
    change_config(tmp_path / "coded", quantization_config=settings)
    for name, stored in open_files(tmp_path / "coded").weights.items():
        assert torch.equal(stored.read().dequantize(torch.float32), expected[name]), name
    groups[1]["targets"] = ["model.layers.0.mlp.down_proj"]
    settings["config_groups"] = {"down": groups[1]}
    change_config(tmp_path / "coded", quantization_config=settings)
    with pytest.raises(CheckpointError, match="no target of config_groups names it"):
        load(tmp_path / "coded")


def test_groups_of_layers_have_their_own_formats(tmp_path: Path) -> None:
    """NVFP4 in most layers, and FP8 in others."""
    four, eight = nvfp4_pack_quantized(), float_quantized("channel")
    groups = [
        layout.settings["config_groups"]["group_0"] | {"format": layout.settings["format"]}
        for layout in (four, eight)
    ]
    dense = write_quantized(tmp_path / "coded", four)
    expected = load_file(dense / "model.safetensors")
    encode_down_proj(tmp_path / "coded", expected, eight)
    groups[1]["targets"] = [r"re:.*down_proj$"]
    settings = {"format": "mixed-precision", "config_groups": dict(zip("ab", groups, strict=True))}
    change_config(tmp_path / "coded", quantization_config=four.settings | settings)
    weights = open_files(tmp_path / "coded").weights
    assert len(weights) == 2 * 7
    for name, stored in weights.items():
        assert torch.equal(stored.read().dequantize(torch.float32), expected[name]), name


def test_settings_may_be_in_a_separate_file(tmp_path: Path) -> None:
    """Older checkpoints of Model Optimizer have no quantization_config in config.json."""
    layout = modelopt("NVFP4")
    write_quantized(tmp_path / "coded", replace(layout, settings={}))
    config = json.loads((tmp_path / "coded" / "config.json").read_text())
    config.pop("quantization_config")
    (tmp_path / "coded" / "config.json").write_text(json.dumps(config))
    own = tmp_path / "coded" / "hf_quant_config.json"
    own.write_text(json.dumps({"quantization": {"quant_algo": "NVFP4", "group_size": 16}}))
    assert len(open_files(tmp_path / "coded").weights) == 2 * 7
    for content, reason in (
        ("{", "cannot be read as JSON"),
        ("[" * 100_000, "cannot be read as JSON: it is nested too deeply"),
        ("{}", "quantization is null, and must be an object"),
        ('{"quantization": {"quant_algo": "W4A8_AWQ"}}', 'quantization.quant_algo is "W4A8_AWQ"'),
    ):
        own.write_text(content)
        with pytest.raises((CheckpointError, UnsupportedModel), match=reason) as caught:
            open_files(tmp_path / "coded")
        assert str(own) in str(caught.value)


@pytest.mark.parametrize("kind", ["compressed-tensors", "modelopt", "hf_quant_config.json"])
def test_checkpoints_that_round_the_cache_alone_are_plain(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Their weights are read, and the scales of keys and values are not used."""
    build_checkpoint(tmp_path, LlamaConfig(**WIDE))
    cache = {"num_bits": 8, "type": "float"}
    names = [f"model.layers.{number}.self_attn" for number in range(2)]
    if kind == "compressed-tensors":
        settings = {"quant_method": kind, "format": "dense", "config_groups": {}}
        change_config(tmp_path, quantization_config=settings | {"kv_cache_scheme": cache})
        scales = {f"{name}.{key}_scale": torch.ones(1) for name in names for key in "kv"}
    else:
        settings = {"quant_algo": None, "kv_cache_quant_algo": "FP8"}
        scales = {
            f"{name}.{key}_proj.{key}_scale": torch.ones(()) for name in names for key in "kv"
        }
        if kind == "modelopt":
            change_config(tmp_path, quantization_config=settings | {"quant_method": kind})
        else:
            content = json.dumps({"quantization": settings})
            (tmp_path / kind).write_text(content)
    plain = load_file(tmp_path / "model.safetensors")
    save_file(plain | scales, tmp_path / "model.safetensors", {"format": "pt"})
    with caplog.at_level("INFO"):
        loaded = load(tmp_path)
    assert "suggests that the KV cache is rounded, which is not done" in caplog.text
    assert loaded.codes is None
    found = loaded.model.state_dict()
    assert all(torch.equal(found[name], one.to(found[name].dtype)) for name, one in plain.items())


@pytest.mark.parametrize("packing", [gptq(4, 128, is_symmetric=True), awq(128)])
def test_settings_that_auto_round_leaves_out_have_its_defaults(
    packing: Layout, tmp_path: Path
) -> None:
    layout = auto_round(packing)
    settings = {key: value for key, value in layout.settings.items() if key != "group_size"}
    settings["extra_config"] = {"model.layers.0.mlp.up_proj": {"bits": 4, "group_size": 128}}
    write_quantized(tmp_path, replace(layout, settings=settings))
    assert len(open_files(tmp_path).weights) == 2 * 7


@pytest.mark.parametrize(
    ("zeros", "reason"),
    [
        (torch.full((64, 2), 200, dtype=torch.int32), "has zero points that are not from -128 to"),
        (torch.zeros(64, 2), "has weight_zero_point stored as F32 instead of I8 or I32"),
    ],
)
def test_zero_points_are_whole_numbers_within_the_codes(zeros: torch.Tensor, reason: str) -> None:
    scheme = IntScheme(8, 32, is_packed=False, is_symmetric=False, codes_rows=False)
    tensors = {
        "weight": torch.zeros(64, 64, dtype=torch.int8),
        "weight_scale": torch.ones(64, 2),
        "weight_zero_point": zeros,
    }
    names = {torch.int8: "I8", torch.int32: "I32", torch.float32: "F32"}
    stored = {
        name: StoredTensor("", names[one.dtype], tuple(one.shape)) for name, one in tensors.items()
    }

    def check() -> None:
        scheme.shape(stored, tensors.__getitem__)
        scheme.read(tensors)

    with pytest.raises(ValueError, match=reason):
        check()


def test_rotations_within_weights_are_accepted(tmp_path: Path) -> None:
    """llm-compressor states them, and writes an empty `sparsity_config`."""
    layout = pack_quantized(4, 32, is_symmetric=True)
    rotated = {"R1": {"type": "hadamard", "apply": [{"location": "weight_output"}]}}
    others = {"transform_config": {"config_groups": rotated}, "sparsity_config": {}}
    write_quantized(tmp_path, replace(layout, settings=layout.settings | others))
    assert len(open_files(tmp_path).weights) == 2 * 7


@pytest.mark.parametrize(
    "layout",
    [layout for layout in LAYOUTS if "compressed" in layout.description],
    ids=lambda layout: layout.name,
)
def test_the_library_reads_the_same_weights(layout: Layout) -> None:
    library = pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    assert library.__version__
    weight = torch.randn(32, 256, generator=torch.Generator().manual_seed(1))
    parts, values = layout.encode(weight)
    scheme = QuantizationScheme(**layout.settings["config_groups"]["group_0"])
    compressor = BaseCompressor.get_value_from_registry(layout.settings["format"])
    found = compressor.decompress(dict(parts), scheme)["weight"]
    assert torch.equal(found.bfloat16(), values.bfloat16())


@pytest.mark.parametrize("is_nested", [True, False])
@pytest.mark.parametrize("name", ["nf4", "fp4"])
def test_bitsandbytes_reads_the_same_numbers_of_4_bits(
    name: str, is_nested: bool, tmp_path: Path
) -> None:
    """The library writes the tensors, and dequantizes them to float32, as the reader does."""
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = torch.randn(256, 128, generator=torch.Generator().manual_seed(1))
    codes, state = functional.quantize_4bit(
        weight, blocksize=64, quant_type=name, compress_statistics=is_nested
    )
    parts = {f"weight.{part}": value for part, value in state.as_dict(packed=True).items()}
    layout = bitsandbytes_table(name, is_nested=is_nested)
    write_library_tensors(tmp_path, layout, parts | {"weight": codes})
    found = open_files(tmp_path).weights[f"{LAYER}.weight"].read().dequantize(torch.float32)
    torch.testing.assert_close(found, functional.dequantize_4bit(codes, state), atol=1e-6, rtol=0)


def test_bitsandbytes_reads_the_same_numbers_of_8_bits(tmp_path: Path) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = torch.randn(256, 128, generator=torch.Generator().manual_seed(1)).half()
    codes, scales, _ = functional.int8_vectorwise_quant(weight)
    write_library_tensors(tmp_path, bitsandbytes_int8(), {"weight": codes, "SCB": scales})
    found = open_files(tmp_path).weights[f"{LAYER}.weight"].read().dequantize(torch.float32)
    expected = functional.int8_vectorwise_dequant(codes, scales)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


def write_library_tensors(directory: Path, layout: Layout, parts: dict[str, torch.Tensor]) -> None:
    """Write a checkpoint one of whose layers has the tensors of a library."""
    write_quantized(directory, layout)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    tensors = {name: tensors[name] for name in tensors if not name.startswith(f"{LAYER}.")}
    tensors |= {f"{LAYER}.{part}": value.contiguous() for part, value in parts.items()}
    save_file(tensors, path, {"format": "pt"})

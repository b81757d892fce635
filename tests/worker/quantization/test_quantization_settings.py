"""Settings of quantized checkpoints: which are refused, and which layers they are about."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from tests.worker.checkpoints import build_checkpoint, change_config, load_model
from tests.worker.quantization.coded_models import CPU, open_files
from tests.worker.quantization.float_layouts import float_quantized, modelopt, nvfp4_pack_quantized
from tests.worker.quantization.integer_layouts import auto_round, awq, gptq, pack_quantized
from tests.worker.quantization.layouts import WIDE, Layout
from tests.worker.quantization.quantized_checkpoints import write_quantized
from tests.worker.score_term_models import SCORE_TERMS
from worker_proc.errors import CheckpointError, UnsupportedModel
from worker_proc.loading.inspection import inspect_config
from worker_proc.startup.early_refusals import refuse_config


def compressed(**changes: Any) -> dict[str, Any]:
    """Return settings of compressed-tensors with changes of the only group's weights."""
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32} | changes
    group = {"targets": ["Linear"], "weights": weights}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"a": group},
    }


GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 128}
BITNET: dict[str, Any] = {"quant_method": "bitnet"}
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
        (BITNET | {"quantization_mode": "online"}, 'mode is "online"; supported: "offline"'),
        (BITNET | {"use_rms_norm": True}, "use_rms_norm is true; supported: false"),
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


@pytest.mark.parametrize("key", ["rotation_config", "spinquant_config"])
def test_rotated_rows_of_plain_weights_are_refused(key: str, tmp_path: Path) -> None:
    """AutoRound has these keys beside the sizes of a model that it rotates and does not round."""
    LlamaConfig(**WIDE).save_pretrained(tmp_path)
    change_config(tmp_path, **{key: {"block_size": 32}})
    reason = f'config.json: {key} is {{"block_size": 32}}; layers whose rows are rotated first'
    for refuse in (refuse_config, lambda path: inspect_config(path, "auto", CPU)):
        with pytest.raises(UnsupportedModel, match=re.escape(reason)):
            refuse(str(tmp_path))
    change_config(tmp_path, **{key: None})
    refuse_config(str(tmp_path))
    assert inspect_config(str(tmp_path), "auto", CPU).format is None


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
        (
            "dynamic",
            {
                r"mlp\.down_proj": {"bits": 4, "group_size": 64},
                r".*\.down_proj": {"bits": 8, "group_size": -1},
            },
        ),
        ("extra_config", {r"\.down_proj$": {"bits": 8, "group_size": -1}}),
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
    ids=["prefixes", "none", "begin", "regex", "names"],
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
        load_model(tmp_path / "coded")


@pytest.mark.parametrize(
    ("others", "down"),
    [
        ("re:.*", [f"model.layers.{number}.mlp.down_proj" for number in range(2)]),
        (r"re:.*mlp", [r"re:.*down_proj$"]),
        (r"re:.*down_proj$", [r"re:.*down_proj$"]),
    ],
    ids=["name", "sorted", "last"],
)
def test_targets_come_in_the_order_of_the_library(
    others: str, down: list[str], tmp_path: Path
) -> None:
    """Down projections alone have zero points, which no shape shows in the other group."""
    even, uneven = (pack_quantized(4, 64, is_symmetric=one) for one in (True, False))
    groups = [layout.settings["config_groups"]["group_0"] for layout in (even, uneven)]
    settings = even.settings | {
        "config_groups": {
            "a": groups[0] | {"targets": ["Linear", others]},
            "b": groups[1] | {"targets": down},
        }
    }
    dense = write_quantized(tmp_path / "coded", even)
    expected = load_file(dense / "model.safetensors")
    encode_down_proj(tmp_path / "coded", expected, uneven)
    change_config(tmp_path / "coded", quantization_config=settings)
    for name, stored in open_files(tmp_path / "coded").weights.items():
        assert torch.equal(stored.read().dequantize(torch.float32), expected[name]), name


def test_groups_of_layers_have_their_own_formats(tmp_path: Path) -> None:
    """Most layers are in NVFP4, and others in FP8."""
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
        loaded = load_model(tmp_path)
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


def test_rotations_within_weights_are_accepted(tmp_path: Path) -> None:
    """llm-compressor states them, and writes an empty `sparsity_config`."""
    layout = pack_quantized(4, 32, is_symmetric=True)
    rotated = {"R1": {"type": "hadamard", "apply": [{"location": "weight_output"}]}}
    others = {"transform_config": {"config_groups": rotated}, "sparsity_config": {}}
    write_quantized(tmp_path, replace(layout, settings=layout.settings | others))
    assert len(open_files(tmp_path).weights) == 2 * 7

"""Checkpoints of MLX: what their words stand for, the tokens of models, and what is refused.

They are written as MLX describes its layout: a code after the other, from the lowest bits on.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    Gemma2Config,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from tests.worker.checkpoints import SHAPE, build_checkpoint
from tests.worker.driving import drive
from tests.worker.parity import (
    GREEDY,
    MAX_TOKENS,
    ROOMY,
    generate,
    make_prompts,
    make_runner,
    modes_of,
)
from worker_proc.errors import CheckpointError, UnsupportedModel
from worker_proc.loading.inspection import inspect_config
from worker_proc.native.build import compiler
from worker_proc.quantization.files import QuantizedFiles
from worker_proc.quantization.headers import read_headers
from worker_proc.quantization.mlx import unpack_bits
from worker_proc.startup.early_refusals import refuse_config

needs_kernels = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
WIDE: dict[str, Any] = SHAPE | {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
Settings = dict[str, Any]
"""`bits` and `group_size` of all layers, and of some by their names; false: a layer is plain."""
LAYER = "model.layers.0.mlp.down_proj"
FOUR: Settings = {"group_size": 64, "bits": 4}
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E2M1 += [-value for value in E2M1]
FLOATS: dict[str, Settings] = {
    "mxfp4": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    "nvfp4": {"group_size": 16, "bits": 4, "mode": "nvfp4"},
    "mxfp8": {"group_size": 32, "bits": 8, "mode": "mxfp8"},
}
MIXED: Settings = {
    **{"group_size": 32, "bits": 4, "mode": "affine"},
    "lm_head": {"group_size": 64, "bits": 8},
    "model.layers.0.mlp.down_proj": {"group_size": 128, "bits": 6},
    "model.layers.1.self_attn.v_proj": False,
}
CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**WIDE),
    "tied": lambda: Qwen3Config(**WIDE, tie_word_embeddings=True),
    "gemma2": lambda: Gemma2Config(**WIDE, sliding_window=16, query_pre_attn_scalar=32),
    "qwen3moe": lambda: Qwen3MoeConfig(**WIDE, **MOE, norm_topk_prob=True),
    "mixtral": lambda: MixtralConfig(
        **WIDE, num_local_experts=4, num_experts_per_tok=2, sliding_window=None
    ),
}


def pack(codes: np.ndarray, bits: int) -> torch.Tensor:
    """Pack rows of codes into words, one code after the other from the lowest bit on."""
    each = (codes[..., None] >> np.arange(bits)) & 1
    octets = np.packbits(each.reshape(*codes.shape[:-1], -1).astype(np.uint8), -1, "little")
    return torch.from_numpy(octets.copy()).view(torch.uint32)


def encode(weight: torch.Tensor, group_size: int, bits: int) -> tuple[dict[str, Any], torch.Tensor]:
    """Return the tensors of a layer with some weights of its own, and what they stand for."""
    groups = weight.detach().unflatten(-1, (-1, group_size))
    least, most = groups.amin(-1), groups.amax(-1)
    scales = ((most - least) / (2**bits - 1)).bfloat16()
    biases = least.bfloat16()
    steps = (groups - biases.float()[..., None]) / scales.float()[..., None]
    codes = steps.round().clamp(0, 2**bits - 1)
    values = codes * scales.float()[..., None] + biases.float()[..., None]
    packed = pack(codes.flatten(-2).numpy().astype(np.int64), bits)
    return {"weight": packed, "scales": scales, "biases": biases}, values.flatten(-2)


def encode_floats(weight: torch.Tensor, mode: str) -> tuple[dict[str, Any], torch.Tensor]:
    """Return the tensors of a layer in a mode of floating-point numbers, and their values."""
    groups = weight.detach().unflatten(-1, (-1, 16 if mode == "nvfp4" else 32))
    most = groups.abs().amax(-1)
    if mode == "nvfp4":
        scales = (most / 6.0).to(torch.float8_e4m3fn)
    else:
        scales = torch.exp2((most / 6.0).log2().ceil()).to(torch.float8_e8m0fnu)
    factors = scales.float()[..., None]
    if mode == "mxfp8":
        codes = (groups / factors).to(torch.float8_e4m3fn).view(torch.uint8)
        values = codes.view(torch.float8_e4m3fn).float() * factors
    else:
        table = torch.tensor(E2M1)
        codes = (groups[..., None] / factors[..., None] - table).abs().argmin(-1)
        values = table[codes] * factors
    packed = pack(codes.flatten(-2).numpy().astype(np.int64), 8 if mode == "mxfp8" else 4)
    return {"weight": packed, "scales": scales.view(torch.uint8)}, values.flatten(-2)


def stacked_name(name: str) -> str:
    """Return under which name mlx-lm has the weights of all experts."""
    before, _, rest = name.partition(".experts.")
    part = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    own = rest.split(".")[1]
    return f"{before}.switch_mlp.{part.get(own, own)}"


def write_mlx(
    directory: Path, config: PretrainedConfig, settings: Settings, *, repeats: bool = True
) -> tuple[Path, Path]:
    """Return a checkpoint of MLX, and a plain one in float32 with its weights.

    Newer checkpoints repeat the settings under the usual key.
    """
    path, dense = directory / "mlx", directory / "dense"
    for one in (path, dense):
        build_checkpoint(one, config)
    groups: dict[str, list[str]] = {}
    weights = {name: one.float() for name, one in load_file(path / "model.safetensors").items()}
    for name in weights:
        layer = stacked_name(name) if ".experts." in name else name.removesuffix(".weight")
        groups.setdefault(layer, []).append(name)
    stored: dict[str, torch.Tensor] = {}
    for layer, names in groups.items():
        names.sort(key=lambda name: int(name.split(".")[5]) if ".experts." in name else 0)
        tensors = [weights[name] for name in names]
        own = settings.get(layer, settings)
        if tensors[0].dim() == 1 or own is False:
            stored[f"{layer}.weight"] = tensors[0]
            continue
        values = torch.stack(tensors) if ".switch_mlp." in layer else tensors[0]
        if own.get("mode", "affine") == "affine":
            parts, rounded = encode(values, own["group_size"], own["bits"])
        else:
            parts, rounded = encode_floats(values, own["mode"])
        stored |= {f"{layer}.{part}": value for part, value in parts.items()}
        for name, value in zip(names, rounded if len(names) > 1 else [rounded], strict=True):
            weights[name] = value.contiguous()
    save_file(stored, path / "model.safetensors", {"format": "mlx"})
    save_file(weights, dense / "model.safetensors", {"format": "pt"})
    content = json.loads((path / "config.json").read_text()) | {"quantization": settings}
    if repeats:
        content["quantization_config"] = settings
    (path / "config.json").write_text(json.dumps(content))
    plain = json.loads((dense / "config.json").read_text()) | {"dtype": "float32"}
    (dense / "config.json").write_text(json.dumps(plain))
    return path, dense


def open_files(path: Path) -> QuantizedFiles:
    refuse_config(str(path))
    format = inspect_config(str(path), "auto", torch.device("cpu")).format
    assert format is not None
    return QuantizedFiles(str(path), read_headers(str(path)), format)


def check_codes(path: Path, dense: Path) -> None:
    files, expected = open_files(path), load_file(dense / "model.safetensors")
    found = {name: one.read().dequantize(torch.float32) for name, one in files.weights.items()}
    found |= {name: one[...].float() for name, one in files.plain_slices().items()}
    assert found.keys() == expected.keys()
    for name, values in found.items():
        assert torch.equal(values, expected[name]), name


@pytest.mark.parametrize(
    ("bits", "group_size"),
    [
        (4, 32),
        (6, 32),
        *(
            pytest.param(bits, group_size, marks=pytest.mark.slow)
            for bits, group_size in ((2, 32), (3, 64), (4, 128), (5, 64), (8, 64))
        ),
    ],
)
def test_words_are_read_as_the_weights_that_they_stand_for(
    bits: int, group_size: int, tmp_path: Path
) -> None:
    config = LlamaConfig(**WIDE | {"num_hidden_layers": 1})
    check_codes(*write_mlx(tmp_path, config, {"group_size": group_size, "bits": bits}))


@pytest.mark.parametrize("mode", FLOATS)
def test_floating_point_numbers_are_read_as_the_weights_that_they_stand_for(
    mode: str, tmp_path: Path
) -> None:
    """A layer with settings of its own and without a mode is affine."""
    settings = FLOATS[mode] | {LAYER: {"group_size": 64, "bits": 8}}
    check_codes(*write_mlx(tmp_path, LlamaConfig(**WIDE | {"num_hidden_layers": 1}), settings))


class _Sizes(TorchDispatchMode):
    """Notes the bytes of the largest tensor that an operation returns."""

    largest = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = function(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor):
            self.largest = max(self.largest, found.nbytes)
        return found


@pytest.mark.parametrize("bits", [4, 8])
def test_words_are_unpacked_in_little_more_memory_than_their_codes(bits: int) -> None:
    """An embedding has many of them."""
    words = torch.zeros(4096, 64 * bits, dtype=torch.int32)
    with _Sizes() as sizes:
        codes = unpack_bits(words, bits)
    assert codes.shape == (4096, 2048)
    assert sizes.largest == codes.nbytes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings"),
    [("qwen3moe", FOUR), ("mixtral", FOUR), ("qwen3moe", FLOATS["mxfp4"])],
)
def test_weights_of_all_experts_are_those_of_each(
    name: str, settings: Settings, tmp_path: Path
) -> None:
    check_codes(*write_mlx(tmp_path, CONFIGS[name](), settings))


def test_each_layer_may_have_separate_settings(tmp_path: Path) -> None:
    """An older checkpoint has them under MLX's key alone."""
    check_codes(*write_mlx(tmp_path, CONFIGS["llama"](), MIXED, repeats=False))


@needs_kernels
@pytest.mark.slow
@pytest.mark.parametrize("name", [*CONFIGS, *FLOATS])
def test_tokens_are_those_of_the_dequantized_weights(name: str, tmp_path: Path) -> None:
    settings = FLOATS.get(name, MIXED if name == "llama" else FOUR)
    path, dense = write_mlx(tmp_path, CONFIGS.get(name, CONFIGS["llama"])(), settings)
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(
        dense, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    prompts = make_prompts()[:5]
    expected = [generate(model, prompt, MAX_TOKENS) for prompt in prompts]
    assert len({tuple(tokens) for tokens in expected}) > 1
    runner = make_runner(path, ROOMY)
    kinds = {"llama": "int4 int8", "mxfp4": "fp4", "nvfp4": "fp4", "mxfp8": "fp8"}
    assert runner.facts.quantization == f"mlx {kinds.get(name, 'int4')}"
    assert runner.facts.exact_resume
    for mode, options in modes_of(runner.facts.num_gpu_blocks).items():
        run = drive(runner, prompts, GREEDY, **({"max_num_seqs": 16} | options))
        assert run.output_token_ids == expected, mode


def change(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    stored = load_file(path / "model.safetensors") | tensors
    save_file(stored, path / "model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "tensors", "reason"),
    [
        ({"mode": "fp2"}, {}, 'quantization_config.mode is "fp2"; supported: "affine" or "mxfp4"'),
        ({"mode": "nvfp4"}, {}, "quantization_config.group_size is 64; supported: 16"),
        ({"mode": "mxfp8", "group_size": 32}, {}, "quantization_config.bits is 4; supported: 8"),
        ({"mode": "mxfp4", "group_size": 32}, {}, r"has biases, which numbers in floating point"),
        ({"bits": 7}, {}, "quantization_config.bits is 7; supported: 2 or 3 or 4"),
        ({"group_size": 16}, {}, "group_size is 16; supported: 32 or 64 or 128"),
        ({LAYER: {"bits": 4, "group_size": 8}}, {}, rf"{LAYER}.group_size is 8; supported"),
        ({LAYER: {"bits": 5, "group_size": 64}}, {}, rf"{LAYER} has rows of 32 words"),
        ({}, {f"{LAYER}.biases": torch.zeros(128, 3)}, r"has a biases of shape \[128, 3\]"),
        ({}, {f"{LAYER}.scales": torch.full((128, 4), torch.inf)}, "has scales that are not fin"),
        ({}, {f"{LAYER}.biases": torch.full((128, 4), torch.inf)}, "has biases that are not fin"),
    ],
)
def test_other_layouts_are_refused(
    settings: Settings, tensors: dict[str, torch.Tensor], reason: str, tmp_path: Path
) -> None:
    path, _ = write_mlx(tmp_path, LlamaConfig(**WIDE | {"num_hidden_layers": 1}), FOUR)
    change(path, tensors)
    content = json.loads((path / "config.json").read_text())
    content["quantization_config"] |= settings
    (path / "config.json").write_text(json.dumps(content))
    with pytest.raises((CheckpointError, UnsupportedModel), match=reason):
        open_files(path).weights[f"{LAYER}.weight"].read()


def test_scales_of_floating_point_numbers_are_finite(tmp_path: Path) -> None:
    config = LlamaConfig(**WIDE | {"num_hidden_layers": 1})
    path, _ = write_mlx(tmp_path, config, FLOATS["mxfp4"])
    change(path, {f"{LAYER}.scales": torch.full((128, 8), 255, dtype=torch.uint8)})
    with pytest.raises(CheckpointError, match="has scales that are not finite"):
        open_files(path).weights[f"{LAYER}.weight"].read()


def test_settings_of_another_library_are_refused_by_their_key(tmp_path: Path) -> None:
    path, _ = write_mlx(tmp_path, LlamaConfig(**WIDE | {"num_hidden_layers": 1}), FOUR)
    content = json.loads((path / "config.json").read_text())
    del content["quantization_config"]
    content["quantization"] = {"quant_method": "other"}
    (path / "config.json").write_text(json.dumps(content))
    with pytest.raises(UnsupportedModel, match=r"json: quantization\.quant_method is 'other'"):
        open_files(path)


def test_models_whose_weights_mlx_changes_are_refused(tmp_path: Path) -> None:
    path, _ = write_mlx(tmp_path, LlamaConfig(**WIDE | {"num_hidden_layers": 1}), FOUR)
    content = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(content | {"model_type": "lfm2"}))
    with pytest.raises(UnsupportedModel, match="checkpoints of MLX of lfm2 are not read: mlx-lm"):
        open_files(path)

"""Models, settings and machines for which weights are not rounded."""

from pathlib import Path
from typing import Any

import pytest
import torch

from protocol.config import ConfigError, Quantization
from protocol.config.settings import configure
from tests.worker.checkpoints import ARCHITECTURES, build_checkpoint, change_config
from tests.worker.quantization.loads import MIXTURES, MODELS, load
from worker_proc.errors import CheckpointError, UnsupportedModel
from worker_proc.modules import fusing, rounding_refusals
from worker_proc.modules.experts import mixture
from worker_proc.native.build import compiler
from worker_proc.startup import prepare, required_kernels

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"model": "null"}, "quantization needs a model"),
        ({"device": "cuda"}, "quantization needs device cpu"),
        ({"dtype": "float32"}, "quantization needs dtype bfloat16"),
        ({"quantization": "int8"}, "quantization"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    settings: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        configure(**{"quantization": "w8a16", **settings})


def test_a_checkpoint_in_float16_is_refused(tmp_path: Path) -> None:
    """It is computed in float32 on the CPU."""
    build_checkpoint(tmp_path, MODELS["llama"])
    change_config(tmp_path, dtype="float16")
    with pytest.raises(UnsupportedModel, match="in float32; add --dtype bfloat16"):
        load(tmp_path, Quantization.W8A16, "auto")


def test_experts_without_kernels_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would stay in bfloat16."""
    [deepseek] = [each for each in ARCHITECTURES if each.name == "deepseek_v3"]
    build_checkpoint(tmp_path, deepseek.config())
    monkeypatch.setattr(fusing, "fused_grouped_experts", lambda *_, **__: None)
    reason = r"w8a16: model\.layers\.1\.mlp\.experts \(DeepseekV3Experts\) does not compute"
    with pytest.raises(UnsupportedModel, match=reason):
        load(tmp_path, Quantization.W8A16)


def test_mixtures_that_are_not_proven_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the mixture nor its experts alone are proven."""
    build_checkpoint(tmp_path, MIXTURES["qwen3_moe"])
    monkeypatch.setattr(mixture, "_weighting", lambda *_: None)
    load(tmp_path, Quantization.W4A16)
    monkeypatch.setattr(fusing, "fused_grouped_experts", lambda *_, **__: None)
    reason = r"w4a16: model\.layers\.0\.mlp\.experts \(Qwen3MoeExperts\) does not compute"
    with pytest.raises(UnsupportedModel, match=reason):
        load(tmp_path, Quantization.W4A16)


def test_experts_are_checked_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_checkpoint(tmp_path, MIXTURES["qwen3_moe"])
    with monkeypatch.context() as patched:
        patched.setattr(rounding_refusals, "MAX_CODED_INPUTS", 47)
        with pytest.raises(UnsupportedModel, match=r"w8a8: \S+ has 64 inputs.* at most 47"):
            load(tmp_path, Quantization.W8A8)
        load(tmp_path, Quantization.W8A16)
    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_proj[3, 7, 5] = torch.inf
    model.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.experts\.down_proj .* not finite"):
        load(tmp_path, Quantization.W8A16)


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    model = build_checkpoint(tmp_path, MODELS["llama"])
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] = torch.nan
    model.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight .* not finite"):
        load(tmp_path, Quantization.W8A16)


def test_a_machine_without_kernels_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_compiler() -> Path:
        raise RuntimeError("no C++ compiler: neither $CXX nor g++ is in PATH")

    build_checkpoint(tmp_path, MODELS["llama"])
    monkeypatch.setattr(required_kernels, "build", no_compiler)
    monkeypatch.setattr(required_kernels, "load_library", lambda: None)
    with pytest.raises(UnsupportedModel, match=r"w8a16 needs the native kernels: no C\+\+ comp"):
        load(tmp_path, Quantization.W8A16)


def test_a_device_that_is_found_to_be_cuda_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "resolve_device", lambda _: torch.device("cuda"))
    with pytest.raises(UnsupportedModel, match="w8a16 needs device cpu"):
        load(Path("/nowhere"), Quantization.W8A16)

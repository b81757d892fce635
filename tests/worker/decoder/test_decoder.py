"""The native decoder takes the layers that it is proven for, and no others."""

from array import array
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import Ministral3Config, Olmo2Config
from transformers.models.auto.modeling_auto import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from protocol.config import NativeDecoder, Quantization
from protocol.sampling import SamplingParams
from tests.worker.bitwise import DTYPES, engine_config, load
from tests.worker.checkpoints import ARCHITECTURES, SHAPE, build_checkpoint
from tests.worker.quantization.loads import load as load_quantized
from worker_proc.decoder.install import layer_modules
from worker_proc.inputs import pack_step
from worker_proc.native.build import build, compiler
from worker_proc.native.structures import Rotation
from worker_proc.request import MirroredRequest, ScheduledRequest
from worker_proc.startup.calibrate import calibrate
from worker_proc.startup.load_runner import build_runner
from worker_proc.startup.prepare import prepare_model

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")

NATIVE = (
    *("llama", "llama_tied", "qwen2", "qwen3", "mistral_window", "gemma2", "gemma3", "granite"),
    *("olmo2", "smollm3", "glm4", "phi3", "mixtral", "qwen3_moe", "olmoe"),
)
PARAMS = SamplingParams(max_tokens=1)
BY_NAME = {architecture.name: architecture for architecture in ARCHITECTURES}


@pytest.fixture(scope="module", autouse=True)
def library() -> None:
    build()


def decoder_of(directory: Path, name: str, dtype: str = "float32") -> str:
    build_checkpoint(directory, BY_NAME[name].config())
    return load(directory, dtype).facts.decoder


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "name",
    [
        name if name == "llama" else pytest.param(name, marks=pytest.mark.slow)
        for name in NATIVE  # test_whole.py has them all by default
    ],
)
def test_families_that_it_computes(name: str, dtype: str, tmp_path: Path) -> None:
    assert decoder_of(tmp_path, name, dtype) == "native"


@pytest.mark.parametrize("name", ["gpt2", "opt", "deepseek_v3"])
def test_families_that_their_modules_compute(name: str, tmp_path: Path) -> None:
    assert decoder_of(tmp_path, name) == "modules"


def test_a_layer_that_depends_on_the_position_is_left_to_its_module(tmp_path: Path) -> None:
    """Ministral scales its queries, by a factor that is 1 at the first positions."""
    config = Ministral3Config(**SHAPE)
    config.rope_parameters["original_max_position_embeddings"] = 16
    build_checkpoint(tmp_path, config)
    assert load(tmp_path, "float32").facts.decoder == "modules"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama", [Rotation.HALVES, Rotation.HALVES]),
        ("smollm3", [Rotation.HALVES, Rotation.NONE]),
        ("glm4", [Rotation.PAIRS, Rotation.PAIRS]),
    ],
)
def test_rotations_are_found_where_layers_add_little(
    name: str, expected: list[Rotation], dtype: str, tmp_path: Path
) -> None:
    """Weights are those of a model that is not trained: the residual hides most differences."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(BY_NAME[name].config(), dtype=torch.float32)
    model.save_pretrained(tmp_path)
    config = engine_config(tmp_path, dtype)
    prepared = prepare_model(config, lambda *_: None)
    calibration = calibrate(prepared, config, lambda *_: None)
    assert [layer.rotation for layer in calibration.decoder] == expected


def test_the_soft_cap_is_that_of_the_attention_call(tmp_path: Path) -> None:
    """Gemma-3's modules have the attribute, and do not use it."""
    config = BY_NAME["gemma3"].config()
    config.attn_logit_softcapping = 5.0
    build_checkpoint(tmp_path, config)
    settings = engine_config(tmp_path, "float32")
    prepared = prepare_model(settings, lambda *_: None)
    calibration = calibrate(prepared, settings, lambda *_: None)
    assert {layer.softcap for layer in calibration.decoder} == {0.0}


def test_a_runner_without_it_removes_what_the_last_one_has_installed(tmp_path: Path) -> None:
    build_checkpoint(tmp_path, BY_NAME["llama"].config())
    config = engine_config(tmp_path, "float32")
    prepared = prepare_model(config, lambda *_: None)
    calibration = calibrate(prepared, config, lambda *_: None)
    layers = layer_modules(prepared.loaded)
    for settings, is_installed in ((calibration.decoder, True), ((), False)):
        changed = calibration._replace(decoder=settings)
        build_runner(prepared, config, changed, lambda *_: None)
        assert all(("forward" in layer.__dict__) is is_installed for layer in layers)


@pytest.mark.parametrize(
    ("dtype", "quantization"),
    [*((dtype, None) for dtype in DTYPES), ("bfloat16", Quantization.W8A8)],
)
@torch.inference_mode()
def test_a_step_that_is_not_finite_does_not_change_later_steps(
    dtype: str, quantization: Quantization | None, tmp_path: Path
) -> None:
    """Rows of 72 values are filled up to whole panels, and the first product reads all of them."""
    shape = SHAPE | {"hidden_size": 72, "num_attention_heads": 4}
    del shape["head_dim"]
    build_checkpoint(tmp_path, Olmo2Config(**shape))
    runner = load_quantized(tmp_path, quantization, dtype)
    assert runner.facts.decoder == "native"
    rows = torch.randn(1, 3, 72).to(runner._model.dtype)
    angles = runner._model.model.rotary_emb(rows, torch.arange(3).unsqueeze(0))
    decode = runner._model.model.layers[-1]
    request = MirroredRequest(1, [5, 6, 7], 3, PARAMS, [array("i", [1])], 0, 0)
    inputs = pack_step(
        [ScheduledRequest(request, 0, 3, True)],
        torch.device("cpu"),
    )
    runner._backend.begin_step(inputs)
    for layer in runner._model.model.layers[:-1]:
        layer(rows, position_embeddings=angles)
    clean = decode(rows, position_embeddings=angles)
    assert not decode(rows * float("inf"), position_embeddings=angles).isfinite().any()
    assert torch.equal(decode(rows, position_embeddings=angles), clean)


def test_the_native_decoder_can_be_switched_off(tmp_path: Path) -> None:
    build_checkpoint(tmp_path, BY_NAME["llama"].config())
    assert load(tmp_path, "float32", native_decoder=NativeDecoder.OFF).facts.decoder == "modules"


class _Scaled(nn.Module):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * 1.01


class _Clamped(nn.Module):
    """Bounds what ordinary rows never reach."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.clamp(-60.0, 60.0)


@pytest.mark.parametrize("change", [_Scaled(), _Clamped()])
def test_layers_that_compute_something_else_are_left_to_their_modules(
    change: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their names and parts are those of a layer that it could compute."""
    plain = LlamaDecoderLayer.forward

    def forward(self: LlamaDecoderLayer, *args: object, **kwargs: object) -> torch.Tensor:
        changed: torch.Tensor = change(plain(self, *args, **kwargs))  # type: ignore[arg-type]
        return changed

    monkeypatch.setattr(LlamaDecoderLayer, "forward", forward)
    assert decoder_of(tmp_path, "llama") == "modules"

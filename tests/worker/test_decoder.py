"""The native decoder takes the layers that it is proven for, and no others."""

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from protocol.config import NativeDecoder
from tests.worker.checkpoints import ARCHITECTURES, build_checkpoint
from tests.worker.test_bitwise import DTYPES, load
from worker_proc.native.build import build, compiler

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")

NATIVE = (
    *("llama", "llama_tied", "qwen2", "qwen3", "mistral_window", "gemma2", "gemma3", "granite"),
    *("olmo2", "smollm3", "glm4", "phi3"),
)
BY_NAME = {architecture.name: architecture for architecture in ARCHITECTURES}


@pytest.fixture(scope="module", autouse=True)
def library() -> None:
    build()


def decoder_of(directory: Path, name: str, dtype: str = "float32") -> str:
    build_checkpoint(directory, BY_NAME[name].config())
    return load(directory, dtype).facts.decoder


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NATIVE)
def test_families_that_it_computes(name: str, dtype: str, tmp_path: Path) -> None:
    assert decoder_of(tmp_path, name, dtype) == "native"


@pytest.mark.parametrize("name", ["gpt2", "opt", "mixtral", "deepseek_v3"])
def test_families_that_their_modules_compute(name: str, tmp_path: Path) -> None:
    assert decoder_of(tmp_path, name) == "modules"


def test_it_can_be_switched_off(tmp_path: Path) -> None:
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

"""The layers of a model as one native call, or as several stacks of consecutive layers."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.worker.bitwise import Recorder, Schedule, engine_config, make_texts
from tests.worker.checkpoints import build_checkpoint
from tests.worker.odd_models import CONFIGS
from worker_proc.decoder.install import install, layer_modules, read_layers
from worker_proc.decoder.stack import DecoderStack, replace_forwards
from worker_proc.loading.layer_executor import Angles
from worker_proc.model_runner import ModelRunner
from worker_proc.native.build import build, compiler
from worker_proc.native.kernels import NativeLibrary
from worker_proc.startup.calibrate import calibrate
from worker_proc.startup.load_runner import build_runner
from worker_proc.startup.prepare import prepare_model

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")


class Model:
    """A runner, and the stack that computes its layers."""

    def __init__(self, directory: Path, dtype: str) -> None:
        build()
        config = engine_config(directory, dtype)
        self.prepared = prepare_model(config, lambda *_: None)
        calibration = calibrate(self.prepared, config, lambda *_: None)
        self.settings = calibration.decoder
        self.runner = build_runner(self.prepared, config, calibration, lambda *_: None)
        assert self.runner.facts.decoder == "native"
        stack = install(self.prepared, self.settings)
        assert isinstance(stack, DecoderStack)
        self.stack = stack


def make_model(directory: Path, name: str, dtype: str) -> Model:
    build_checkpoint(directory, CONFIGS[name])
    return Model(directory, dtype)


def recorded(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch, recorder: Recorder | None = None
) -> Recorder:
    """Compute every position of the texts, in two schedules and as before, with the same bits."""
    texts = make_texts(runner.facts.vocab_size)
    recorder = recorder or Recorder(texts)
    first_seed = len(recorder.found)
    with recorder.recording(monkeypatch):
        for seed in (first_seed, first_seed + 1):
            recorder.run(runner, Schedule(runner, texts, random.Random(seed)))
    assert len(recorder.found) == sum(map(len, texts))
    return recorder


class TwoStacks:
    """Two stacks of consecutive layers, between which the residual travels as bytes."""

    def __init__(self, model: Model, first_of_second: int) -> None:
        prepared, dtype = model.prepared, model.prepared.loaded.dtype
        assert prepared.executor is not None
        layers = read_layers(prepared.executor, prepared.loaded)
        assert layers is not None
        self._first_of_second = first_of_second
        self._stacks = [
            prepared.executor.stack(layers[part], model.settings[part], dtype)
            for part in (slice(first_of_second), slice(first_of_second, None))
        ]

    def forward(self, hidden_states: torch.Tensor, angles: Sequence[Angles]) -> torch.Tensor:
        first, second = self._stacks
        middle = first.forward(hidden_states, angles[: self._first_of_second])
        return second.forward(sent(middle), angles[self._first_of_second :])


def sent(hidden_states: torch.Tensor) -> torch.Tensor:
    """Return what another process reads from a message with these rows."""
    message = hidden_states.contiguous().view(torch.uint8).numpy().tobytes()
    assert len(message) == hidden_states.numel() * hidden_states.itemsize
    received = torch.frombuffer(bytearray(message), dtype=hidden_states.dtype)
    return received.view(hidden_states.shape)


@pytest.mark.parametrize(
    ("name", "first_of_second", "dtype"), [("llama", 1, "float32"), ("gemma3", 2, "bfloat16")]
)
def test_layers_in_two_stacks_have_the_same_bits(
    name: str,
    first_of_second: int,
    dtype: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make_model(tmp_path, name, dtype)
    recorder = recorded(model.runner, monkeypatch)
    replace_forwards(layer_modules(model.prepared.loaded), TwoStacks(model, first_of_second))
    recorded(model.runner, monkeypatch, recorder)


def test_the_layers_of_a_step_are_one_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(tmp_path, "llama", "float32")
    calls: list[None] = []
    steps: list[None] = []

    def counted(function: Callable[..., Any], counter: list[None]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            counter.append(None)
            return function(*args)

        return call

    monkeypatch.setattr(NativeLibrary, "execute", counted(NativeLibrary.execute, calls))
    monkeypatch.setattr(model.stack, "forward", counted(model.stack.forward, steps))
    recorded(model.runner, monkeypatch)
    assert len(calls) == len(steps) > 0

"""Hooks around projections and cuts between layers: what they see, and that they change no bit."""

import random
import statistics
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from protocol.config import Quantization
from tests.worker.bitwise import DTYPES, Recorder, Schedule, engine_config, make_texts
from tests.worker.checkpoints import build_checkpoint
from tests.worker.odd_models import CONFIGS
from worker_proc import model_runner
from worker_proc.calibration.self_check import compute_stepwise
from worker_proc.decoder.hooks import Hook, HookPoint, Projection, When
from worker_proc.decoder.install import install, layer_modules, read_layers
from worker_proc.decoder.stack import DecoderStack, replace_forwards
from worker_proc.loading.layer_executor import Angles
from worker_proc.model_runner import ModelRunner
from worker_proc.modules.packed_linear import make_linear
from worker_proc.native.build import build, compiler
from worker_proc.native.kernels import NativeLibrary
from worker_proc.startup.calibrate import calibrate
from worker_proc.startup.load_runner import build_runner
from worker_proc.startup.parts import make_layout
from worker_proc.startup.prepare import prepare_model

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")

RANK = 5
ATTENTION = (Projection.QUERY, Projection.KEY, Projection.VALUE, Projection.OUT)
MAX_ERROR = {"float32": 1e-5, "bfloat16": 0.06}
"""The error of a typical row of logits against transformers' in float32, relative to its length."""


class Model:
    """A runner, and the stack that computes its layers."""

    def __init__(self, directory: Path, dtype: str) -> None:
        """`dtype` may be followed by a quantization."""
        build()
        dtype, _, quantization = dtype.partition(" ")
        config = engine_config(directory, dtype)
        model = msgspec.structs.replace(
            config.model, quantization=Quantization(quantization) if quantization else None
        )
        config = msgspec.structs.replace(config, model=model)
        self.prepared = prepare_model(config, lambda *_: None)
        calibration = calibrate(self.prepared, config, lambda *_: None)
        self.settings = calibration.decoder
        self.runner = build_runner(self.prepared, config, calibration, lambda *_: None)
        assert self.runner.facts.decoder == "native"
        self.layout = make_layout(self.prepared.loaded, config)
        self.backend = self.runner._backend
        stack = install(self.prepared, self.settings)
        assert isinstance(stack, DecoderStack)
        self.stack = stack


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Model]:
    """Return models by name and dtype; each call makes one."""
    made: dict[str, Path] = {}

    def make(name: str, dtype: str) -> Model:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            build_checkpoint(made[name], CONFIGS[name])
        return Model(made[name], dtype)

    return make


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *(("llama", "float32"), ("llama", "bfloat16"), ("llama_mlp_bias", "float32")),
        *(("gemma3", "bfloat16"), ("granite", "float32"), ("olmo2", "bfloat16")),
        *(("phi3", "float32"), ("qwen3_moe", "bfloat16")),
        *(("llama", "bfloat16 w8a8"), ("olmo2", "bfloat16 w8a8")),
    ],
)
def test_hooks_that_change_nothing_change_no_bit(
    name: str,
    dtype: str,
    model_of: Callable[[str, str], Model],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every projection has hooks on both sides, each of which gets its rows."""
    hooked = model_of(name, dtype)
    recorder = recorded(hooked.runner, monkeypatch)
    names = ATTENTION if name == "qwen3_moe" else tuple(Projection)
    points = [HookPoint(*one) for one in product(range(hooked.stack.num_layers), names, When)]
    seen: dict[HookPoint, set[tuple[int, int]]] = {}

    def hook_at(point: HookPoint) -> Hook:
        def hook(inputs: torch.Tensor, outputs: torch.Tensor) -> None:
            assert len(inputs) == len(outputs)
            seen.setdefault(point, set()).add((inputs.shape[1], outputs.shape[1]))

        return hook

    hooked.stack.set_hooks({point: hook_at(point) for point in points})
    recorded(hooked.runner, monkeypatch, recorder)
    assert set(seen) == set(points)
    config = CONFIGS[name]
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    queries = config.num_attention_heads * head_dim
    keys = config.num_key_value_heads * head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    expected = dict(
        zip(
            Projection,
            [
                *((hidden, queries), (hidden, keys), (hidden, keys), (queries, hidden)),
                *((hidden, inner), (hidden, inner), (inner, hidden)),
            ],
            strict=True,
        )
    )
    for point, shapes in seen.items():
        num_inputs, num_outputs = expected[point.projection]
        assert shapes == {(num_inputs, num_outputs if point.when is When.AFTER else 0)}


@pytest.mark.parametrize("dtype", [*DTYPES, "bfloat16 w8a8"])
def test_each_projection_can_be_hooked_alone(
    dtype: str, model_of: Callable[[str, str], Model]
) -> None:
    """What is not hooked is fused as it was."""
    model = model_of("llama", dtype)

    def logits() -> torch.Tensor:
        return torch.cat(compute_stepwise(model.prepared.loaded, model.backend, model.layout))

    expected = logits()
    for point in (HookPoint(*one) for one in product([1], Projection, When)):
        model.stack.set_hooks({point: lambda inputs, outputs: None})
        assert torch.equal(logits(), expected)


def recorded(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch, recorder: Recorder | None = None
) -> Recorder:
    """Compute every position of the texts, in two schedules and as before, with the same bits."""
    texts = make_texts(runner.facts.vocab_size)
    recorder = recorder or Recorder(texts)
    first_seed = len(recorder.found)
    compute = model_runner.compute_logits

    def recording(*args: Any) -> torch.Tensor:
        logits = compute(*args)
        recorder.record(args[2], logits)
        return logits

    with monkeypatch.context() as patch:
        patch.setattr(model_runner, "compute_logits", recording)
        for seed in (first_seed, first_seed + 1):
            recorder.run(runner, Schedule(runner, texts, random.Random(seed)))
    assert len(recorder.found) == sum(map(len, texts))
    return recorder


Adapter = dict[tuple[int, Projection], tuple[torch.Tensor, torch.Tensor]]
"""Two matrices for each projection of a layer, `[RANK, in_features]`, `[out_features, RANK]`."""


def make_adapter(model: torch.nn.Module, num_layers: int) -> Adapter:
    """Return random matrices whose products are about as large as the weights."""
    generator = torch.Generator().manual_seed(8)
    adapter = {}
    for layer, name in product(range(num_layers), Projection):
        weight = linear_of(model, layer, name).weight
        shapes = (RANK, weight.shape[1]), (weight.shape[0], RANK)
        factor = float(weight.std()) ** 0.5 / RANK**0.25
        first, second = (torch.randn(shape, generator=generator) * factor for shape in shapes)
        adapter[layer, name] = first.bfloat16().float(), second.bfloat16().float()
    return adapter


def linear_of(model: torch.nn.Module, layer: int, name: Projection) -> torch.nn.Linear:
    parent = "self_attn" if name in ATTENTION else "mlp"
    linear = model.get_submodule(f"model.layers.{layer}.{parent}.{name}")
    assert isinstance(linear, torch.nn.Linear)
    return linear


def adapting(library: NativeLibrary, adapter: Adapter, dtype: torch.dtype) -> dict[HookPoint, Hook]:
    """Return hooks that add the low-rank products, by kernels whose rows depend on no other row."""

    def hook_of(first: torch.Tensor, second: torch.Tensor) -> Hook:
        shrink = make_linear(first.to(dtype), None, library)
        expand = make_linear(second.to(dtype), None, library)

        def hook(inputs: torch.Tensor, outputs: torch.Tensor) -> None:
            outputs += expand(shrink(inputs))

        return hook

    return {
        HookPoint(layer, name, When.AFTER): hook_of(*matrices)
        for (layer, name), matrices in adapter.items()
    }


@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_low_rank_additions_equal_merged_weights(
    dtype: str,
    model_of: Callable[[str, str], Model],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every schedule gives the same bits; transformers computes the merged model."""
    merged = build_checkpoint(tmp_path, CONFIGS["llama"]).to(getattr(torch, dtype)).float()
    model = model_of("llama", dtype)
    adapter = make_adapter(merged, model.stack.num_layers)
    for (layer, name), (first, second) in adapter.items():
        linear_of(merged, layer, name).weight += second @ first
    assert isinstance(model.prepared.kernels, NativeLibrary)
    hooks = adapting(model.prepared.kernels, adapter, getattr(torch, dtype))
    texts = make_texts(model.runner.facts.vocab_size)
    expected = [merged(torch.tensor([text])).logits[0] for text in texts]

    def error() -> float:
        found = recorded(model.runner, monkeypatch).found
        errors = [
            float((row.float() - expected[text][position]).norm() / expected[text][position].norm())
            for (text, position), row in found.items()
        ]
        return statistics.median(errors)

    assert error() > 10 * MAX_ERROR[dtype]
    model.stack.set_hooks(hooks)
    assert error() < MAX_ERROR[dtype]
    model.stack.set_hooks({})
    assert error() > 10 * MAX_ERROR[dtype]


class Ranks:
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


class Ranges:
    """One stack, which computes two ranges of its layers one after the other."""

    def __init__(self, model: Model, first_of_second: int) -> None:
        self._stack, self._first_of_second = model.stack, first_of_second

    def forward(self, hidden_states: torch.Tensor, angles: Sequence[Angles]) -> torch.Tensor:
        middle = self._stack.forward_layers(range(self._first_of_second), hidden_states, angles)
        rest = range(self._first_of_second, self._stack.num_layers)
        return self._stack.forward_layers(rest, sent(middle), angles)


def sent(hidden_states: torch.Tensor) -> torch.Tensor:
    """Return what another process reads from a message with these rows."""
    message = hidden_states.contiguous().view(torch.uint8).numpy().tobytes()
    assert len(message) == hidden_states.numel() * hidden_states.itemsize
    received = torch.frombuffer(bytearray(message), dtype=hidden_states.dtype)
    return received.view(hidden_states.shape)


@pytest.mark.parametrize(
    ("cut_into", "place", "dtype"),
    [
        (Ranks, ("llama", 1), "float32"),
        (Ranks, ("gemma3", 2), "bfloat16"),
        (Ranges, ("llama", 1), "bfloat16"),
        (Ranges, ("gemma3", 1), "float32"),
    ],
)
def test_a_run_that_is_cut_between_layers_has_the_same_bits(
    cut_into: type[Ranks | Ranges],
    place: tuple[str, int],
    dtype: str,
    model_of: Callable[[str, str], Model],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name, first_of_second = place
    model = model_of(name, dtype)
    recorder = recorded(model.runner, monkeypatch)
    replace_forwards(layer_modules(model.prepared.loaded), cut_into(model, first_of_second))
    recorded(model.runner, monkeypatch, recorder)


def test_what_a_hook_writes_before_a_projection_is_what_it_projects(
    model_of: Callable[[str, str], Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers whose last projections get zeros add nothing: the hidden states leave as they came."""
    model = model_of("llama", "bfloat16")
    last = (Projection.OUT, Projection.DOWN)
    model.stack.set_hooks(
        {
            HookPoint(layer, name, When.BEFORE): lambda inputs, _: inputs.zero_()
            for layer, name in product(range(model.stack.num_layers), last)
        }
    )
    passed = []
    forward = model.stack.forward_layers

    def recording(layers: range, hidden: torch.Tensor, angles: Sequence[Angles]) -> torch.Tensor:
        found = forward(layers, hidden, angles)
        passed.append(torch.equal(found, hidden))
        return found

    monkeypatch.setattr(model.stack, "forward_layers", recording)
    recorded(model.runner, monkeypatch)
    assert passed
    assert all(passed)


def test_without_hooks_a_step_is_one_call(
    model_of: Callable[[str, str], Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of("llama", "float32")
    calls = []
    execute = NativeLibrary.execute

    def counting(*args: Any) -> None:
        calls.append(None)
        execute(*args)

    monkeypatch.setattr(NativeLibrary, "execute", counting)
    steps = []
    forward = model.stack.forward_layers
    monkeypatch.setattr(
        model.stack, "forward_layers", lambda *args: (steps.append(None), forward(*args))[1]
    )
    point = HookPoint(1, Projection.DOWN, When.AFTER)
    for hooks, calls_of_step in (({}, 1), ({point: lambda *_: None}, 2), ({}, 1)):
        model.stack.set_hooks(hooks)
        calls.clear()
        steps.clear()
        recorded(model.runner, monkeypatch)
        assert len(calls) == calls_of_step * len(steps) > 0


def test_what_is_not_there_is_refused(model_of: Callable[[str, str], Model]) -> None:
    stack = model_of("qwen3_moe", "float32").stack
    for layer in (-1, 2):
        with pytest.raises(ValueError, match=f"layer {layer} is not among the 2 layers"):
            stack.set_hooks({HookPoint(layer, Projection.OUT, When.AFTER): lambda *_: None})
    with pytest.raises(ValueError, match="layer 1 has experts, and no hooks around down_proj"):
        stack.set_hooks({HookPoint(1, Projection.DOWN, When.AFTER): lambda *_: None})
    rows = torch.zeros(1, 1, 72)
    for layers in (range(2, 1), range(1, 1), range(3), range(1, -1, -1), range(-1, 1)):
        with pytest.raises(ValueError, match="are not consecutive layers of 2"):
            stack.forward_layers(layers, rows, [])

"""Adapters in a loaded model: their logits, their bits, and what is refused."""

import copy
import json
import random
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from protocol.adapters import (
    BIN_FILE,
    CONFIG_FILE,
    WEIGHTS_FILE,
    Adapter,
    AdapterError,
    digest_of,
    read_adapter,
)
from protocol.config import EngineConfig, LoraConfig, NativeDecoder, Quantization
from protocol.core_worker import NewRequestData
from tests.worker.adapters.peft_adapters import merge, write_adapter
from tests.worker.bitwise import NUM_THREADS, Recorder, Schedule, engine_config, make_texts
from tests.worker.checkpoints import build_checkpoint
from tests.worker.odd_models import CONFIGS
from tests.worker.quantization.integer_layouts import gptq, int_quantized
from tests.worker.quantization.layouts import Layout
from tests.worker.quantization.quantized_checkpoints import write_quantized
from tests.worker.runners import make_runners
from worker_proc.model_runner import ModelRunner
from worker_proc.native.build import build, compiler
from worker_proc.startup.load_runner import load_model_runner

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
TARGETS: dict[str, tuple[str, ...]] = {
    "phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    "glm4": (*ATTENTION, "gate_up_proj", "down_proj"),
    "gpt2": ("c_attn", "c_proj", "c_fc"),
    "qwen3_moe": ATTENTION,
    "mixtral": ATTENTION,
    "zaya": ("o_proj",),
    "qwen4_exp": ATTENTION,
}
MAX_ERROR = {"float32": 2e-5, "bfloat16": 0.06}
"""The error of a typical row of logits against transformers' in float32, relative to its length."""
LENGTHS = (1, 2, 17, 40, 93, 61, 5, 33)
NUM_ADAPTERS = 3


def lora_config(
    directory: Path,
    dtype: str,
    num_threads: int = 2,
    decoder: NativeDecoder = NativeDecoder.AUTO,
    *,
    quantization: Quantization | None = None,
    max_rank: int = 64,
) -> EngineConfig:
    config = engine_config(directory, dtype, num_threads, decoder)
    model = msgspec.structs.replace(config.model, quantization=quantization)
    lora = LoraConfig(enable_lora=True, max_loras=8, max_lora_rank=max_rank)
    return msgspec.structs.replace(config, model=model, lora=lora)


def load(directory: Path, dtype: str, **more: Any) -> ModelRunner:
    """Load a checkpoint with the settings of `lora_config`."""
    build()
    return load_model_runner(lora_config(directory, dtype, **more), lambda *_: None)


def keep(runner: ModelRunner, directory: Path) -> int:
    """Load an adapter; returns its id."""
    assert runner.adapters is not None
    adapter, _ = read_adapter(directory.name, str(directory))
    runner.adapters.put(adapter, runner.adapters.read(adapter))
    return adapter.adapter_id


class Adapted(Schedule):
    """A schedule in which the texts have adapters in turn, the first of them none."""

    def __init__(
        self, runner: ModelRunner, texts: Sequence[list[int]], rng: random.Random, ids: list[int]
    ) -> None:
        super().__init__(runner, texts, rng)
        self._ids = ids

    def _admit(self, text: int, start: int, tables: dict[int, list[list[int]]]) -> NewRequestData:
        new = super()._admit(text, start, tables)
        return msgspec.structs.replace(new, adapter_id=self._ids[text % len(self._ids)])


def record(
    runner: ModelRunner,
    recorder: Recorder,
    ids: list[int],
    monkeypatch: pytest.MonkeyPatch,
    seeds: Sequence[int],
) -> None:
    """Compute every position of the texts in some schedules, always with the same bits."""
    with recorder.recording(monkeypatch):
        for seed in seeds:
            recorder.run(runner, Adapted(runner, recorder.texts, random.Random(seed), ids))


def errors(
    recorder: Recorder, base: Any, directories: Sequence[Path | None], dtype: str
) -> dict[int, float]:
    """Return the typical error of the rows with each adapter, against merged weights."""
    base = base.to(getattr(torch, dtype)).float()
    found: dict[int, list[float]] = {}
    merged = [
        base if one is None else merge(copy.deepcopy(base), one).eval() for one in directories
    ]
    for text, token_ids in enumerate(recorder.texts):
        number = text % len(directories)
        with torch.no_grad():
            expected = merged[number](torch.tensor([token_ids])).logits[0]
        for position, row in enumerate(expected):
            got = recorder.found[text, position][: len(row)].float()
            error = float((got - row).norm() / row.norm())
            found.setdefault(number, []).append(error)
    return {number: statistics.median(values) for number, values in found.items()}


@pytest.mark.parametrize(
    ("name", "dtype", "decoder"),
    [
        *(("llama", "float32", "native"), ("llama", "bfloat16", "modules")),
        pytest.param("llama", "bfloat16", "native", marks=pytest.mark.slow),
        pytest.param("llama", "float32", "modules", marks=pytest.mark.slow),
        *(("phi3", "float32", "native"), ("phi3", "bfloat16", "modules")),
        *(("glm4", "float32", "native"), ("gemma3", "bfloat16", "native")),
        *(("olmo2", "float32", "native"), ("granite", "bfloat16", "native")),
        *(("gpt2", "float32", "modules"), ("qwen3_moe", "float32", "native")),
        ("llama_mlp_bias", "float32", "native"),
        # with modules that compute some texts at a time, and take no adapters
        pytest.param("zaya", "float32", "modules", marks=pytest.mark.slow),
        pytest.param("qwen4_exp", "float32", "modules", marks=pytest.mark.slow),
    ],
)
def test_every_row_is_that_of_its_adapter_alone_with_the_same_bits_in_every_schedule(
    name: str, dtype: str, decoder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of the model alone beside them have the bits that they have without any adapters."""
    model = build_checkpoint(tmp_path / "model", CONFIGS[name])
    targets = TARGETS.get(name, (*ATTENTION, *MLP))
    directories: list[Path | None] = [None]
    for number in range(NUM_ADAPTERS):
        some = targets if number else targets[:1]  # the first changes one kind of projection
        path = tmp_path / f"adapter{number}"
        directories.append(write_adapter(path, model, some, rank=(3, 16, 7)[number], seed=number))
    recorder = Recorder(make_texts(CONFIGS[name].vocab_size, LENGTHS))
    plain = Recorder(recorder.texts)
    mode = NativeDecoder.AUTO if decoder == "native" else NativeDecoder.OFF
    build()
    configs = [lora_config(tmp_path / "model", dtype, number, mode) for number in NUM_THREADS[:2]]
    for number, runner in enumerate(make_runners(configs)):
        assert runner.facts.decoder == decoder
        assert runner.facts.exact_resume, runner.facts.exact_resume_reason
        ids = [0 if one is None else keep(runner, one) for one in directories]
        record(runner, recorder, ids, monkeypatch, range(2 * number, 2 * number + 2))
        record(runner, plain, [0], monkeypatch, [number])
    for text in range(0, len(recorder.texts), len(ids)):
        for position in range(len(recorder.texts[text])):
            assert torch.equal(recorder.found[text, position], plain.found[text, position])
    found = errors(recorder, model, directories, dtype)
    assert max(found.values()) < MAX_ERROR[dtype], found
    without = errors(plain, model, directories, dtype)
    assert all(without[number] > 4 * found[number] for number in range(1, 4)), (found, without)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelRunner, Any]:
    """A runner that takes adapters of rank 8 at most, and the model."""
    directory = tmp_path_factory.mktemp("llama")
    model = build_checkpoint(directory, CONFIGS["llama"])
    return load(directory, "float32", max_rank=8), model


Edit = Callable[[Path], object]


def configured(**values: Any) -> Edit:
    def edit(path: Path) -> None:
        file = path / CONFIG_FILE
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return edit


def stored(change: Callable[[dict[str, torch.Tensor]], object]) -> Edit:
    def edit(path: Path) -> None:
        tensors = load_file(path / WEIGHTS_FILE)
        change(tensors)
        save_file(tensors, path / WEIGHTS_FILE)

    return edit


def cut(path: Path) -> None:
    content = (path / WEIGHTS_FILE).read_bytes()
    (path / WEIGHTS_FILE).write_bytes(content[: len(content) - 8])


LAYER = "base_model.model.model.layers.0"
Q = f"{LAYER}.self_attn.q_proj"


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (configured(r=9), "r is 9, more than max_lora_rank 8"),
        (configured(r=0), "r is 0, and must be an integer of at least 1"),
        (configured(rank_pattern={"q_proj": 64}), "rank_pattern.q_proj is 64, more than"),
        (configured(r=2), "down_proj.lora_A.weight has shape [4, 102], and this model with rank 2"),
        (configured(lora_alpha="x"), 'lora_alpha is "x", and must be a number'),
        (configured(lora_alpha=10**400), "lora_alpha is 1000"),
        (configured(alpha_pattern={"([a-z_.]+)+X": 8}), "alpha_pattern has '([a-z_.]+)+X'; names"),
        (configured(use_dora=True), "use_dora is true: DoRA is not supported"),
        (configured(bias="all"), 'bias is "all"'),
        (configured(lora_bias=True), "lora_bias is true"),
        (configured(modules_to_save=["lm_head"]), 'modules_to_save is ["lm_head"]'),
        (configured(peft_type="IA3"), 'peft_type is "IA3"; only LORA is supported'),
        (configured(task_type="SEQ_CLS"), 'task_type is "SEQ_CLS"'),
        (configured(init_lora_weights="pissa_niter_4"), 'init_lora_weights is "pissa_niter_4"'),
        (configured(target_modules=["q_proj", "x_proj"]), "target_modules has 'x_proj'"),
        (lambda path: (path / CONFIG_FILE).unlink(), f"has no {CONFIG_FILE}"),
        (lambda path: (path / CONFIG_FILE).write_text("{"), "cannot be read as JSON"),
        (lambda path: (path / WEIGHTS_FILE).unlink(), f"has no {WEIGHTS_FILE}"),
        (
            lambda path: (path / WEIGHTS_FILE).rename(path / BIN_FILE),
            f"{BIN_FILE} is not read, as it could run code",
        ),
        (cut, "extends past the end of the file"),
        (lambda path: (path / WEIGHTS_FILE).write_bytes(b""), "its header is cut off"),
        (
            stored(lambda t: t.update({f"{LAYER}.mlp.gate.lora_A.weight": torch.ones(4, 72)})),
            "has no model.layers.0.mlp.gate.lora_B.weight",
        ),
        (
            stored(
                lambda t: t.update(
                    {
                        "base_model.model.lm_head.lora_A.weight": torch.ones(4, 72),
                        "base_model.model.lm_head.lora_B.weight": torch.ones(509, 4),
                    }
                )
            ),
            "has matrices for lm_head; this model takes adapters at down_proj, gate_proj, k_proj",
        ),
        (
            stored(lambda t: t.update({f"{LAYER}.input_layernorm.weight": torch.ones(72)})),
            "has base_model.model.model.layers.0.input_layernorm.weight; only the matrices",
        ),
        (
            stored(lambda t: t.update({f"{Q}.lora_A.weight": torch.ones(4, 64)})),
            "q_proj.lora_A.weight has shape [4, 64], and this model with rank 4 needs [4, 72]",
        ),
        (
            stored(lambda t: t[f"{Q}.lora_B.weight"].fill_(float("inf"))),
            "q_proj.lora_B.weight has values that are not finite in float32",
        ),
        (
            stored(lambda t: t.update({f"{Q}.lora_A.weight": torch.ones(4, 72).to(torch.int8)})),
            "q_proj.lora_A.weight has dtype I8, not one of F32, F16, BF16",
        ),
    ],
)
def test_what_cannot_be_used_is_refused_by_key_and_value(
    edit: Edit, reason: str, llama: tuple[ModelRunner, Any], tmp_path: Path
) -> None:
    runner, model = llama
    assert runner.adapters is not None
    write_adapter(tmp_path, model, (*ATTENTION, *MLP))
    edit(tmp_path)
    try:
        config = (tmp_path / CONFIG_FILE).read_bytes()
        digest = digest_of(config, [(tmp_path / WEIGHTS_FILE).read_bytes()])
    except OSError:
        digest = b"0" * 32
    with pytest.raises(AdapterError) as error:
        runner.adapters.read(Adapter("x", str(tmp_path), digest))
    assert reason in str(error.value)


def test_files_of_another_digest_are_refused(
    llama: tuple[ModelRunner, Any], tmp_path: Path
) -> None:
    runner, model = llama
    assert runner.adapters is not None
    write_adapter(tmp_path, model, ATTENTION)
    adapter, _ = read_adapter("x", str(tmp_path))
    write_adapter(tmp_path, model, ATTENTION, seed=2)
    with pytest.raises(AdapterError, match="has changed since it was loaded"):
        runner.adapters.read(adapter)


def logits_of(
    runner: ModelRunner, directory: Path, texts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> Recorder:
    recorder = Recorder(texts)
    record(runner, recorder, [keep(runner, directory)], monkeypatch, [0])
    return recorder


def test_patterns_scales_and_types_of_an_adapter_file(
    llama: tuple[ModelRunner, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that are filled up with zeros change no bit."""
    runner, model = llama
    texts = make_texts(runner.facts.vocab_size, (17, 5))
    plain = write_adapter(tmp_path / "plain", model, ATTENTION, rank=4)
    scaled = write_adapter(
        tmp_path / "scaled",
        model,
        ATTENTION,
        rank=4,
        lora_alpha=6,
        use_rslora=True,
        alpha_pattern={r"layers\.1\.self_attn\.[kv]_proj": 2.5},
    )
    half = write_adapter(tmp_path / "half", model, ATTENTION, rank=4, dtype=torch.float16)
    padded = write_adapter(tmp_path / "padded", model, ATTENTION, rank=8, lora_alpha=8)
    tensors = load_file(plain / WEIGHTS_FILE)
    for name, tensor in tensors.items():
        missing = (0, 0, 0, 4) if ".lora_A." in name else (0, 4)
        tensors[name] = torch.nn.functional.pad(tensor, missing).contiguous()
    save_file(tensors, padded / WEIGHTS_FILE)
    for directory in (plain, scaled, half):
        recorder = logits_of(runner, directory, texts, monkeypatch)
        [error] = errors(recorder, model, [directory], "float32").values()
        assert error < MAX_ERROR["float32"], directory
    one, other = (logits_of(runner, path, texts, monkeypatch) for path in (plain, padded))
    assert all(torch.equal(row, other.found[place]) for place, row in one.found.items())


@pytest.mark.parametrize("quantization", [Quantization.W8A16, Quantization.W8A8])
def test_adapters_on_rounded_weights(
    quantization: Quantization, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Native code or modules compute them; the bits are the same in every schedule."""
    model = build_checkpoint(tmp_path / "model", CONFIGS["llama"])
    adapter = write_adapter(tmp_path / "adapter", model, (*ATTENTION, *MLP), rank=7)
    texts = make_texts(CONFIGS["llama"].vocab_size, LENGTHS)
    for decoder in (NativeDecoder.AUTO, NativeDecoder.OFF):
        runner = load(tmp_path / "model", "bfloat16", decoder=decoder, quantization=quantization)
        assert runner.facts.exact_resume
        recorder = Recorder(texts)
        record(runner, recorder, [0, keep(runner, adapter)], monkeypatch, range(2))
        found = errors(recorder, model, [None, adapter], "bfloat16")
        assert max(found.values()) < 2 * MAX_ERROR["bfloat16"], found


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        (gptq(4, 64, is_symmetric=False, has_order=True), "float32"),
        (int_quantized(codes_rows=True), "bfloat16"),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_adapters_on_a_quantized_checkpoint(
    layout: Layout, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its codes stay in memory; adapters take the rows in the model's order of inputs."""
    dense = write_quantized(tmp_path / "coded", layout)
    model = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
    adapter = write_adapter(tmp_path / "adapter", model, (*ATTENTION, *MLP), rank=7)
    texts = make_texts(model.config.vocab_size, (40, 17, 5, 2))
    for decoder in (NativeDecoder.AUTO, NativeDecoder.OFF):
        runner = load(tmp_path / "coded", dtype, decoder=decoder)
        assert runner.facts.exact_resume
        recorder = Recorder(texts)
        record(runner, recorder, [0, keep(runner, adapter)], monkeypatch, range(2))
        found = errors(recorder, model, [None, adapter], dtype)
        assert max(found.values()) < 2 * MAX_ERROR[dtype], found

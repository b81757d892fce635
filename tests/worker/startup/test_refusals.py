"""Models and settings that are refused: each with its reason, before any weight is read."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    BertConfig,
    BloomConfig,
    DeepseekV3Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen3Config,
)

from protocol.config.settings import configure
from tests.worker.checkpoints import ARCHITECTURES, SHAPE
from tests.worker.hollow_checkpoints import write_hollow
from tests.worker.recurrent_models import KINDS
from worker_proc.errors import InsufficientMemory
from worker_proc.loading import inspection
from worker_proc.native.build import compiler
from worker_proc.startup import required_kernels
from worker_proc.startup.load_runner import load_model_runner

Change = Callable[[Path], None]


def llama() -> PretrainedConfig:
    return LlamaConfig(**SHAPE)


def deepseek() -> PretrainedConfig:
    [found] = [one for one in ARCHITECTURES if one.name == "deepseek_v3"]
    config = found.config()
    assert isinstance(config, DeepseekV3Config)
    return config


def llama4() -> PretrainedConfig:
    [found] = [one for one in ARCHITECTURES if one.name == "llama4"]
    return found.config()


def named(name: str, config: Callable[[], PretrainedConfig]) -> Callable[[], PretrainedConfig]:
    """Return what makes a configuration whose checkpoint has another class of model."""

    def make() -> PretrainedConfig:
        made = config()
        made.architectures = [name]
        return made

    return make


def bert_with_head() -> PretrainedConfig:
    sizes = {key: SHAPE[key] for key in ("vocab_size", "hidden_size", "intermediate_size")}
    return BertConfig(**sizes, num_hidden_layers=2, num_attention_heads=4)


def without_tensor(name: str) -> Change:
    """Return what renames a tensor in the header of the weights, to a name of the same length."""

    def change(directory: Path) -> None:
        path = directory / "model.safetensors"
        content = path.read_bytes()
        assert name.encode() in content
        path.write_bytes(content.replace(name.encode(), ("x" + name[1:]).encode()))

    return change


def turned(name: str) -> Change:
    """Return what turns the shape of a tensor round in the header of the weights."""

    def change(directory: Path) -> None:
        path = directory / "model.safetensors"
        content = path.read_bytes()
        size = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + size])
        header[name]["shape"].reverse()
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + size :])

    return change


def cut(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def with_settings(**settings: Any) -> Change:
    """Return what adds keys to config.json."""

    def change(directory: Path) -> None:
        path = directory / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | settings))

    return change


def nothing(directory: Path) -> None:
    """Leave a checkpoint as it is."""


@dataclass(frozen=True)
class Refusal:
    """A checkpoint, the settings of a start, and the reason why they are refused."""

    reason: str
    config: Callable[[], PretrainedConfig] = llama
    settings: dict[str, Any] = field(default_factory=dict)
    change: Change = nothing
    needs_kernels: bool = False


WINDOWED = SHAPE | {"sliding_window": 13}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "num_local_experts": 4}
SEQUENCE = named("LlamaForSequenceClassification", llama)
ENCODER = named("BertModel", bert_with_head)
BLOOM = {key: SHAPE[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers")}
REFUSED = {
    "not_causal": Refusal("is not causal", change=with_settings(is_causal=False)),
    "unknown_format": Refusal(
        "quant_method is 'hqq'", change=with_settings(quantization_config={"quant_method": "hqq"})
    ),
    "missing_tensor": Refusal(
        r"misses model\.layers\.1\.mlp\.up_proj\.weight",
        change=without_tensor("model.layers.1.mlp.up_proj.weight"),
    ),
    "misshapen_tensor": Refusal(
        r"another shape of .*layers\.1\.mlp\.up_proj\.weight",
        change=turned("model.layers.1.mlp.up_proj.weight"),
    ),
    "cut_file": Refusal("bytes, and its tensors end at", change=cut),
    "no_weights": Refusal(
        r"holds no model\.safetensors", change=lambda path: (path / "model.safetensors").unlink()
    ),
    "context": Refusal("257 is greater than the 256", settings={"max_model_len": 257}),
    "context_with_biases": Refusal(
        "seq_length in .*/config.json is 1000000000000, and .* at most 1048576 tokens",
        lambda: BloomConfig(**BLOOM, seq_length=256),
        change=with_settings(seq_length=10**12),
    ),
    "cache": Refusal(
        "max_model_len 200 needs .* of KV cache",
        settings={"max_model_len": 200, "kv_cache_memory_bytes": 10_000},
    ),
    "blocks": Refusal(
        "max_model_len 200 needs .* of KV cache",
        settings={"max_model_len": 200, "num_gpu_blocks_override": 3},
    ),
    "swap_space": Refusal("swap_space_bytes 2.* free memory", settings={"swap_space_bytes": 9**14}),
    "speculation_of_vectors": Refusal(
        "num_speculative_tokens is 3, and .* generates no tokens",
        ENCODER,
        {"num_speculative_tokens": 3},
    ),
    "adapters_of_encoders": Refusal("enable_lora is set", ENCODER, {"enable_lora": True}),
    "adapters_of_classifiers": Refusal("enable_lora is set", SEQUENCE, {"enable_lora": True}),
    "rounded_classifier": Refusal(
        "quantization is w8a16, and .* classification head",
        SEQUENCE,
        {"quantization": "w8a16", "dtype": "bfloat16"},
    ),
    "cache_of_encoders": Refusal("has no KV cache", ENCODER, {"kv_cache_dtype": "int8"}),
    "rounded_float16": Refusal(
        "w8a16 needs dtype bfloat16, and .* in float32; add --dtype bfloat16",
        settings={"quantization": "w8a16"},
        change=with_settings(dtype="float16"),
    ),
    "rounded_experts": Refusal(
        r"w4a16: model\.layers\.0\.mlp\.experts \(MixtralExperts\) does not compute what",
        lambda: MixtralConfig(**SHAPE, **EXPERTS, hidden_act="relu6"),
        {"quantization": "w4a16"},
        needs_kernels=True,
    ),
    "rounded_rows_of_scaled_experts": Refusal(
        r"w8a8: model\.layers\.\d\.feed_forward \(Llama4TextMoe\) does not compute what",
        llama4,
        {"quantization": "w8a8", "dtype": "bfloat16"},
        needs_kernels=True,
    ),
    "coded_heads": Refusal(
        "int8 needs the native attention kernel, which .* in bfloat16",
        lambda: LlamaConfig(**SHAPE | {"head_dim": 516}),
        {"kv_cache_dtype": "int8"},
    ),
    "coded_latent_rows": Refusal(
        "fp8: deepseek_v3 has multi-head latent attention", deepseek, {"kv_cache_dtype": "fp8"}
    ),
    "states_without_memory": Refusal(
        "recurrent states need", KINDS[0].config, {"kv_cache_memory_bytes": 10_000}
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_reason_comes_before_the_weights(name: str, tmp_path: Path) -> None:
    refusal = REFUSED[name]
    if refusal.needs_kernels and compiler() is None:
        pytest.skip("no C++ compiler")
    write_hollow(tmp_path, refusal.config())
    refusal.change(tmp_path)
    phases = []
    config = configure(model=str(tmp_path), device="cpu", num_threads=1, **refusal.settings)
    with pytest.raises(ValueError, match=refusal.reason):
        load_model_runner(config, lambda phase, done, total: phases.append(phase))
    assert "load_weights" not in phases
    assert refusal.needs_kernels or "compile_kernels" not in phases


def test_a_context_beyond_the_stated_one_is_refused_before_the_models_code_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspection, "build_skeleton", lambda *_: pytest.fail("it ran"))
    write_hollow(tmp_path, llama())
    config = configure(model=str(tmp_path), device="cpu", max_model_len=257)
    with pytest.raises(ValueError, match="257 is greater than the 256 tokens that config"):
        load_model_runner(config, lambda *_: None)


def draft_of(directory: Path, **settings: Any) -> dict[str, Any]:
    """Return the settings that draft by a model in `directory`."""
    own = {"speculative_model": str(directory), "num_speculative_tokens": 2}
    return own | settings


@pytest.mark.parametrize(
    ("config", "draft", "change", "reason"),
    [
        (llama, lambda: LlamaConfig(**SHAPE | {"vocab_size": 4096}), nothing, "has 4096 tokens"),
        (llama, SEQUENCE, nothing, "generates no text"),
        (llama, llama, without_tensor("model.layers.0.mlp.up_proj.weight"), "misses model"),
        (lambda: MistralConfig(**WINDOWED), llama, nothing, "no-enable-hybrid-kv-cache"),
        (
            llama,
            lambda: BloomConfig(**BLOOM, seq_length=256),
            with_settings(seq_length=10**12),
            "seq_length in .*/draft/config.json is 1000000000000",
        ),
    ],
)
def test_a_draft_model_is_refused_before_any_weights(
    config: Callable[[], PretrainedConfig],
    draft: Callable[[], PretrainedConfig],
    change: Change,
    reason: str,
    tmp_path: Path,
) -> None:
    write_hollow(tmp_path / "model", config())
    write_hollow(tmp_path / "draft", draft())
    change(tmp_path / "draft")
    phases = []
    settings = draft_of(tmp_path / "draft", model=str(tmp_path / "model"), device="cpu")
    with pytest.raises(ValueError, match=reason):
        load_model_runner(configure(**settings), lambda phase, done, total: phases.append(phase))
    assert "load_weights" not in phases


def test_a_model_and_its_draft_model_must_fit_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_bytes = write_hollow(tmp_path / "model", llama())
    write_hollow(tmp_path / "draft", llama())
    phases = []
    settings = draft_of(tmp_path / "draft", model=str(tmp_path / "model"), device="cpu")
    monkeypatch.setattr(inspection, "available_memory", lambda: num_bytes * 3 // 2)
    with pytest.raises(InsufficientMemory, match="of the model and of its draft model need"):
        load_model_runner(configure(**settings), lambda phase, done, total: phases.append(phase))
    assert "load_weights" not in phases


@pytest.mark.parametrize(
    ("setting", "value"),
    [("enable_lora", True), ("tensor_parallel_size", 2), ("pipeline_parallel_size", 2)],
)
def test_a_machine_without_kernels_is_refused_before_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str, value: bool | int
) -> None:
    def no_compiler() -> Path:
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr(required_kernels, "build", no_compiler)
    monkeypatch.setattr(required_kernels, "load_library", lambda: None)
    write_hollow(tmp_path, llama())
    config = configure(model=str(tmp_path), device="cpu", **{setting: value})
    phases = []
    reason = rf"{setting}( \d)? needs the native kernels: no C\+\+ comp"
    with pytest.raises(ValueError, match=reason):
        load_model_runner(config, lambda phase, done, total: phases.append(phase))
    assert "load_weights" not in phases


def test_a_refused_model_of_any_size_is_not_read(tmp_path: Path) -> None:
    """Four gigabytes of weights would be seen in the greatest memory of the process."""
    sizes = {"hidden_size": 2048, "intermediate_size": 16384, "num_hidden_layers": 20}
    num_bytes = write_hollow(tmp_path, Qwen3Config(**SHAPE | sizes))
    assert num_bytes > 4_000_000_000
    with_settings(intermediate_size=16383)(tmp_path)
    before = _max_resident_kib()
    with pytest.raises(ValueError, match=r"another shape of .*layers\.0\.mlp"):
        load_model_runner(configure(model=str(tmp_path), device="cpu"), lambda *_: None)
    assert _max_resident_kib() - before < 1 << 18


def _max_resident_kib() -> int:
    [line] = [
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmHWM:")
    ]
    return int(line.split()[1])

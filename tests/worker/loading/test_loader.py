"""Complete checkpoints load as they are; everything else is refused with its reason."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    PretrainedConfig,
    T5Config,
    modeling_utils,
    xLSTMConfig,
)

from protocol.config import CacheConfig, Device, EngineConfig, ModelConfig, WorkerConfig
from tests.worker.checkpoints import (
    ARCHITECTURES,
    EOS_TOKEN_ID,
    VOCAB_SIZE,
    build_checkpoint,
    change_config,
    load_model,
)
from tests.worker.families import VISION_LANGUAGE
from worker_proc.attention.interface import set_implementation
from worker_proc.attention.observed_masks import Visibility, observe
from worker_proc.errors import CheckpointError, InsufficientMemory, UnsupportedModel
from worker_proc.kv.kv_groups import LayerSpec, lay_out
from worker_proc.kv.kv_tensors import bytes_per_block, size_cache
from worker_proc.loading import inspection, loader
from worker_proc.startup.load_runner import load_model_runner

CPU = torch.device("cpu")
LLAMA = ARCHITECTURES[0].config


def silent(phase: str, done: int, total: int) -> None:
    """Take a report of progress."""


def test_weights_are_read_straight_to_a_device(llama_checkpoint: Path) -> None:
    """The meta device stands for one that is not the host."""
    check = modeling_utils.check_and_set_device_map
    checked = loader.check_model(str(llama_checkpoint), "auto", torch.device("meta"), silent)
    model = loader._load_weights(checked, loader._reader(checked), silent)
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert modeling_utils.check_and_set_device_map is check


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("blt", "cannot be prepared (AttributeError"),
        ("pi0", "cannot be prepared (AttributeError"),
        ("idefics", "tokens with positions fails (ValueError"),
    ],
)
def test_a_model_whose_code_fails_is_refused_by_its_type(
    model_type: str, reason: str, tmp_path: Path
) -> None:
    """UnsupportedModel is final; other errors let the start be tried again."""
    config = AutoConfig.for_model(model_type)
    for section in (config, config.get_text_config(decoder=True)):
        if hasattr(section, "num_hidden_layers"):
            section.num_hidden_layers = 2
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel) as caught:
        inspection.inspect_config(str(tmp_path), "bfloat16", CPU)
    text = str(caught.value)
    assert f"the model type {model_type} is not supported: " in text
    assert reason in text
    assert "\n" not in text
    assert len(text) < 400


def test_sharded_weights_equal_those_in_one_file(llama_checkpoint: Path, tmp_path: Path) -> None:
    build_checkpoint(tmp_path, LLAMA(), max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    whole = load_model(llama_checkpoint).model.state_dict()
    sharded = load_model(tmp_path).model.state_dict()
    assert whole.keys() == sharded.keys()
    assert all(torch.equal(tensor, sharded[name]) for name, tensor in whole.items())


def test_reports_progress_and_prints_nothing(
    llama_checkpoint: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    seen: list[tuple[str, int, int]] = []
    load_model(llama_checkpoint, "auto", progress=lambda *report: seen.append(report))
    assert list(dict.fromkeys(phase for phase, _, _ in seen)) == ["inspect", "load_weights"]
    _, done, total = seen[-1]
    assert done == total > 10
    assert capfd.readouterr().err == ""


def test_facts_come_from_the_checkpoint(llama_checkpoint: Path) -> None:
    loaded = load_model(llama_checkpoint)
    assert loaded.vocab_size == VOCAB_SIZE
    assert loaded.eos_token_ids == [EOS_TOKEN_ID]
    assert loaded.model_len == 256
    assert torch.bfloat16 == loaded.dtype
    assert [
        (s.num_heads, s.num_kv_heads, s.head_dim, s.value_head_dim, s.window)
        for s in (layer.spec for layer in loaded.layers)
    ] == [(4, 2, 16, 16, None)] * 2


@pytest.mark.parametrize(
    ("stored", "asked", "expected"),
    [
        (torch.bfloat16, "auto", torch.bfloat16),
        (torch.float32, "auto", torch.bfloat16),
        (torch.float32, "float32", torch.float32),
        (torch.float16, "auto", torch.float32),
        (torch.float16, "float16", torch.float16),
        (torch.bfloat16, "float32", torch.float32),
    ],
)
def test_dtype_follows_the_checkpoint_or_the_wish(
    tmp_path: Path, stored: torch.dtype, asked: str, expected: torch.dtype
) -> None:
    build_checkpoint(tmp_path, LLAMA(), dtype=stored)
    loaded = load_model(tmp_path, asked)
    assert expected == loaded.dtype == loaded.model.lm_head.weight.dtype


Refusal = tuple[Callable[[], PretrainedConfig], str]
SMALL: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}
REFUSED: dict[str, Refusal] = {
    "encoder_decoder": (lambda: T5Config(vocab_size=64), "encoder-decoder"),
    "linear_attention": (
        lambda: xLSTMConfig(**SMALL, num_heads=4),
        "2 layers call the attention interface",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refuses_from_the_configuration_alone(kind: str, tmp_path: Path) -> None:
    """The directory has no weights: the refusal comes before they are read."""
    make, reason = REFUSED[kind]
    make().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=reason):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "unheard_of", "auto_map": {"AutoConfig": "code.Config"}}, "no code of its"),
        ({"is_causal": False}, "not causal"),
    ],
)
def test_refuses_variants_of_known_models(
    copied: Path, changes: dict[str, Any], reason: str
) -> None:
    change_config(copied, **changes)
    with pytest.raises(UnsupportedModel, match=reason):
        load_model(copied)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3_vision", "llava", "smolvlm"])
def test_towers_are_neither_built_nor_read(name: str, tmp_path: Path) -> None:
    """Their tensors may as well be missing, and nothing of them counts as memory."""
    [architecture] = [one for one in (*ARCHITECTURES, *VISION_LANGUAGE) if one.name == name]
    whole = build_checkpoint(tmp_path, architecture.config())
    weights = tmp_path / "model.safetensors"
    stored = load_file(weights)
    towers = ("visual", "vision_tower", "multi_modal_projector", "connector", "vision_model")
    text = {key: stored[key] for key in stored if not any(part in key for part in towers)}
    assert 0 < len(text) < len(stored)
    save_file(text, weights, {"format": "pt"})
    loaded = load_model(tmp_path, "float32")
    parameters = dict(loaded.model.named_parameters())
    assert not any(part in key for key in parameters for part in towers)
    assert not any(parameter.is_meta for parameter in parameters.values())
    tokens = torch.arange(9).unsqueeze(0)
    for model in (whole, loaded.model):
        set_implementation(model, "eager")
    assert torch.equal(whole(tokens).logits, loaded.model(tokens).logits)
    num_weights = inspection.inspect_config(str(tmp_path), "auto", CPU).probed.num_weights
    assert num_weights == sum(parameter.numel() for parameter in parameters.values())


def test_tensors_of_a_tower_that_the_model_does_not_have_are_refused(copied: Path) -> None:
    weights = copied / "model.safetensors"
    save_file(load_file(weights) | {"visual.weight": torch.ones(2)}, weights, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"visual\.weight, which llama does not use"):
        load_model(copied)


def test_missing_files_and_tensors_are_named(copied: Path) -> None:
    weights = copied / "model.safetensors"
    tensors = load_file(weights)
    removed = tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, weights, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"misses model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(copied)
    tensors["model.layers.1.mlp.up_proj.weight"] = removed[:-1].contiguous()
    save_file(tensors, weights, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"another shape of .*up_proj\.weight"):
        load_model(copied)
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(CheckpointError):
        load_model(copied)
    weights.unlink()
    with pytest.raises(CheckpointError, match="safetensors"):
        load_model(copied)
    (copied / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        load_model(copied)


def config_of(directory: Path, max_model_len: int | None, **cache: Any) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model=str(directory), max_model_len=max_model_len, device=Device.CPU),
        cache=CacheConfig(block_size=4, **cache),
        worker=WorkerConfig(num_threads=1),
    )


def test_a_context_that_does_not_fit_is_explained(llama_checkpoint: Path) -> None:
    block_bytes = bytes_per_block(
        [layer.spec for layer in load_model(llama_checkpoint).layers], 4, torch.bfloat16
    )
    config = config_of(llama_checkpoint, 200, kv_cache_memory_bytes=11 * block_bytes)
    with pytest.raises(InsufficientMemory, match=r"KiB of KV cache.* that fits is 41"):
        load_model_runner(config, silent)


def test_the_context_shrinks_to_what_fits_unless_asked_for(
    llama_checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        runner = load_model_runner(
            config_of(llama_checkpoint, None, num_gpu_blocks_override=11), silent
        )
    assert (runner.facts.max_model_len, runner.facts.num_gpu_blocks) == (41, 11)
    assert "41 instead of the model's 256" in caplog.text
    runner = load_model_runner(config_of(llama_checkpoint, 100, num_gpu_blocks_override=90), silent)
    assert runner.facts.max_model_len == 100


def test_more_context_than_the_model_has_is_refused(llama_checkpoint: Path) -> None:
    with pytest.raises(CheckpointError, match="257 is greater than the 256"):
        load_model_runner(config_of(llama_checkpoint, 257), silent)


def test_an_empty_pool_is_refused() -> None:
    layout = lay_out([LayerSpec(1, 1, 8, 8, None)], 4, 8, 10, True)
    with pytest.raises(InsufficientMemory, match="at least"):
        size_cache(100, 80, layout, model_len=10, max_model_len=None)


def test_windows_are_read_off_mask_functions() -> None:
    def causal(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return key <= query

    def windowed(size: int) -> Callable[..., Any]:
        return lambda b, h, q, k: (k <= q) & (k > q - size)

    def chunked(size: int, first: int = 0) -> Callable[..., Any]:
        return lambda b, h, q, k: (k <= q) & ((k - first) // size == (q - first) // size)

    def sides(size: int) -> Callable[..., Any]:
        return lambda b, h, q, k: abs(k - q) <= size

    assert observe(causal) == Visibility(None)
    assert [observe(windowed(size)) for size in (1, 4, 5000)] == [
        Visibility(size) for size in (1, 4, 5000)
    ]
    assert [observe(chunked(size)) for size in (2, 13, 64, 8192)] == [
        Visibility(size, is_chunked=True) for size in (2, 13, 64, 8192)
    ]
    assert observe(lambda b, h, q, k: k >= 0) == Visibility(None, is_causal=False)
    assert [observe(sides(size)) for size in (1, 4, 5000)] == [
        Visibility(size + 1, is_causal=False) for size in (1, 4, 5000)
    ]
    for refused in (
        lambda b, h, q, k: k < q + 8,
        chunked(64, first=3),
        lambda b, h, q, k: (k <= q) & ((q - k) % 8 == 0),
        lambda b, h, q, k: k < q,
    ):
        with pytest.raises(UnsupportedModel):
            observe(refused)

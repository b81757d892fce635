"""Bad files of a checkpoint: one sentence that names the file and the key, and is final."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from protocol.config import CacheConfig, Device, Dtype, EngineConfig, ModelConfig, WorkerConfig
from tests.worker.checkpoints import ARCHITECTURES, build_checkpoint, change_config, load_model
from worker_proc.errors import CheckpointError, UnsupportedModel
from worker_proc.loading.checkpoint import check_config_files
from worker_proc.startup.load_runner import load_model_runner

LLAMA = ARCHITECTURES[0].config
WEIGHT = "model.layers.0.mlp.up_proj.weight"


def change_tensors(directory: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


BAD_VALUES: dict[str, tuple[dict[str, Any], str]] = {
    "size of a wrong type": ({"hidden_size": "64"}, "hidden_size"),
    "size that is null": ({"hidden_size": None}, "hidden_size"),
    "count of a wrong type": ({"num_hidden_layers": "two"}, "num_hidden_layers"),
    "no layers": ({"num_hidden_layers": 0}, "num_hidden_layers"),
    "no heads": ({"num_attention_heads": 0}, "num_attention_heads"),
    "no KV heads": ({"num_key_value_heads": 0}, "num_key_value_heads"),
    "KV heads that do not divide": ({"num_key_value_heads": 3}, "num_key_value_heads"),
    "heads that do not divide": (
        {"hidden_size": 65, "head_dim": None, "num_key_value_heads": 4},
        "hidden_size",
    ),
    "empty heads": ({"head_dim": 0}, "head_dim"),
    "empty vocabulary": ({"vocab_size": 0}, "vocab_size"),
    "negative vocabulary": ({"vocab_size": -5}, "vocab_size"),
    "no positions": ({"max_position_embeddings": 1}, "max_position_embeddings"),
    "unknown activation": ({"hidden_act": "nosuch"}, "hidden_act"),
    "activation of a wrong type": ({"hidden_act": 3}, "hidden_act"),
    "unknown rope": (
        {"rope_parameters": {"rope_type": "nosuch", "rope_theta": 1e4}},
        "rope_parameters.rope_type",
    ),
    "unknown rope, old form": ({"rope_scaling": {"type": "nosuch", "factor": 2.0}}, "nosuch"),
    "rope base of a wrong type": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": "big"}},
        "rope_parameters.rope_theta",
    ),
    "rope base of a wrong type, old form": (
        {"rope_parameters": None, "rope_theta": "big"},
        "json: rope_theta",
    ),
    "rope base of 0, old form": ({"rope_parameters": None, "rope_theta": 0}, "json: rope_theta"),
    "rope of a wrong type": ({"rope_parameters": "x"}, "rope_parameters"),
    "unknown dtype": ({"dtype": "nosuch"}, "dtype"),
    "dtype of a wrong type": ({"dtype": 5}, "dtype"),
    "EOS id that is text": ({"eos_token_id": "2"}, "eos_token_id"),
    "EOS ids that are text": ({"eos_token_id": ["2"]}, "eos_token_id"),
    "flag of a wrong type": ({"attention_bias": "maybe"}, "attention_bias"),
    "layer types of a wrong type": ({"layer_types": 5}, "layer_types"),
    "section of a wrong type": ({"text_config": 5}, "text_config"),
}


@pytest.mark.parametrize("name", BAD_VALUES)
def test_a_bad_value_is_one_sentence_with_file_and_key(name: str, copied: Path) -> None:
    changes, key = BAD_VALUES[name]
    change_config(copied, **changes)
    with pytest.raises(CheckpointError) as caught:
        load_model(copied)
    text = str(caught.value)
    assert f"{copied}/config.json: " in text
    assert key in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("config.json", "[]", "does not hold a JSON object"),
        ("config.json", "{", "cannot be read as JSON"),
        ("generation_config.json", '{"eos_token_id": "</s>"}', 'eos_token_id is "</s>"'),
        ("generation_config.json", "[]", "does not hold a JSON object"),
        ("model.safetensors.index.json", "{", "cannot be read as JSON"),
        ("model.safetensors.index.json", '{"weight_map": 5}', "weight_map"),
        ("model.safetensors.index.json", '{"weight_map": {"a": "b.safetensors"}}', "b.safetensors"),
        ("model.safetensors.index.json", '{"weight_map": {"a": "a/../../b"}}', "outside"),
        ("model.safetensors.index.json", '{"weight_map": {"a": "/b.safetensors"}}', "outside"),
    ],
)
def test_a_bad_file_is_named(name: str, content: str, reason: str, copied: Path) -> None:
    (copied / name).write_text(content)
    if "index" in name:
        (copied / "model.safetensors").unlink()
    with pytest.raises(CheckpointError) as caught:
        load_model(copied)
    assert f"{copied}/{name}" in str(caught.value)
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({"shape": [-64]}, "int"),
        ({"shape": [2**40, 2**40]}, "sizes that are too large"),
        ({"shape": [0, 2**40, 2**40]}, "sizes that are too large"),
        ({"shape": [10**30]}, "int"),
        ({"shape": [float("inf")]}, "malformed"),
        ({"shape": [1.5]}, "Expected `int`"),
        ({"shape": [1] * 17}, "length"),
        ({"shape": [3]}, "bytes, and its shape [3] in F32 takes 12"),
        ({"dtype": "F31"}, "stored as F31, which is not known"),
        ({"data_offsets": [4, 0]}, "has -4 bytes"),
        ({"data_offsets": [0]}, "data_offsets"),
        ({"shape": None}, "array"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_an_entry_of_a_header_that_is_none_is_named_with_its_file(
    entry: dict[str, Any], reason: str, copied: Path
) -> None:
    change_entry(copied, entry)
    with pytest.raises(CheckpointError) as caught:
        load_model(copied)
    text = str(caught.value)
    assert f"{copied}/model.safetensors is not a safetensors file: " in text
    assert WEIGHT in text or "malformed" in text
    assert reason in text


def test_headers_and_files_that_are_nested_too_deeply_are_named(copied: Path) -> None:
    deep = b"[" * 200_000 + b"]" * 200_000
    text = b'{"a": ' + deep + b"}"
    (copied / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not a safetensors file"):
        load_model(copied)
    (copied / "config.json").write_bytes(text)
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read as JSON"):
        load_model(copied)


def change_entry(directory: Path, entry: dict[str, Any]) -> None:
    """Change the entry of a tensor in the header of the weights."""
    path = directory / "model.safetensors"
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header[WEIGHT] |= entry
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + size :])


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
def test_weights_in_a_quantized_format_are_refused(dtype: torch.dtype, copied: Path) -> None:
    """Without quantization_config they would load, unscaled."""

    def quantize(tensors: dict[str, torch.Tensor]) -> None:
        tensors[WEIGHT] = tensors[WEIGHT].mul(50).to(dtype)

    change_tensors(copied, quantize)
    reason = rf"{WEIGHT} is stored as (F8_|I8).*quantization_config"
    with pytest.raises(CheckpointError, match=reason):
        load_model(copied)


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_weights_of_float64_are_computed_in_another_type(key: str, copied: Path) -> None:
    def widen(tensors: dict[str, torch.Tensor]) -> None:
        tensors.update({name: tensor.double() for name, tensor in tensors.items()})

    change_tensors(copied, widen)
    change_config(copied, **{"dtype": None, key: "float64"})
    assert load_model(copied, "float32").dtype == torch.float32
    with pytest.raises(UnsupportedModel, match="float64"):
        load_model(copied, "auto")


@pytest.mark.parametrize(
    "key", [f"{WEIGHT}_scale", "model.layers.1.self_attn.q_proj.input_scale", "model.extra.weight"]
)
def test_keys_that_the_model_does_not_use_are_refused(key: str, copied: Path) -> None:
    change_tensors(copied, lambda tensors: tensors.update({key: torch.ones(1)}))
    with pytest.raises(CheckpointError, match=f"has {key}, which llama does not use"):
        load_model(copied)


def test_keys_known_to_be_harmless_are_allowed(copied: Path, tmp_path_factory: Any) -> None:
    """Old versions stored some buffers, and the copy of a tied matrix."""
    buffers = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
        "model.layers.0.self_attn.masked_bias": torch.tensor(-1e4),
        "model.layers.0.self_attn.bias": torch.ones(1, 1, 4, 4, dtype=torch.uint8),
        "model.position_ids": torch.arange(4),
    }
    change_tensors(copied, lambda tensors: tensors.update(buffers))
    load_model(copied)
    change_tensors(
        copied, lambda tensors: tensors.update({"model.layers.0.self_attn.bias": torch.ones(4)})
    )
    with pytest.raises(CheckpointError, match=r"self_attn\.bias"):
        load_model(copied)
    tied = tmp_path_factory.mktemp("tied")
    build_checkpoint(tied, ARCHITECTURES[1].config())
    assert "lm_head.weight" not in load_file(tied / "model.safetensors")

    def copy_head(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    change_tensors(tied, copy_head)
    load_model(tied)


def test_sizes_are_given_in_a_unit_that_shows_the_difference(llama_checkpoint: Path) -> None:
    config = EngineConfig(
        model=ModelConfig(
            model=str(llama_checkpoint), max_model_len=200, device=Device.CPU, dtype=Dtype.FLOAT32
        ),
        cache=CacheConfig(block_size=4, kv_cache_memory_bytes=50_000),
        worker=WorkerConfig(num_threads=1),
    )
    with pytest.raises(ValueError, match=r"needs 102\.00 KiB .* and 48\.00 KiB are available"):
        load_model_runner(config, lambda *_: None)


def test_json_of_the_checkpoints_is_as_expected(llama_checkpoint: Path) -> None:
    """The values that the cases above change are there."""
    config = json.loads((llama_checkpoint / "config.json").read_text())
    assert {"hidden_size", "hidden_act", "rope_parameters", "dtype", "eos_token_id"} <= set(config)


def test_heads_under_another_key_are_not_compared(tmp_path: Path) -> None:
    """As in GPT-Neo, whose key is `num_heads`."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"num_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}))
    check_config_files(str(tmp_path))


def test_latent_attention_may_have_no_rotated_part(tmp_path: Path) -> None:
    """The `head_dim` of GLM-5.3-Flash is the size of that part."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"head_dim": 0, "kv_lora_rank": 16}))
    check_config_files(str(tmp_path))
    path.write_text(json.dumps({"head_dim": 0}))
    with pytest.raises(CheckpointError, match="head_dim is 0, and must be an integer of at least"):
        check_config_files(str(tmp_path))

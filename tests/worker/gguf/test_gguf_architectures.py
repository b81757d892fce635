"""What files of single architectures state, and which values hold where they state none."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from transformers import LlamaConfig

from tests.worker.checkpoints import WINDOW
from tests.worker.gguf.gguf_files import WIDE, write_gguf
from tests.worker.gguf.gguf_models import ARCHITECTURES, CONFIGS, KEYS, TENSORS
from worker_proc.errors import CheckpointError, UnsupportedModel
from worker_proc.gguf.architectures import architecture_of, make_config
from worker_proc.gguf.mapped import MappedFiles
from worker_proc.gguf.names import named_tensors

pytestmark = pytest.mark.slow


def write(directory: Path, name: str, keys: dict[str, Any], without: str = "") -> MappedFiles:
    """Return a file of a name of `CONFIGS` with further keys, and without one of its own."""
    own = {key: value for key, value in KEYS.get(name, {}).items() if key != without}
    path, _ = write_gguf(
        directory,
        CONFIGS[name](),
        Type.F16,
        types=lambda tensor: Type.F32 if "norm" in tensor else None,
        keys=own | keys,
        tensors=TENSORS.get(name),
        architecture=ARCHITECTURES.get(name, name),
    )
    return MappedFiles(path)


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("bloom", {"attention.head_count_kv": 2}),
        ("bloom", {"feed_forward_length": 512}),
        ("dbrx", {"attention.layer_norm_epsilon": 1e-6}),
        ("falcon", {"rope.dimension_count": 32}),
        ("glm-dsa", {"attention.indexer.types": [False, True, False, True]}),
        ("glm-dsa", {"attention.indexer.types": [True, True]}),
        ("glm-dsa", {"expert_gating_func": 1}),
        ("gpt2", {"attention.head_count_kv": 2}),
        ("gptneox", {"attention.head_count_kv": 2}),
        ("gptneox", {"rope.dimension_count": 15}),
        ("kimi-linear", {"expert_gating_func": 1}),
        ("kimi-linear", {"rope.dimension_count": 48}),
        ("llama4", {"attention.sliding_window": 0}),
        ("mimo2", {"attention.head_count_kv": [1, 1, 1, 1]}),
        ("mimo2", {"attention.sliding_window_pattern": [False]}),
        ("mimo2", {"expert_gating_func": 1}),
        ("minicpm3", {"rope.dimension_count": 96}),
        ("mpt", {"attention.max_alibi_bias": 0.0}),
        ("starcoder", {"attention.head_count_kv": 4}),
    ],
)
def test_what_transformers_cannot_compute_is_refused(
    name: str, keys: dict[str, Any], tmp_path: Path
) -> None:
    [key] = keys
    with pytest.raises(UnsupportedModel, match=f"{name}.{key} is .*; supported: "):
        make_config(write(tmp_path, name, keys))


@pytest.mark.parametrize(
    ("name", "keys", "text"),
    [
        ("exaone4_small", {"block_count": [2**31 - 1]}, "block_count is 2147483647, and there are"),
        (
            "falcon",
            {"attention.key_length": 1 << 26, "attention.value_length": 1 << 26},
            "state a tensor with 402653184 rows, and at most 16777216",
        ),
        ("qwen35", {"ssm.state_size": 1 << 26}, "state a tensor with 268435456 rows, and at"),
        ("qwen35", {"ssm.group_count": 3}, "ssm.time_step_rank is 4; supported: a multiple of"),
        ("qwen3next", {"ssm.state_size": 1 << 26}, "state a tensor with .* rows, and at most"),
        ("stablelm", {"attention.head_count": 2**31 - 1}, "is 2147483647; supported: at most 4096"),
    ],
)
def test_orders_of_rows_have_a_bounded_length(
    name: str, keys: dict[str, Any], text: str, tmp_path: Path
) -> None:
    file = write(tmp_path, name, keys)
    with pytest.raises((CheckpointError, UnsupportedModel), match=text):
        list(named_tensors(file.header, architecture_of(file)))


def test_indexers_of_layers_that_share_one_are_left_out(tmp_path: Path) -> None:
    file = write(tmp_path, "glm-dsa", {"attention.indexer.types": [True, True, False, False]})
    assert "blk.3.indexer.proj.weight" in file.header.tensors
    names = {tensor.name for tensor in named_tensors(file.header, architecture_of(file))}
    found = {name.split(".")[2] for name in names if "indexer" in name}
    assert found == {"0", "1"}


def test_layers_of_jamba_lie_at_equal_distances(tmp_path: Path) -> None:
    file = write(tmp_path, "jamba", {"attention.head_count_kv": [0, 2, 2, 0, 2]})
    with pytest.raises(UnsupportedModel, match=r"must lie at equal distances$"):
        make_config(file)


@pytest.mark.parametrize(
    ("name", "without", "keys", "expected"),
    [
        ("mimo2", "attention.value_scale", {}, {"attention_value_scale": 0.707}),
        ("mimo2", "", {"attention.sliding_window": 128}, {"sliding_window": 129}),
        ("glm-dsa", "attention.indexer.types", {}, {"indexer_types": ["full"] * 4}),
        (
            "glm-dsa",
            "attention.indexer.types",
            {"context_length": 1 << 20},
            {"indexer_types": ["full", "full", "full", "shared"]},
        ),
        ("llama4", "", {}, {"use_qk_norm": True, "attention_chunk_size": 8192, "attn_scale": 0.1}),
        ("minicpm3", "", {}, {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256}),
        ("gptneox", "use_parallel_residual", {}, {"use_parallel_residual": True}),
        ("exaone4_small", "", {}, {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
        (
            "exaone4",
            "attention.sliding_window_pattern",
            {"block_count": 5, "nextn_predict_layers": 1},
            {"num_hidden_layers": 4, "sliding_window": WINDOW},
        ),
        ("granite", "", {"attention.scale": 0.0}, {"attention_multiplier": 0.125}),
        ("stablelm", "", {}, {"use_parallel_residual": False}),
        ("stablelm_parallel", "", {}, {"use_parallel_residual": True, "qk_layernorm": True}),
    ],
)
def test_what_files_leave_out_is_what_the_models_have(
    name: str, without: str, keys: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    """StableLM's converter states a parallel residual for all; its tensors show whether it is."""
    config = make_config(write(tmp_path, name, keys, without))
    assert {key: config[key] for key in expected} == expected


def test_scales_of_minicpm_need_not_be_stated(tmp_path: Path) -> None:
    path, _ = write_gguf(tmp_path, LlamaConfig(**WIDE), Type.F16, architecture="minicpm")
    config = make_config(MappedFiles(path))
    assert config["embedding_multiplier"] == 12.0
    assert config["residual_multiplier"] == 1.4 / 2**0.5
    assert config["logits_scaling"] == 1.0


def test_windows_of_exaone_4_need_not_be_stated(tmp_path: Path) -> None:
    """They are those of the model with 64 layers, of which every fourth has none."""
    layers = {"block_count": 64}
    small = CONFIGS["exaone4_small"]()
    others = {f"other{number}": np.ones(1, np.float32) for number in range(64)}
    path, _ = write_gguf(tmp_path, small, Type.F16, keys=layers, tensors=others)
    config = make_config(MappedFiles(path))
    kinds = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
    assert (config["sliding_window"], config["layer_types"]) == (4096, kinds * 16)


def test_a_joined_tensor_has_the_rows_of_all_its_weights(tmp_path: Path) -> None:
    further = {"blk.0.attn_qkv.bias": np.ones(511, np.float32)}
    path, _ = write_gguf(
        tmp_path, CONFIGS["phi2"](), Type.F16, tensors=further, architecture="phi2"
    )
    file = MappedFiles(path)
    with pytest.raises(CheckpointError, match=r"attn_qkv.bias has 511 rows instead of 512$"):
        list(named_tensors(file.header, architecture_of(file)))

"""What the keys of a GGUF file become in config.json, and which are refused."""

import math
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from transformers import (
    DeepseekV3Config,
    Exaone4Config,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4MoeConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    Olmo2Config,
    Phi3Config,
    PretrainedConfig,
    Qwen3MoeConfig,
)

from protocol.config import ModelConfig
from scripts.gguf.directory import make_directory
from scripts.gguf.splits import BYTE_LEVEL
from scripts.gguf.tokenizer import TokenizerFiles
from scripts.hub.messages import gguf_files
from tests.worker.gguf.gguf_files import WIDE, write_gguf
from tests.worker.gguf.gguf_models import write_named
from worker_proc.errors import CheckpointError, UnsupportedModel
from worker_proc.gguf.architectures import ARCHITECTURES, architecture_of, make_config
from worker_proc.gguf.header import FileHeader
from worker_proc.gguf.mapped import MappedFiles
from worker_proc.gguf.metadata import Metadata
from worker_proc.gguf.model_header import Header, read_header
from worker_proc.gguf.names import named_tensors

SMALL: dict[str, Any] = WIDE | {"num_hidden_layers": 1}
EXPERTS: dict[str, Any] = {
    **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
}
CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**SMALL),
    "gemma2": lambda: Gemma2Config(**SMALL | {"num_hidden_layers": 4}),
    "gemma3": lambda: Gemma3TextConfig(**SMALL | {"num_hidden_layers": 4}),
    "phi3": lambda: Phi3Config(**SMALL, original_max_position_embeddings=256),
    "qwen3moe": lambda: Qwen3MoeConfig(**SMALL, **EXPERTS),
    "gpt-oss": lambda: GptOssConfig(**SMALL, num_local_experts=4),
    "deepseek2": lambda: DeepseekV3Config(
        **{key: value for key, value in SMALL.items() if key not in EXPERTS | {"head_dim": 1}},
        **{"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2},
        **{"kv_lora_rank": 64, "q_lora_rank": None, "first_k_dense_replace": 0},
        **{"qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 64},
        moe_intermediate_size=256,
    ),
    "glm4moe": lambda: Glm4MoeConfig(**SMALL, n_routed_experts=4, moe_intermediate_size=256),
    "granite": lambda: GraniteConfig(**SMALL),
    "olmo2": lambda: Olmo2Config(**SMALL),
    "exaone4": lambda: Exaone4Config(**SMALL, sliding_window=None, layer_types=["full_attention"]),
}

Load = Callable[..., MappedFiles]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The files, by their architectures; one is written when it is first needed."""

    class Paths(dict[str, Path]):
        def __missing__(self, name: str) -> Path:
            self[name], _ = write_gguf(tmp_path_factory.mktemp(name), CONFIGS[name](), Type.F16)
            return self[name]

    return Paths()


@pytest.fixture
def load(paths: dict[str, Path]) -> Load:
    """Return a file as if it had other keys; None: it does not have one."""

    def change(name: str, keys: dict[str, Any]) -> MappedFiles:
        file = MappedFiles(paths[name])
        for key, value in keys.items():
            is_full = key.startswith(("tokenizer.", "general."))
            full = key if is_full else f"{name}.{key}"
            file.header.metadata[full] = value
            if value is None:
                del file.header.metadata[full]
        return file

    return change


YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
USUAL = 0.1 * math.log(4.0) + 1.0


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, {"rope_type": "default"}),
        ({"rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        (
            {"rope.scaling.factor": 4.0, "rope.scale_linear": 2.0},
            {"rope_type": "linear", "factor": 4.0},
        ),
        ({"rope.scaling.factor": 0.0}, {"rope_type": "default"}),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 1.0}, {"rope_type": "default"}),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, {"rope_type": "default"}),
        (YARN | {"rope.scaling.yarn_attn_factor": 1.5}, {"attention_factor": 1.5}),
        (YARN | {"rope.scaling.attn_factor": 0.5}, {"attention_factor": 0.5 * USUAL}),
        (
            YARN | {"rope.scaling.attn_factor": 0.5, "rope.scaling.yarn_attn_factor": 3.0},
            {"attention_factor": 1.5},
        ),
        (YARN | {"rope.scaling.yarn_beta_fast": 16.0}, {"beta_fast": 16.0}),
        (YARN | {"rope.scaling.yarn_ext_factor": 1.0}, {"rope_type": "yarn", "factor": 4.0}),
    ],
)
def test_scaled_frequencies_become_rope_parameters(
    load: Load, keys: dict[str, Any], expected: dict[str, Any]
) -> None:
    """As in llama.cpp, a factor without a type is linear, and a factor of 0 is 1."""
    found = make_config(load("llama", keys))["rope_parameters"]
    assert {key: found.get(key) for key in expected} == pytest.approx(expected)
    assert "factor" in expected or "factor" not in found or found["rope_type"] == "yarn"


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("llama", YARN | {"rope.scaling.yarn_ext_factor": 0.5}),
        ("llama", YARN | {"rope.scaling.yarn_log_multiplier": 0.1}),
        ("llama", {"rope.scaling.attn_factor": 0.5}),
        ("llama", {"attention.scale": 0.2}),
        ("llama", {"logit_scale": 4.0}),
        ("llama", {"attn_logit_softcapping": 50.0}),
        ("llama", {"attention.sliding_window": 16}),
        ("llama", {"attention.causal": False}),
        ("llama", {"a_later_key": 1}),
        ("gemma3", {"attn_logit_softcapping": 50.0}),
        ("qwen3moe", {"expert_weights_scale": 2.5}),
        ("qwen3moe", {"expert_gating_func": 2}),
        ("glm4moe", {"expert_gating_func": 1}),
        ("glm4moe", {"nextn_predict_layers": 1}),
        ("gpt-oss", {"nextn_predict_layers": 1}),
        ("deepseek2", {"expert_gating_func": 3}),
        ("deepseek2", {"expert_gating_func": 1, "expert_weights_norm": True}),
        ("deepseek2", {"expert_group_count": 3}),
        ("deepseek2", {"expert_group_used_count": 3}),
        ("deepseek2", {"attention.key_length_mla": 48, "rope.dimension_count": 48}),
        ("deepseek2", {"attention.temperature_scale": 0.1}),
        ("granite", {"rope.scaling.finetuned": False}),
        ("granite", {"attention.clamp_kqv": 8.0}),
        ("gemma3", {"attention.shared_kv_layers": 1}),
    ],
)
def test_keys_that_change_results_are_refused(load: Load, name: str, keys: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModel, match=f"{name}.{list(keys)[-1]}"):
        make_config(load(name, keys))


def test_as_many_values_of_a_head_are_rotated_as_a_file_states() -> None:
    for size in range(2, 513):
        for count in range(2, size + 1, 2):
            keys = {"general.architecture": "phi2", "phi2.rope.dimension_count": count}
            metadata = Metadata(Header((FileHeader(Path("a.gguf"), keys, [], 0, 0),), {}))
            assert int(size * metadata.rotated_share(size)) == count, (size, count)


@pytest.mark.parametrize(
    "keys",
    [
        {"vocab_size": 512, "rope.scaling.finetuned": True, "attention.causal": True},
        {"attention.scale": float(np.float32(64**-0.5)), "logit_scale": 0.0, "expert_count": 0},
        {"attention.sliding_window": 1 << 20, "rope.scaling.yarn_log_multiplier": 0.0},
        {
            "ssm.conv_kernel": 4,
            "ssm.group_count": 1,
            "ssm.inner_size": 512,
            "ssm.time_step_rank": 8,
        },
    ],
)
def test_keys_that_change_nothing_are_accepted(load: Load, keys: dict[str, Any]) -> None:
    assert make_config(load("llama", keys)) == make_config(load("llama", {}))


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_a_soft_cap_of_0_is_none(load: Load, name: str) -> None:
    config = make_config(load(name, {"final_logit_softcapping": 0.0}))
    assert config["final_logit_softcapping"] is None


def test_the_layers_with_windows_follow_the_pattern(load: Load) -> None:
    """The pattern is the interval of the architecture, a stated one, or a list of all layers."""
    local, full = "sliding_attention", "full_attention"
    stated = "attention.sliding_window_pattern"
    for name, keys, expected in (
        ("gemma2", {}, [local, full] * 2),
        ("gemma3", {}, [local] * 4),
        ("gemma3", {stated: 3}, [local, local, full, local]),
        ("gemma3", {stated: [True, False, False, True]}, [local, full, full, local]),
    ):
        assert make_config(load(name, keys))["layer_types"] == expected
    with pytest.raises(UnsupportedModel, match=stated):
        make_config(load("gemma3", {stated: [True]}))


def test_a_window_shows_the_model(load: Load) -> None:
    """The files of OLMo-3 state olmo2, and only the large EXAONE-4 has a window."""
    keys = {"attention.sliding_window": 64, "attention.sliding_window_pattern": [False]}
    found = [make_config(load("olmo2", own)) for own in ({}, keys)]
    assert [one["model_type"] for one in found] == ["olmo2", "olmo3"]
    found = [make_config(load("exaone4", own)) for own in ({}, keys)]
    assert [one["sliding_window"] for one in found] == [None, 64]


@pytest.mark.parametrize(("own", "expected"), [({}, 5e5), ({"rope.freq_base_swa": 2e4}, 2e4)])
def test_layers_with_windows_have_their_own_base_or_the_common_one(
    load: Load, own: dict[str, float], expected: float
) -> None:
    keys = {"attention.sliding_window": 64, "rope.freq_base": 5e5} | own
    found = make_config(load("olmo2", keys))["rope_parameters"]
    assert found["full_attention"]["rope_theta"] == 5e5
    assert found["sliding_attention"]["rope_theta"] == expected


@pytest.mark.parametrize(
    "keys",
    [{"rope.scaling.factor": 4.0}, {"rope.scaling.type": "yarn"}, {"rope.scale_linear": 2.0}],
)
def test_scaled_positions_of_gemma_4_are_refused(tmp_path: Path, keys: dict[str, Any]) -> None:
    file = MappedFiles(write_named(tmp_path, "gemma4")[0])
    make_config(file)
    file.header.metadata.update({f"gemma4.{key}": value for key, value in keys.items()})
    with pytest.raises(UnsupportedModel, match=r"gemma4\.rope\.scaling\.factor"):
        make_config(file)


def test_without_an_original_length_that_of_the_context_counts(tmp_path: Path) -> None:
    """As in llama.cpp, the original length is that of the context: files of MiniCPM-4."""
    tensors = {
        f"rope_factors_{name}.weight": np.full(32, value, np.float32)
        for name, value in (("long", 2.0), ("short", 1.0))
    }
    path, _ = write_gguf(tmp_path, CONFIGS["llama"](), Type.F16, tensors=tensors)
    file = MappedFiles(path)
    file.header.metadata["llama.rope.scaling.type"] = "longrope"
    config = make_config(file)
    rope = config["rope_parameters"]
    assert rope["original_max_position_embeddings"] == config["max_position_embeddings"]
    assert (rope["rope_type"], rope["factor"]) == ("longrope", 1.0)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([0.5], "and must be a number for each of 2 layers"),
        (["a", "b"], "and must be a number for each of 2 layers"),
        ([math.nan, 0.5], "and must be a number for each of 2 layers"),
        (None, "is null"),
    ],
)
def test_values_of_layers_are_as_many_as_layers(load: Load, values: Any, text: str) -> None:
    metadata = Metadata(load("llama", {"general.xielu": values or 0}).header)
    if values is None:
        del metadata.header.metadata["general.xielu"]
    with pytest.raises(CheckpointError, match=f"general.xielu .*{text}"):
        metadata.shared_numbers("general.xielu", 2)


@pytest.mark.parametrize("stated", [2, [2, 0, 1], [2, 0, 1, 1]])
def test_sizes_may_differ_by_layer_and_wrong_ones_are_refused(load: Load, stated: Any) -> None:
    metadata = Metadata(load("llama", {"sizes": stated}).header)
    expected = [stated] * 3 if isinstance(stated, int) else stated[:3]
    assert metadata.per_layer("sizes", 3) == expected
    for wrong in ([2], [2, -1, 0], [2, 0.5, 0], [True] * 3, None):
        metadata.header.metadata["llama.sizes"] = wrong
        with pytest.raises((CheckpointError, UnsupportedModel), match=r"llama\.sizes"):
            metadata.per_layer("sizes", 3)


@pytest.mark.parametrize("is_normalized", [None, True, False])
def test_weights_of_experts_are_normalized_unless_the_file_states_otherwise(
    load: Load, is_normalized: bool | None
) -> None:
    config = make_config(
        load(
            "qwen3moe", {"expert_weights_norm": is_normalized} if is_normalized is not None else {}
        )
    )
    assert config["norm_topk_prob"] is (is_normalized is not False)


def test_the_epsilon_of_norms_must_be_stated(load: Load) -> None:
    key = "attention.layer_norm_rms_epsilon"
    with pytest.raises(CheckpointError, match=f"misses the key llama.{key}"):
        make_config(load("llama", {key: None}))


@pytest.mark.parametrize("values", [np.ones(31), np.ones((4, 8)), np.full(32, np.inf)])
def test_factors_of_another_shape_or_value_are_refused(values: np.ndarray, tmp_path: Path) -> None:
    factors = {"rope_freqs.weight": values.astype(np.float32)}
    path, _ = write_gguf(tmp_path, CONFIGS["llama"](), Type.F16, tensors=factors)
    with pytest.raises(CheckpointError, match=r"rope_freqs.weight has"):
        make_config(MappedFiles(path))


@pytest.mark.parametrize("name", ["llama-bpe", "llama3", "falcon3", "pixtral", "tekken", "qwen2"])
def test_texts_begin_as_in_llama_cpp_by_default(load: Load, name: str) -> None:
    keys = {"tokenizer.ggml.pre": name, "tokenizer.ggml.add_bos_token": None}
    assert TokenizerFiles(load("llama", keys).header)._adds("bos") is (name != "qwen2")
    assert BYTE_LEVEL[name].has_begin is (name != "qwen2")


def test_texts_of_gemma_4_begin_with_a_token_whatever_the_file_states(load: Load) -> None:
    keys = {"tokenizer.ggml.model": "gemma4", "tokenizer.ggml.add_bos_token": False}
    assert TokenizerFiles(load("llama", keys).header)._config()["add_bos_token"] is True


def test_a_tokenizer_that_is_not_used_need_not_be_known(
    tmp_path: Path, paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers still end with the tokens that the file states."""
    monkeypatch.setattr("scripts.gguf.cache.cache_directory", lambda: tmp_path)
    content = paths["llama"].read_bytes()
    path = tmp_path / "other.gguf"
    path.write_bytes(content.replace(b"gpt2", b"rwkv"))
    with pytest.raises(UnsupportedModel, match=r"tokenizer.ggml.model is 'rwkv'"):
        make_directory(path)
    made = make_directory(path, needs_tokenizer=False)
    assert '"eos_token_id"' in (made / "generation_config.json").read_text()
    assert not (made / "tokenizer.json").exists()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("general.sampling.temp", math.nan),
        ("general.sampling.top_k", math.inf),
        ("general.sampling.top_p", "1"),
        ("tokenizer.ggml.tokens", 7),
        ("tokenizer.ggml.tokens", [7]),
        ("tokenizer.ggml.token_type", ["a"] * 512),
        ("tokenizer.ggml.token_type", [1]),
        ("tokenizer.ggml.bos_token_id", "1"),
        ("tokenizer.ggml.bos_token_id", 1e300),
        ("tokenizer.ggml.eos_token_id", 512),
        ("tokenizer.ggml.pre", ["llama-bpe"]),
        ("tokenizer.ggml.model", ["gpt2"]),
        ("tokenizer.ggml.merges", ["tx h"]),
        ("tokenizer.ggml.scores", ["a"] * 512),
        ("tokenizer.ggml.scores", [True] * 512),
        ("tokenizer.ggml.scores", 1),
    ],
)
def test_values_of_wrong_types_are_refused_by_their_keys(
    load: Load, key: str, value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scripts.gguf.cache.cache_directory", lambda: tmp_path)
    keys = {key: value}
    if key.endswith("scores"):
        keys["tokenizer.ggml.model"] = "llama"
    file = load("llama", keys)
    monkeypatch.setattr("scripts.gguf.directory.MappedFiles", lambda path: file)
    with pytest.raises((CheckpointError, UnsupportedModel), match=key):
        make_directory(file.header.path)


def test_a_token_has_a_bounded_length(load: Load, tmp_path: Path) -> None:
    """Each token is split at every place."""
    file = load("llama", {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": [0.0] * 512})
    file.header.metadata["tokenizer.ggml.tokens"][300] = "x" * 513
    file.header.metadata["tokenizer.ggml.token_type"][300] = 1
    with pytest.raises(CheckpointError, match=r"tokens\[300\] has 513 characters, and at most 512"):
        TokenizerFiles(file.header).write(tmp_path)


def test_tokens_that_are_used_differ(load: Load, tmp_path: Path) -> None:
    header = load("llama", {}).header
    tokens, types = (header.metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "token_type"))
    tokens[301:303], types[301:303] = [tokens[40]] * 2, [5, 1]
    with pytest.raises(CheckpointError, match=r"tokens\[302\] is .*, and so is tokens\[40\]$"):
        TokenizerFiles(header).write(tmp_path)


@pytest.mark.parametrize("token", ["<|tool_response>", "<eos>", "[EOS]", "</s>"])
def test_control_tokens_that_end_an_answer(load: Load, token: str) -> None:
    for type, ends in ((3, [2, 300]), (1, [2])):
        header = load("llama", {}).header
        header.metadata["tokenizer.ggml.tokens"][300] = token
        header.metadata["tokenizer.ggml.token_type"][300] = type
        assert TokenizerFiles(header).end_ids() == ends


def test_the_end_of_a_message_of_gpt_oss_ends_no_answer(load: Load) -> None:
    """The message with the answer follows the one with its thoughts."""
    for types, ends in (([1, 3, 3], [2, 301, 302]), ([3, 3, 3], [2, 300, 301])):
        header = load("llama", {}).header
        header.metadata["tokenizer.ggml.tokens"][300:303] = "<|return|>", "<|call|>", "<|end|>"
        header.metadata["tokenizer.ggml.token_type"][300:303] = types
        assert TokenizerFiles(header).end_ids() == ends


@pytest.mark.parametrize("name", ["gemma2", "llama"])
def test_layers_are_at_most_as_many_as_tensors(load: Load, name: str) -> None:
    file = load(name, {"block_count": 2**31 - 1})
    with pytest.raises(CheckpointError, match=rf"{name}\.block_count is 2147483647, and there are"):
        architecture_of(file)


def test_experts_are_as_many_as_the_file_states(load: Load) -> None:
    for name in ("qwen3moe", "gpt-oss"):
        for count, text in ((3, f"4 experts, and {name}.expert_count is 3"), (5000, "most 4096")):
            file = load(name, {"expert_count": count})
            with pytest.raises(CheckpointError, match=text):
                list(named_tensors(file.header, architecture_of(file)))


@pytest.mark.parametrize(
    ("name", "shape", "reason"),
    [
        ("ffn_up_exps.weight", None, "misses blk.0.ffn_up_exps.weight"),
        ("ffn_up_exps.weight", (4, 512, 224), "which do not fit together"),
        ("ffn_down_exps.weight", (4, 256), "which do not fit together"),
        ("ffn_up_exps.bias", (3, 512), "which do not fit together"),
    ],
)
def test_parts_of_a_weight_fit_together(
    load: Load, name: str, shape: tuple[int, ...] | None, reason: str
) -> None:
    header = load("gpt-oss", {}).header
    entry = header.tensors.pop(f"blk.0.{name}")
    if shape is not None:
        header.tensors[entry.name] = entry._replace(shape=shape)
    with pytest.raises(CheckpointError, match=reason):
        list(named_tensors(header, ARCHITECTURES["gpt-oss"]))


def test_tensors_do_not_overlap(load: Load) -> None:
    header = load("llama", {}).header
    header.check_types()
    first, second = list(header.tensors.values())[:2]
    header.tensors[second.name] = second._replace(offset=first.offset + 32)
    with pytest.raises(CheckpointError, match=rf"begins at byte {first.offset + 32}, before"):
        header.check_types()


def with_alignment(kind: int, value: bytes) -> bytes:
    key = b"general.alignment"
    return struct.pack("<Q", len(key)) + key + struct.pack("<I", kind) + value


def start_of_file(*keys: bytes, num_tensors: int = 0) -> bytes:
    name = b"general.architecture"
    architecture = struct.pack("<Q", len(name)) + name + struct.pack("<IQ", 8, 5) + b"llama"
    head = struct.pack("<4sIQQ", b"GGUF", 3, num_tensors, 1 + len(keys))
    return head + architecture + b"".join(keys)


def test_the_alignment_is_a_whole_number(tmp_path: Path) -> None:
    path = tmp_path / "aligned.gguf"
    path.write_bytes(start_of_file(with_alignment(6, struct.pack("<f", 32.0))))
    with pytest.raises(CheckpointError, match=r"general.alignment is 32.0, and must be a power"):
        read_header(path)
    table = struct.pack("<Q", 1) + b"a" + struct.pack("<IQIQ", 1, 4, 0, 4)
    path.write_bytes(start_of_file(num_tensors=1) + table + bytes(256))
    with pytest.raises(CheckpointError, match=r"a begins at byte \d+, which is not .* general.al"):
        read_header(path)


def test_a_header_is_read_in_pieces(tmp_path: Path) -> None:
    """A file with much data has little more than its header in memory."""
    key = b"llama.text"
    entry = struct.pack("<Q", len(key)) + key + struct.pack("<IQ", 8, 3 << 20) + b"x" * (3 << 20)
    path = tmp_path / "long.gguf"
    path.write_bytes(start_of_file(entry))
    with path.open("ab") as file:
        file.truncate(200 << 20)
    tracemalloc.start()
    header = read_header(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert header.metadata["llama.text"] == "x" * (3 << 20)
    assert peak < 40 << 20


def test_the_elements_of_lists_are_bounded(tmp_path: Path) -> None:
    key = b"llama.list"
    count = (1 << 23) + 1
    entry = struct.pack("<Q", len(key)) + key + struct.pack("<IIQ", 9, 0, count)
    path = tmp_path / "list.gguf"
    path.write_bytes(start_of_file(entry) + bytes(count))
    with pytest.raises(CheckpointError, match=r"8388609 elements of lists up to llama.list"):
        read_header(path)


def test_a_directory_may_be_named_like_a_file(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoint.gguf"
    directory.mkdir()
    assert gguf_files(ModelConfig(model=str(directory))) == {}
    path = tmp_path / "file.gguf"
    path.touch()
    assert gguf_files(ModelConfig(model=str(path))) == {"model": str(path)}


def test_plain_tensors_do_not_change_with_the_file(paths: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "copy.gguf"
    content = paths["llama"].read_bytes()
    path.write_bytes(content)
    file = MappedFiles(path)
    found = file.read_plain("blk.0.attn_q.weight")
    before = found.clone()
    path.write_bytes(bytes(len(content)))
    assert found.equal(before)


def test_only_sentencepiece_of_phi_3_strips_spaces_after_its_tokens(
    load: Load, tmp_path: Path
) -> None:
    """The byte-level one of Phi-4 does not."""
    TokenizerFiles(load("phi3", {}).header).write(tmp_path)
    assert '"rstrip": true' not in (tmp_path / "tokenizer.json").read_text()
    keys = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": [0.0] * 512}
    TokenizerFiles(load("phi3", keys).header).write(tmp_path)
    assert '"rstrip": true' in (tmp_path / "tokenizer.json").read_text()

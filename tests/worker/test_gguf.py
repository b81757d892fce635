"""GGUF files: what blocks stand for, the tokens of models, and what is refused.

The reference of a file is a plain checkpoint with the weights that the `gguf` package makes of its
blocks.
"""

import contextlib
import json
import os
import random
import struct
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    Ernie4_5Config,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    Glm4Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GptOssConfig,
    GraniteConfig,
    Lfm2Config,
    LlamaConfig,
    Ministral3Config,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SeedOssConfig,
    SmolLM3Config,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from scripts.gguf.cache import MAX_DIRECTORIES, find_directory
from scripts.gguf.directory import make_directory
from tests.worker.bitwise import NUM_THREADS, compare, engine_config
from tests.worker.checkpoints import WINDOW
from tests.worker.driving import drive
from tests.worker.gguf_files import WIDE, byte_vocabulary, random_blocks, write_gguf
from tests.worker.parity import (
    GREEDY,
    MAX_TOKENS,
    ROOMY,
    TIGHT,
    generate,
    make_prompts,
    make_runner,
    modes_of,
    parity_config,
)
from tests.worker.runners import make_runners
from tests.worker.test_quantization import product
from worker_proc.errors import CheckpointError, UnsupportedModel
from worker_proc.gguf.blocks import read_blocks
from worker_proc.gguf.files import GgufFiles
from worker_proc.gguf.mapped import MappedFiles
from worker_proc.gguf.model_header import read_header
from worker_proc.gguf.types import TensorType
from worker_proc.loading.inspection import inspect_config
from worker_proc.native.build import compiler
from worker_proc.native.kernels import NativeLibrary
from worker_proc.quantization.packing import obstacle, pack_codes

CODED = [type for type in TensorType if not type.is_plain]
MOST_BYTES = {"Q4_0": 0.57, "Q4_1": 0.63, "Q4_K": 0.58}
"""Of a weight in memory; those of other types are codes of 8 bits."""
needs_kernels = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep directories of files in a cache of the test's own."""
    place = tmp_path / "cache"
    monkeypatch.setattr("scripts.gguf.cache.cache_directory", lambda: place)
    return place


def blocks_of(type: TensorType, num_rows: int, num_inputs: int) -> torch.Tensor:
    stored = random_blocks((num_rows, num_inputs), Type(int(type)))
    return torch.from_numpy(stored).view(num_rows, -1, type.block.num_bytes)


@needs_kernels
@pytest.mark.parametrize("gates", [False, True])
@pytest.mark.parametrize("type", CODED, ids=lambda type: type.name)
def test_blocks_are_multiplied_as_what_they_stand_for(
    type: TensorType, gates: bool, kernels: NativeLibrary
) -> None:
    """The values are the package's, bit for bit, and so are products with them in float32."""
    blocks = blocks_of(type, 70, 768)
    expected = torch.from_numpy(gguf.quants.dequantize(blocks.flatten(1).numpy(), Type(int(type))))
    weight = read_blocks(type, blocks)
    assert torch.equal(weight.dequantize(torch.float32), expected)
    assert obstacle(weight) == ""
    bias = torch.randn(70)
    packed = pack_codes(weight, bias, torch.float32, gates=gates)
    units = kernels.pack(expected, bias, gates=gates)
    for num_rows in (1, 2, 7, 40, 130):
        rows = torch.randn(num_rows, 768)
        found = product(kernels, packed, rows, gates=gates)
        assert torch.equal(found, product(kernels, units, rows, gates=gates)), num_rows
    assert packed.scales is not None
    assert packed.grouping is not None
    parts = (packed.panels, packed.scales, *packed.grouping.tensors.values())
    num_bytes = sum(part.nbytes for part in parts) / (packed.num_outputs * 768)
    assert num_bytes < MOST_BYTES.get(type.name, 1.13)


MOE: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 256}
GEMMA: dict[str, Any] = {
    **{"sliding_window": WINDOW, "query_pre_attn_scalar": 64, "tie_word_embeddings": False}
}
MINISTRAL3_ROPE: dict[str, Any] = {
    **{"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "beta_fast": 32.0},
    **{"beta_slow": 1.0, "original_max_position_embeddings": 16, "mscale": 1.0},
    **{"mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5},
}
LATENT: dict[str, Any] = {
    **{key: value for key, value in WIDE.items() if key != "head_dim"},
    **MOE,
    **{"num_key_value_heads": 4, "kv_lora_rank": 64, "qk_rope_head_dim": 16},
    **{"qk_nope_head_dim": 32, "v_head_dim": 64, "n_routed_experts": 8},
}
DEEPSEEK_ROPE: dict[str, Any] = {
    **{"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "mscale": 0.7},
    **{"mscale_all_dim": 0.7, "original_max_position_embeddings": 64},
}
DELTA: dict[str, Any] = WIDE | {
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    **{"num_hidden_layers": 3, "linear_conv_kernel_dim": 3},
    **{"linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_num_key_heads": 2},
    "linear_num_value_heads": 4,
}
SHARED_EXPERT = {"shared_expert_intermediate_size": 256}
MROPE: dict[str, Any] = {
    **{"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    **{"mrope_section": [4, 2, 2], "mrope_interleaved": True},
}
DELTA_KEYS: dict[str, Any] = {
    **{"ssm.conv_kernel": 3, "ssm.state_size": 64, "ssm.group_count": 2, "ssm.inner_size": 256},
    **{"ssm.time_step_rank": 4, "full_attention_interval": 3},
}
CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**WIDE),
    "llama_tied": lambda: LlamaConfig(**WIDE, tie_word_embeddings=True),
    "mistral": lambda: MistralConfig(**WIDE, sliding_window=None),
    "mixtral": lambda: MixtralConfig(
        **WIDE, num_local_experts=4, num_experts_per_tok=2, sliding_window=None
    ),
    "qwen2": lambda: Qwen2Config(**WIDE),
    "qwen2moe": lambda: Qwen2MoeConfig(
        **WIDE, **MOE, num_experts=4, shared_expert_intermediate_size=256
    ),
    "qwen3": lambda: Qwen3Config(**WIDE),
    "qwen3moe": lambda: Qwen3MoeConfig(**WIDE, **MOE, num_experts=4, norm_topk_prob=True),
    "qwen3moe_fused": lambda: Qwen3MoeConfig(**WIDE, **MOE, num_experts=4, norm_topk_prob=True),
    "gemma": lambda: GemmaConfig(**WIDE),
    "gemma2": lambda: Gemma2Config(**WIDE, **GEMMA),
    "gemma3": lambda: Gemma3TextConfig(**WIDE, **GEMMA),
    "phi3": lambda: Phi3Config(**WIDE, original_max_position_embeddings=256),
    "granite": lambda: GraniteConfig(
        **WIDE,
        embedding_multiplier=1.5,
        residual_multiplier=0.5,
        attention_multiplier=0.1,
        logits_scaling=2.0,
    ),
    "smollm3": lambda: SmolLM3Config(**WIDE | {"num_hidden_layers": 5}),
    "ernie4_5": lambda: Ernie4_5Config(**WIDE),
    "lfm2": lambda: Lfm2Config(
        **{key: value for key, value in WIDE.items() if key != "head_dim"},
        layer_types=["conv", "full_attention"],
        block_auto_adjust_ff_dim=False,
    ),
    "glm4": lambda: Glm4Config(**WIDE, attention_bias=True),
    "olmo2": lambda: Olmo2Config(**WIDE),
    "seed_oss": lambda: SeedOssConfig(**WIDE),
    "mistral3": lambda: Ministral3Config(**WIDE, rope_parameters=MINISTRAL3_ROPE),
    "mistral_small": lambda: MistralConfig(**WIDE, sliding_window=None),
    "glm4moe": lambda: Glm4MoeConfig(
        **WIDE,
        **MOE,
        **{"n_routed_experts": 4, "n_shared_experts": 2, "routed_scaling_factor": 1.5},
        **{"use_qk_norm": True, "attention_bias": True},
    ),
    "deepseek_v2": lambda: DeepseekV2Config(
        **LATENT,
        **{"q_lora_rank": None, "n_shared_experts": 2, "rope_parameters": DEEPSEEK_ROPE},
        **{"routed_scaling_factor": 1.5, "first_k_dense_replace": 1},
    ),
    "deepseek_v2_groups": lambda: DeepseekV2Config(
        **LATENT,
        **{"q_lora_rank": 64, "n_shared_experts": 1, "topk_method": "group_limited_greedy"},
        **{"n_group": 4, "topk_group": 1},
    ),
    "deepseek_v3": lambda: DeepseekV3Config(
        **LATENT,
        **{"q_lora_rank": 64, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1},
        rope_parameters=DEEPSEEK_ROPE | {"mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    "glm4_moe_lite": lambda: Glm4MoeLiteConfig(**LATENT, q_lora_rank=64),
    "gpt-oss": lambda: GptOssConfig(
        **WIDE, num_local_experts=4, num_experts_per_tok=2, sliding_window=WINDOW
    ),
    "qwen2vl": lambda: Qwen2Config(**WIDE),
    "qwen3vl": lambda: Qwen3Config(**WIDE),
    "qwen3vlmoe": lambda: Qwen3MoeConfig(**WIDE, **MOE, num_experts=4, norm_topk_prob=True),
    "qwen3next": lambda: Qwen3NextConfig(**DELTA, **MOE, num_experts=4, **SHARED_EXPERT),
    "qwen35": lambda: Qwen3_5TextConfig(**DELTA, rope_parameters=MROPE),
    "qwen35moe": lambda: Qwen3_5MoeTextConfig(
        **DELTA, **MOE, num_experts=4, **SHARED_EXPERT, rope_parameters=MROPE
    ),
}
KEYS: dict[str, dict[str, Any]] = {
    "qwen3next": DELTA_KEYS,
    **dict.fromkeys(
        ("qwen35", "qwen35moe"), DELTA_KEYS | {"rope.dimension_sections": [4, 2, 2, 0]}
    ),
    "lfm2": {"shortconv.l_cache": 3},
    "mistral3": {"rope.scaling.yarn_log_multiplier": 1.0, "attention.temperature_scale": 0.5},
    "glm4moe": {
        **{"expert_weights_norm": True, "expert_gating_func": 2, "nextn_predict_layers": 1},
    },
    "deepseek_v2": {"rope.scaling.yarn_log_multiplier": 0.07},
    "deepseek_v3": {
        **{"expert_weights_norm": True, "expert_gating_func": 2},
        "rope.scaling.yarn_log_multiplier": 0.1,
    },
    "glm4_moe_lite": {
        **{"expert_weights_norm": True, "leading_dense_block_count": 1, "nextn_predict_layers": 1},
    },
    "qwen2vl": {"rope.dimension_sections": [16, 8, 8, 0]},
    **{
        name: {"rope.dimension_sections": [16, 8, 8, 0], "n_deepstack_layers": 3}
        for name in ("qwen3vl", "qwen3vlmoe")
    },
}
"""Further keys of files."""
ARCHITECTURES = {
    "qwen3moe_fused": "qwen3moe",
    "mistral_small": "mistral3",
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v2_groups", "deepseek_v3", "glm4_moe_lite"), "deepseek2"
    ),
}
"""`general.architecture`, where it is not the name."""
UNUSED: dict[str, dict[str, np.ndarray]] = {
    "glm4moe": {
        "blk.2.attn_q.weight": np.ones((256, 256), np.float32),
        "blk.2.nextn.eh_proj.weight": np.ones((256, 512), np.float32),
    },
    "deepseek_v2": {
        f"blk.0.{name}.weight": np.ones((4, 64, size), np.float32)
        for name, size in (("attn_k_b", 32), ("attn_v_b", 64))
    },
    "glm4_moe_lite": {"blk.2.attn_k_b.weight": np.ones((4, 64, 32), np.float32)},
}
"""Tensors of layers that draft tokens, and copies of parts of a weight."""
FILES = {
    **dict.fromkeys(CONFIGS, Type.Q4_0),
    **{"llama": Type.Q8_0, "qwen2": Type.Q5_K, "qwen3": Type.Q6_K, "qwen3moe": Type.Q4_K},
    **{"gemma2": Type.F16, "gemma3": Type.BF16, "phi3": Type.Q4_1, "granite": Type.F32},
    **{"mixtral": Type.Q5_1, "smollm3": Type.Q5_0, "qwen3moe_fused": Type.Q4_K},
    **{"qwen35": Type.Q8_0, "qwen35moe": Type.Q6_K, "qwen3next": Type.Q8_0},
}
"""The type of the matrices of each file."""
TYPES: dict[str, Callable[[str], Type | None]] = {
    "qwen35": lambda name: Type.Q4_K if "ssm_out" in name else None,
    "qwen3next": lambda name: Type.Q5_1 if name == "blk.0.attn_gate.weight" else None,
    "gpt-oss": lambda name: Type.MXFP4 if "_exps" in name else Type.Q8_0,
    "qwen3vlmoe": lambda name: Type.MXFP4 if "_exps" in name else None,
}
"""Where they have others."""

FUSED_EXPERTS = ("qwen3moe_fused",)
"""Files whose gates and factors of experts are one tensor."""
USUAL = ("llama", "llama_tied", "qwen3moe", "gemma2", "phi3")
"""One of each kind of tensors; the others take a minute more."""


def write_named(directory: Path, name: str) -> tuple[Path, Path]:
    """Write the file of a name above, and the plain checkpoint."""
    keys = KEYS.get(name)
    return write_gguf(
        directory,
        CONFIGS[name](),
        FILES[name],
        types=TYPES.get(name, lambda tensor: None),
        keys=keys,
        tensors=UNUSED.get(name),
        architecture=ARCHITECTURES.get(name, name if keys else ""),
        fuses_experts=name in FUSED_EXPERTS,
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_weights_have_the_names_and_values_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    path, reference = write_named(tmp_path, name)
    expected = load_file(reference / "model.safetensors")
    format = inspect_config(str(make_directory(path)), "auto", torch.device("cpu")).format
    assert format is not None
    assert format.sources
    files = GgufFiles(format.sources)
    found = {key: one.read().dequantize(torch.float32) for key, one in files.weights.items()}
    found |= {key: part[...].float() for key, part in files.plain_slices().items()}
    found |= {key: whole.read(torch.float32) for key, whole in files.whole.items()}
    assert found.keys() == expected.keys()
    for key, values in found.items():
        assert torch.equal(values, expected[key]), key


def mixed(name: str) -> Type | None:
    """Return the types of a file of Q4_K_M: some matrices have more bits."""
    return Type.Q6_K if "attn_v" in name or "ffn_down" in name or name == "output.weight" else None


def expect(reference: Path, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """Return transformers' tokens over the dequantized weights."""
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(
        reference, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    return [generate(model, prompt, max_tokens) for prompt in prompts]


@needs_kernels
@pytest.mark.parametrize(
    "name",
    [name if name in USUAL else pytest.param(name, marks=pytest.mark.slow) for name in CONFIGS],
)
def test_tokens_are_those_of_the_dequantized_weights(name: str, tmp_path: Path) -> None:
    path, reference = write_named(tmp_path, name)
    prompts = make_prompts()[:5]
    expected = expect(reference, prompts, MAX_TOKENS)
    assert len({tuple(tokens) for tokens in expected}) > 1
    runner = make_runner(make_directory(path), ROOMY)
    modes = {"whole_prompts": {}} if name in USUAL else modes_of(runner.facts.num_gpu_blocks)
    for mode, options in modes.items():
        run = drive(runner, prompts, GREEDY, **({"max_num_seqs": 16} | options))
        assert run.output_token_ids == expected, mode
    assert runner.facts.exact_resume
    is_plain = FILES[name] in (Type.F32, Type.F16, Type.BF16)
    assert runner.facts.quantization.startswith("" if is_plain else "gguf ")


@needs_kernels
def test_a_file_of_several_types_is_served_in_every_mode(tmp_path: Path) -> None:
    """Queries, keys and values that differ are packed one by one."""
    path, reference = write_gguf(tmp_path, LlamaConfig(**WIDE), Type.Q4_K, types=mixed)
    prompts = make_prompts()
    expected = expect(reference, prompts, MAX_TOKENS)
    directory = make_directory(path)
    for runner in make_runners([parity_config(directory, blocks) for blocks in (ROOMY, TIGHT)]):
        assert runner.facts.quantization == "gguf int4 int8"
        assert runner.facts.decoder == "native"
        for mode, options in modes_of(runner.facts.num_gpu_blocks).items():
            run = drive(runner, prompts, GREEDY, **({"max_num_seqs": 16} | options))
            assert run.output_token_ids == expected, mode


@needs_kernels
def test_logits_are_the_same_bits_in_every_schedule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = LlamaConfig(**WIDE | {"max_position_embeddings": 512})
    path, _ = write_gguf(tmp_path, config, Type.Q4_K, types=mixed)
    directory = make_directory(path)
    configs = [engine_config(directory, "bfloat16", threads) for threads in NUM_THREADS[::2]]
    compare(make_runners(configs), monkeypatch)


@pytest.mark.parametrize(
    ("keys", "own", "expected"),
    [
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {}, {"factor": 4.0}),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 64,
            },
            {},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        ),
    ],
)
def test_scaled_frequencies_are_read(
    keys: dict[str, Any], own: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    path, _ = write_gguf(tmp_path, Qwen3Config(**WIDE | own), Type.F16, keys=keys)
    config = json.loads((make_directory(path) / "config.json").read_text())
    assert config["rope_parameters"].items() >= expected.items()


def test_frequencies_of_gpt_oss_are_not_truncated(tmp_path: Path) -> None:
    """Files do not state that."""
    path, reference = write_named(tmp_path, "gpt-oss")
    made, expected = (
        json.loads((directory / "config.json").read_text())["rope_parameters"]
        for directory in (make_directory(path), reference)
    )
    assert made == expected
    assert made["truncate"] is False


LLAMA3_ROPE = {
    **{"rope_type": "llama3", "factor": 8.0, "rope_theta": 500000.0, "low_freq_factor": 1.0},
    **{"high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
}


def test_frequencies_of_llama_3_are_those_of_the_file(tmp_path: Path) -> None:
    """A file has by what each frequency is divided; the parameters follow from these numbers."""
    config = LlamaConfig(**WIDE | {"head_dim": 128}, rope_parameters=LLAMA3_ROPE)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 1.0 / 500000.0 ** (torch.arange(0, 128, 2).float() / 128)
    factors = {"rope_freqs.weight": (plain / scaled).numpy()}
    path, _ = write_gguf(tmp_path, config, Type.F16, tensors=factors)
    made = json.loads((make_directory(path) / "config.json").read_text())
    assert made["rope_parameters"] == pytest.approx(LLAMA3_ROPE)
    other = tmp_path / "other"
    factors["rope_freqs.weight"][40] *= 2
    path, _ = write_gguf(other, config, Type.F16, tensors=factors)
    with pytest.raises(UnsupportedModel, match=r"rope_freqs.weight has other factors"):
        make_directory(path)


def test_factors_of_phi_3_are_those_of_the_file(tmp_path: Path) -> None:
    size = WIDE["head_dim"] // 2
    rope = {
        **{"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64},
        **{"long_factor": [1.0 + n for n in range(size)], "short_factor": [1.5] * size},
    }
    config = Phi3Config(**WIDE, original_max_position_embeddings=64, rope_parameters=rope)
    path, _ = write_gguf(
        tmp_path,
        config,
        Type.F16,
        keys={"rope.scaling.original_context_length": 64},
        tensors={
            f"rope_factors_{name}.weight": np.array(rope[f"{name}_factor"], dtype=np.float32)
            for name in ("long", "short")
        },
    )
    made = json.loads((make_directory(path) / "config.json").read_text())
    assert made["rope_parameters"].items() >= rope.items()
    assert made["original_max_position_embeddings"] == 64


def test_a_directory_is_made_once_for_each_file(tmp_path: Path, cache: Path) -> None:
    path, _ = write_gguf(tmp_path, LlamaConfig(**WIDE), Type.Q8_0)
    directory = make_directory(path)
    state = (directory / "config.json").stat()
    assert make_directory(path) == directory == find_directory(read_header(path))
    assert (directory / "config.json").stat() == state
    path.write_bytes(path.read_bytes())
    assert find_directory(read_header(path)) is None
    for number in range(MAX_DIRECTORIES):
        unused = cache / "gguf" / f"other{number}"
        unused.mkdir()
        os.utime(unused, (number, number))
    assert make_directory(path) != directory
    assert len(list((cache / "gguf").iterdir())) <= MAX_DIRECTORIES


def test_a_file_that_changes_is_not_loaded(tmp_path: Path) -> None:
    path, _ = write_gguf(tmp_path, LlamaConfig(**WIDE), Type.Q8_0)
    directory = make_directory(path)
    with path.open("ab") as file:
        file.write(b"more")
    with pytest.raises(CheckpointError, match="has changed since the engine was started"):
        make_runner(directory, ROOMY)


def changed(place: int, value: bytes, content: bytes) -> bytes:
    return content[:place] + value + content[place + len(value) :]


def renamed(old: bytes, new: bytes, content: bytes) -> bytes:
    assert len(old) == len(new)
    assert old in content
    return content.replace(old, new)


def longer(key: bytes, by: int, content: bytes) -> bytes:
    """Let the text that a key has state another length."""
    place = content.index(key) + len(key) + 4
    (length,) = struct.unpack_from("<Q", content, place)
    return changed(place, struct.pack("<Q", length + by), content)


DAMAGE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "magic": (partial(changed, 0, b"GGML"), "does not begin with GGUF"),
    "empty": (lambda content: b"", "does not begin with GGUF"),
    "version": (partial(changed, 4, b"\x09\0\0\0"), "of version 9"),
    "order": (partial(changed, 4, b"\0\0\0\x03"), "big-endian"),
    "tensors": (partial(changed, 8, b"\xff" * 8), "18446744073709551615 tensors"),
    "keys": (partial(changed, 16, b"\xff" * 8), "18446744073709551615 keys"),
    "header": (lambda content: content[:200], "truncated"),
    "data": (lambda content: content[:-100], "it is truncated"),
    "text": (partial(longer, b"general.architecture", 1 << 62), "general.architecture"),
    "key": (partial(renamed, b"general.architecture", b"general.architecturE"), "has no general."),
    "architecture": (partial(renamed, b"llama", b"lamma"), "general.architecture is 'lamma'"),
    "name": (partial(renamed, b"blk.1.attn_q.w", b"blk.1.attn_q_w"), "does not use"),
    "length": (
        partial(renamed, b"block_count", b"block_cOunt"),
        "misses the key llama.block_count",
    ),
    "tokenizer": (partial(renamed, b"llama-bpe", b"llama-b9e"), "tokenizer.ggml.pre is"),
    "model": (partial(renamed, b"gpt2", b"rwkv"), "tokenizer.ggml.model is 'rwkv'"),
}


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path, _ = write_gguf(tmp_path_factory.mktemp("whole"), LlamaConfig(**WIDE), Type.Q8_0)
    return path.read_bytes()


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_refused_with_the_reason(damage: str, content: bytes, tmp_path: Path) -> None:
    change, reason = DAMAGE[damage]
    path = tmp_path / "damaged.gguf"
    path.write_bytes(change(content))
    with pytest.raises(ValueError, match=reason) as caught:
        make_directory(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_header_cut_at_any_byte_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(content)
    end = read_header(path).files[0].num_bytes
    for size in range(0, end, 97):
        path.write_bytes(content[:size])
        with pytest.raises(CheckpointError):
            read_header(path)


@needs_kernels
@pytest.mark.parametrize("type", [Type.Q3_K, Type.IQ4_XS])
def test_other_types_are_dequantized(
    type: Type, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, reference = write_gguf(
        tmp_path, LlamaConfig(**WIDE), Type.Q8_0, types=lambda name: type if "ffn" in name else None
    )
    prompts = make_prompts()[:3]
    with caplog.at_level("INFO"):
        runner = make_runner(make_directory(path), ROOMY)
    text = "6 weights are dequantized to float32: no kernel reads its codes"
    assert f"gguf {type.name}: {text}" in caplog.text
    assert drive(runner, prompts, GREEDY).output_token_ids == expect(reference, prompts, MAX_TOKENS)


def test_other_types_need_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = write_gguf(tmp_path, LlamaConfig(**WIDE), Type.Q3_K)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ValueError, match=r"is stored as Q3_K; .*pip install 'troika\[gguf\]'$"):
        make_directory(path)


def test_unknown_types_are_refused(tmp_path: Path, content: bytes) -> None:
    name = b"blk.0.attn_v.weight"
    place = content.index(name) + len(name) + 4 + 2 * 8
    path = tmp_path / "unknown.gguf"
    path.write_bytes(changed(place, struct.pack("<I", 99), content))
    with pytest.raises(ValueError, match=r"attn_v.weight is stored as type 99; supported: F32, "):
        make_directory(path)


@pytest.mark.parametrize("seed", range(40))
def test_a_header_with_random_bytes_is_read_or_refused(
    seed: int, content: bytes, tmp_path: Path
) -> None:
    """Nothing but a sentence ends the reading."""
    path = tmp_path / "random.gguf"
    path.write_bytes(content)
    end = read_header(path).files[0].num_bytes
    generator = random.Random(seed)
    damaged = bytearray(content)
    for _ in range(3):
        damaged[generator.randrange(24, end)] = generator.choice((0, 1, 4, 127, 128, 255))
    path.write_bytes(damaged)
    with contextlib.suppress(CheckpointError, UnsupportedModel):
        make_directory(path)


def test_scales_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    path, _ = write_gguf(tmp_path, LlamaConfig(**WIDE), Type.Q8_0)
    name = "blk.0.attn_v.weight"
    place = read_header(path).tensors[name].offset
    path.write_bytes(changed(place, struct.pack("<e", float("inf")), path.read_bytes()))
    with pytest.raises(CheckpointError, match=f"{name} has scales that are not finite"):
        MappedFiles(path).read_codes(name)


def test_control_tokens_end_answers(tmp_path: Path) -> None:
    """Also those that the file names by their text alone."""
    vocabulary = byte_vocabulary(512)
    vocabulary.tokens[300], vocabulary.types[300] = "<|im_end|>", 3
    path, _ = write_gguf(tmp_path, LlamaConfig(**WIDE), Type.F16, vocabulary=vocabulary)
    generation = json.loads((make_directory(path) / "generation_config.json").read_text())
    assert generation == {"eos_token_id": [2, 300]}

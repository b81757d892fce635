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
from transformers import LlamaConfig, Phi3Config, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from api_proc.text.checkpoint import sampling_defaults
from protocol.config import ModelConfig
from scripts.gguf.cache import MAX_DIRECTORIES, find_directory
from scripts.gguf.directory import make_directory
from tests.worker.bitwise import NUM_THREADS, compare, engine_config
from tests.worker.driving import drive
from tests.worker.gguf.gguf_files import WIDE, byte_vocabulary, random_blocks, write_gguf
from tests.worker.gguf.gguf_models import CONFIGS, FILES, KINDS, USUAL, write_named
from tests.worker.parity import (
    GREEDY,
    MAX_TOKENS,
    ROOMY,
    TIGHT,
    generate_all,
    make_prompts,
    make_runner,
    modes_of,
    parity_config,
)
from tests.worker.quantization.products import product
from tests.worker.runners import make_runners
from worker_proc.errors import CheckpointError, UnsupportedModel
from worker_proc.gguf.architectures import ARCHITECTURES
from worker_proc.gguf.blocks import read_blocks
from worker_proc.gguf.files import GgufFiles
from worker_proc.gguf.known import KNOWN
from worker_proc.gguf.mapped import MappedFiles
from worker_proc.gguf.model_header import read_header
from worker_proc.gguf.types import TensorType
from worker_proc.loading.inspection import inspect_config
from worker_proc.native.build import compiler
from worker_proc.native.kernels import NativeLibrary
from worker_proc.quantization.packing import obstacle, pack_codes
from worker_proc.quantization.selection import reorder_inputs

CODED = [type for type in TensorType if not type.is_plain]
MAX_BYTES_PER_VALUE = {"Q4_0": 0.57, "Q4_1": 0.63, "Q4_K": 0.58}
"""The most bytes of a value in memory; weights of other types are codes of 8 bits."""
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
    units = kernels.packer.pack(expected, bias, gates=gates)
    for num_rows in (1, 2, 7, 40, 130):
        rows = torch.randn(num_rows, 768)
        found = product(kernels, packed, rows, gates=gates)
        assert torch.equal(found, product(kernels, units, rows, gates=gates)), num_rows
    assert packed.scales is not None
    assert packed.grouping is not None
    parts = (packed.panels, packed.scales, *packed.grouping.tensors.values())
    num_bytes = sum(part.nbytes for part in parts) / (packed.num_outputs * 768)
    assert num_bytes < MAX_BYTES_PER_VALUE.get(type.name, 1.13)


@pytest.mark.parametrize(
    "name",
    [name if name in KINDS else pytest.param(name, marks=pytest.mark.slow) for name in CONFIGS],
)
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
    return generate_all(model, prompts, max_tokens)


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
    if name in USUAL:
        assert runner.facts.decoder == "native"
    is_plain = FILES[name] in (Type.F32, Type.F16, Type.BF16)
    assert runner.facts.quantization.startswith("" if is_plain else "gguf ")


@pytest.mark.parametrize("type", [TensorType.Q4_K, TensorType.Q6_K], ids=lambda type: type.name)
@pytest.mark.parametrize(
    ("order", "keeps"),
    [
        (torch.arange(768).view(3, 256)[[2, 0, 1]].flatten(), True),
        (torch.arange(768).view(24, 32).flip(0).flatten(), False),
        (torch.arange(768).view(3, 256).roll(128, 1).flatten(), False),
    ],
    ids=["sections", "groups", "halves"],
)
def test_multiples_move_with_whole_sections(
    type: TensorType, order: torch.Tensor, keeps: bool
) -> None:
    """A section has 256 inputs, whose groups have scales that are multiples of one number."""
    weight = read_blocks(type, blocks_of(type, 8, 768))
    assert weight.scale_multiples is not None
    moved = reorder_inputs(weight, order)
    expected = weight.dequantize(torch.float32)[:, order]
    assert torch.equal(moved.dequantize(torch.float32), expected)
    assert (moved.scale_multiples is not None) is keeps
    for numbers, values in (
        (moved.scale_multiples, moved.scales),
        (moved.minimum_multiples, moved.minimums),
    ):
        if numbers is not None and values is not None:
            assert torch.equal(numbers.values().abs(), values.abs())


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


@pytest.mark.slow
@pytest.mark.parametrize("place", [0, 40])
def test_factors_of_gemma_4_show_which_values_are_rotated(place: int, tmp_path: Path) -> None:
    path, reference = write_named(tmp_path, "gemma4")
    made, expected = (
        json.loads((directory / "config.json").read_text())["rope_parameters"]
        for directory in (make_directory(path), reference)
    )
    assert made == expected
    start = read_header(path).tensors["rope_freqs.weight"].offset
    path.write_bytes(changed(start + 4 * place, struct.pack("<f", 2.0), path.read_bytes()))
    with pytest.raises(UnsupportedModel, match=r"rope_freqs.weight must have 64 factors"):
        make_directory(path)


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
    with pytest.raises(ValueError, match=r"is stored as Q3_K; .*pip install gguf$"):
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


def test_rates_of_decay_are_negative(tmp_path: Path) -> None:
    path, _ = write_named(tmp_path, "mamba2")
    place = read_header(path).tensors["blk.0.ssm_a"].offset
    path.write_bytes(changed(place, struct.pack("<f", 0.5), path.read_bytes()))
    format = inspect_config(str(make_directory(path)), "auto", torch.device("cpu")).format
    assert format is not None
    rates = GgufFiles(format.sources).plain_slices()["backbone.layers.0.mixer.A_log"]
    with pytest.raises(CheckpointError, match=r"blk.0.ssm_a has rates of decay that are not less"):
        rates[...]


def test_suppressed_tokens_are_never_sampled(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """More tokens than a request may have are ignored with a warning, as those of a checkpoint."""
    vocabulary = byte_vocabulary(512)
    keys = {"suppress_tokens": [300, 7]}
    stated = vocabulary._replace(keys={**vocabulary.keys, **keys})
    path, _ = write_gguf(tmp_path, LlamaConfig(**WIDE), Type.F16, vocabulary=stated)
    directory = make_directory(path)
    assert sampling_defaults(ModelConfig(model=str(directory))).suppress_tokens == [300, 7]
    many = vocabulary._replace(keys={**vocabulary.keys, "suppress_tokens": list(range(65))})
    path, _ = write_gguf(tmp_path / "many", LlamaConfig(**WIDE), Type.F16, vocabulary=many)
    with caplog.at_level("WARNING"):
        assert sampling_defaults(ModelConfig(model=str(make_directory(path)))).suppress_tokens == []
    assert "generation_config.json: suppress_tokens is ignored: " in caplog.text
    wrong = vocabulary._replace(keys={**vocabulary.keys, "suppress_tokens": [512]})
    path, _ = write_gguf(tmp_path / "wrong", LlamaConfig(**WIDE), Type.F16, vocabulary=wrong)
    with pytest.raises(CheckpointError, match=r"suppress_tokens must be a list of ids below 512"):
        make_directory(path)


def test_names_that_are_checked_early_are_those_of_all_architectures() -> None:
    assert ARCHITECTURES.keys() == KNOWN


def test_control_tokens_end_answers(tmp_path: Path) -> None:
    """So do those that the file names by their text alone."""
    vocabulary = byte_vocabulary(512)
    vocabulary.tokens[300], vocabulary.types[300] = "<|im_end|>", 3
    path, _ = write_gguf(tmp_path, LlamaConfig(**WIDE), Type.F16, vocabulary=vocabulary)
    generation = json.loads((make_directory(path) / "generation_config.json").read_text())
    assert generation == {"eos_token_id": [2, 300]}

"""A second start proves nothing again, and any change to what a proof depends on does."""

import json
import os
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING

from protocol.config import EngineConfig, KVCacheDtype, ParallelConfig, Quantization
from protocol.sampling import SamplingParams
from tests.worker.bitwise import engine_config
from tests.worker.checkpoints import ARCHITECTURES, build_checkpoint
from tests.worker.compressed_models import DEEPSEEK_V4
from tests.worker.driving import drive
from worker_proc.loading import inspection
from worker_proc.loading.proofs import Proofs
from worker_proc.loading.start_cache import StartCache
from worker_proc.model_runner import ModelRunner
from worker_proc.modules import fusing, mlp
from worker_proc.modules.experts import mixture
from worker_proc.native import kernels
from worker_proc.native.build import build, compiler
from worker_proc.startup import calibrate, checks, prepare, required_kernels
from worker_proc.startup.load_runner import load_model_runner

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")

PROOFS = (
    ("probe_model", inspection),
    *(("activation_of", module) for module in (fusing, mlp, mixture)),
    ("_calibrate", calibrate),
)
CONFIGS = {architecture.name: architecture.config for architecture in ARCHITECTURES}
PROMPTS = [[5, 6, 7, 8, 9], [9, 9, 9]]

Start = Callable[[EngineConfig], ModelRunner]


@pytest.fixture
def tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count what is tried, with a cache directory that has only the kernels."""
    library = kernels.NativeLibrary(build())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(prepare, "load_library", lambda: library)
    monkeypatch.setattr(checks, "start_building", lambda: None)
    monkeypatch.setattr(required_kernels, "load_library", lambda: library)
    monkeypatch.setattr(required_kernels, "build", lambda: library.path)
    count: Counter[str] = Counter()

    def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("number") is None:
                count[name] += 1
            return function(*args, **kwargs)

        return call

    for name, module in PROOFS:
        monkeypatch.setattr(module, name, counting(name, getattr(module, name)))
    return count


def start(config: EngineConfig) -> ModelRunner:
    return load_model_runner(config, lambda *_: None, keeps_proofs=True)


def quantized(config: EngineConfig, quantization: Quantization | None) -> EngineConfig:
    model = msgspec.structs.replace(config.model, quantization=quantization)
    return msgspec.structs.replace(config, model=model)


@pytest.mark.parametrize(
    ("name", "quantization"),
    [("llama", None), ("gemma2", None), *(("llama", q) for q in Quantization)],
)
def test_a_second_start_proves_nothing_and_computes_the_same(
    name: str, quantization: Quantization | None, tmp_path: Path, tried: Counter[str]
) -> None:
    build_checkpoint(tmp_path / "model", CONFIGS[name]())
    dtype = "float32" if quantization is None else "bfloat16"
    config = quantized(engine_config(tmp_path / "model", dtype), quantization)
    first = start(config)
    assert set(tried) == set(dict(PROOFS))
    tried.clear()
    second = start(config)
    assert not tried
    assert second.facts == first.facts
    assert second.facts.decoder == "native"
    params = SamplingParams(max_tokens=12)
    expected = drive(first, PROMPTS, params).output_token_ids
    assert drive(second, PROMPTS, params).output_token_ids == expected


def test_a_second_start_needs_no_types_of_layers_that_the_models_code_registers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It inspects the model before it imports this code."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = DEEPSEEK_V4.config()
    config.save_pretrained(tmp_path)
    proofs = StartCache("proofs", [b"of a test"])
    inspect = partial(
        inspection.inspect_config, str(tmp_path), "float32", torch.device("cpu"), proofs
    )
    first = inspect()
    own = {*config.layer_types} - {"sliding_attention"}
    assert own
    for layer_type in own:
        monkeypatch.delitem(DYNAMIC_LAYER_TYPE_MAPPING, layer_type)
    second = inspect()
    assert (second.probed, second.model_len) == (first.probed, first.model_len)


@pytest.mark.parametrize("quantization", Quantization)
def test_a_quantization_is_proven_by_itself(
    quantization: Quantization, tmp_path: Path, tried: Counter[str]
) -> None:
    build_checkpoint(tmp_path / "model", CONFIGS["llama"]())
    config = engine_config(tmp_path / "model", "bfloat16")
    for other in (None, *Quantization):
        if other is not quantization:
            start(quantized(config, other))
    tried.clear()
    start(quantized(config, quantization))
    assert set(tried) == set(dict(PROOFS))


def test_the_type_of_the_cache_is_proven_by_itself(tmp_path: Path, tried: Counter[str]) -> None:
    build_checkpoint(tmp_path / "model", CONFIGS["llama"]())
    config = engine_config(tmp_path / "model", "bfloat16")
    start(config)
    for kv_cache_dtype in (KVCacheDtype.INT8, KVCacheDtype.FP8):
        tried.clear()
        cache = msgspec.structs.replace(config.cache, kv_cache_dtype=kv_cache_dtype)
        coded = msgspec.structs.replace(config, cache=cache)
        first = start(coded)
        assert tried["_calibrate"] == 1
        tried.clear()
        assert start(coded).facts == first.facts
        assert not tried


def change_weights(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace one bit, and set the time of the last change back."""
    path = directory / "model.safetensors"
    stat = path.stat()
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def change_environment(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DNNL_MAX_CPU_ISA", "AVX2")


def change_version(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.0.0")


@pytest.mark.parametrize("change", [change_weights, change_environment, change_version])
def test_a_change_has_everything_proven_again(
    change: Callable[[Path, pytest.MonkeyPatch], None],
    tmp_path: Path,
    tried: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    build_checkpoint(tmp_path / "model", CONFIGS["llama"]())
    config = engine_config(tmp_path / "model", "float32")
    start(config)
    tried.clear()
    change(tmp_path / "model", monkeypatch)
    start(config)
    assert set(tried) == set(dict(PROOFS))


def test_other_kernels_settings_and_threads_are_proven_by_themselves(
    tmp_path: Path, tried: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    build_checkpoint(tmp_path / "model", CONFIGS["llama"]())
    config = engine_config(tmp_path / "model", "float32")
    start(config)
    tried.clear()
    cache = msgspec.structs.replace(config.cache, block_size=8)
    start(msgspec.structs.replace(config, cache=cache))
    assert set(tried) == set(dict(PROOFS))
    tried.clear()
    found = {"num_gpu_blocks_override": 99, "num_state_blocks_override": 9}
    cache = msgspec.structs.replace(config.cache, **found)
    start(msgspec.structs.replace(config, cache=cache))
    assert not tried  # a successor has the numbers of blocks that its predecessor found
    parallel = ParallelConfig(core_listen="127.0.0.1:7000", data_parallel_size=2)
    start(msgspec.structs.replace(config, parallel=parallel))
    assert not tried  # an engine on another machine or port computes the same
    monkeypatch.setattr(prepare, "load_library", lambda: None)
    start(config)
    assert set(tried) == {"_calibrate"}


def test_a_change_of_a_shard_in_a_subdirectory_has_another_key(tmp_path: Path) -> None:
    shard = tmp_path / "a" / "b" / "1.safetensors"
    shard.parent.mkdir(parents=True)
    shard.write_bytes(b"a")
    index = {"weight_map": {"weight": "a/b/1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    config = engine_config(tmp_path, "float32")
    before = Proofs(config, 0)._key
    shard.write_bytes(b"ab")
    assert Proofs(config, 0)._key != before


def test_the_division_and_each_rank_are_proven_by_themselves(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    config = engine_config(tmp_path / "model", "float32")
    keys = set()
    for sizes in ((1, 1), (2, 1), (1, 2), (64, 64)):
        parallel = ParallelConfig(tensor_parallel_size=sizes[0], pipeline_parallel_size=sizes[1])
        divided = msgspec.structs.replace(config, parallel=parallel)
        keys |= {tuple(Proofs(divided, rank)._key) for rank in (0, 1, parallel.num_ranks - 1)}
    assert len(keys) == 2 + 2 + 2 + 3

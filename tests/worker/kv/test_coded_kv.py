"""A KV cache of codes: what they stand for, and models that are served with it.

tests/worker/attention/test_native_attention.py compares the kernels with attention over such rows.
"""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import LlamaConfig

from protocol.config import ConfigError, EngineConfig, KVCacheDtype
from protocol.config.settings import configure
from protocol.sampling import SamplingParams
from tests.worker.attention.texts import SPECS, Texts, native_backend
from tests.worker.bitwise import NUM_THREADS, compare, engine_config, native
from tests.worker.checkpoints import SHAPE, build_checkpoint
from tests.worker.driving import drive
from tests.worker.odd_models import CONFIGS
from tests.worker.parity import make_prompts
from tests.worker.runners import make_runners
from tests.worker.test_output_equality import EAGER, PLAIN, SWAP_SPACE_BYTES
from worker_proc.attention.native import NativeBackend
from worker_proc.errors import UnsupportedModel
from worker_proc.kv.kv_format import KVFormat, round_rows
from worker_proc.kv.kv_groups import LayerSpec
from worker_proc.kv.kv_tensors import bytes_per_block
from worker_proc.model_runner import ModelRunner
from worker_proc.native.build import build, compiler
from worker_proc.startup import prepare, required_kernels
from worker_proc.startup.load_runner import load_model_runner

pytestmark = [
    pytest.mark.skipif(compiler() is None, reason="no C++ compiler"),
    pytest.mark.usefixtures("two_threads"),
]

CODES = (KVFormat.INT8, KVFormat.FP8)
SAMPLED = {"max_tokens": 12, "temperature": 0.9, "ignore_eos": True}


def coded(config: EngineConfig, dtype: str, **cache: int) -> EngineConfig:
    cached = msgspec.structs.replace(config.cache, kv_cache_dtype=KVCacheDtype(dtype), **cache)
    return msgspec.structs.replace(config, cache=cached)


def load(directory: Path, kv: str, dtype: str = "bfloat16", threads: int = 2) -> ModelRunner:
    build()
    return load_model_runner(coded(engine_config(directory, dtype, threads), kv), lambda *_: None)


def values_of_one_token(rows: torch.Tensor, dtype: torch.dtype, format: KVFormat) -> torch.Tensor:
    """Return what the kernels read of values `[tokens, dim]`: the output of a text of one token."""
    num_tokens, dim = rows.shape
    spec = LayerSpec(1, 1, 32, dim, None)
    texts = Texts(spec, 16, dtype, [1] * num_tokens, format=format)
    for row, own in zip(rows, texts.rows, strict=True):
        own[2] = row.view(1, 1, dim)
    layer = texts.layer(native_backend(16, dtype, specs=[spec], format=format))
    return torch.cat(texts.attend(layer, [(i, 0, 1) for i in range(num_tokens)]))[:, 0]


def sample_rows() -> torch.Tensor:
    """Return rows of all sizes, of zeros, of the least and of the greatest numbers."""
    generator = torch.Generator().manual_seed(7)
    rows = torch.randn(40, 96, generator=generator) * torch.logspace(-20, 20, 40).unsqueeze(1)
    rows[3] = 0.0
    rows[4] = 1e-38
    rows[5, ::2] = 3e38
    rows[6, 7] *= 1000
    rows[7] = torch.linspace(-448, 448, 96)
    rows[8, :64] = torch.arange(64) * 2**-10  # about e4m3's least normal number
    rows[8, 64:] = 448.0
    return rows


@pytest.mark.parametrize("format", CODES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_codes_stand_for_the_nearest_multiples_of_a_scale(
    dtype: torch.dtype, format: KVFormat
) -> None:
    rows = sample_rows().to(dtype)
    found, expected = values_of_one_token(rows, dtype, format), round_rows(rows, format)
    if dtype == torch.float32:
        assert torch.equal(found, expected)
    else:  # the scale is rounded to bfloat16, and so is the result
        error = (found.float() - expected.float()).abs()
        assert bool((error <= 2**-7 * expected.float().abs()).all())
    values = rows.float()
    greatest = values.abs().amax(1, keepdim=True)
    half_step = greatest / 254 if format is KVFormat.INT8 else values.abs() / 16 + greatest / 2**18
    error = (round_rows(values, format) - values).abs()
    assert bool((error <= 1.001 * half_step + 1e-30).all())


@pytest.mark.parametrize("format", CODES, ids=str)
def test_a_row_that_is_not_finite_is_not_a_number(format: KVFormat) -> None:
    rows = torch.ones(3, 64)
    rows[0, 5], rows[1, 6] = torch.nan, -torch.inf
    for found in (values_of_one_token(rows, torch.float32, format), round_rows(rows, format)):
        assert found[:2].isnan().all()
        assert torch.equal(found[2], rows[2])


@pytest.mark.parametrize("format", CODES, ids=str)
def test_a_block_takes_a_byte_for_each_value_and_four_for_each_scale(format: KVFormat) -> None:
    for spec in SPECS:
        backend = native_backend(16, torch.bfloat16, specs=[spec], format=format)
        shapes = backend.pool_shapes(spec, 10)
        num_bytes = sum(torch.Size(shape).numel() for shape in shapes)
        assert num_bytes == 10 * bytes_per_block([spec], 16, torch.bfloat16, format)
        dims = spec.head_dim + spec.value_head_dim
        assert num_bytes == 10 * 16 * spec.num_kv_heads * (dims + 2 * 4)


@pytest.mark.parametrize(
    ("name", "dtype", "kv"),
    [
        ("llama", "float32", "int8"),
        ("granite", "bfloat16", "int8"),
        ("phi3", "bfloat16", "fp8"),
        ("gemma3", "bfloat16", "fp8"),
    ],
)
def test_logits_are_the_same_bits_in_every_schedule(
    name: str, dtype: str, kv: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_checkpoint(tmp_path, CONFIGS[name])

    def checked(runner: ModelRunner) -> ModelRunner:
        assert runner.facts.kv_cache_dtype == kv
        return native(runner)

    configs = [coded(engine_config(tmp_path, dtype, threads), kv) for threads in NUM_THREADS]
    compare(map(checked, make_runners(configs)), monkeypatch)


@pytest.mark.parametrize("kv", ["int8", "fp8_e4m3"])
def test_tokens_are_equal_however_they_are_scheduled(kv: str, tmp_path: Path) -> None:
    """They are recomputed, swapped, or computed after cached prefixes."""
    build_checkpoint(tmp_path, CONFIGS["granite"])
    prompts = [[token % 500 for token in prompt] for prompt in make_prompts()]
    params = [SamplingParams(seed=seed, **SAMPLED) for seed in range(len(prompts))]
    config = coded(engine_config(tmp_path, "bfloat16"), kv)
    roomy = load_model_runner(config, lambda *_: None)
    expected = drive(roomy, prompts, params, **PLAIN, max_num_seqs=1).output_token_ids
    cached = drive(roomy, prompts, params, max_num_seqs=4)
    assert cached.num_cached_tokens > 0
    few = coded(config, kv, num_gpu_blocks_override=20, swap_space_bytes=SWAP_SPACE_BYTES)
    tight = load_model_runner(few, lambda *_: None)
    swapped = drive(tight, prompts, params, **PLAIN, **EAGER, swap_cost_tokens=0.0)
    recomputed = drive(tight, prompts, params, **PLAIN, **EAGER, num_host_blocks=0)
    assert swapped.num_swaps > 0
    assert recomputed.num_preemptions > 0
    for run in (cached, swapped, recomputed):
        assert run.output_token_ids == expected


def test_rounding_changes_the_logits(tmp_path: Path) -> None:
    """Without this, equal bits would prove nothing."""
    build_checkpoint(tmp_path, CONFIGS["granite"])
    prompts = [[token % 500 for token in prompt] for prompt in make_prompts()]
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    outputs = {
        str(drive(load(tmp_path, kv), prompts, params).output_token_ids)
        for kv in ("auto", "int8", "fp8")
    }
    assert len(outputs) == 3


@pytest.mark.parametrize("kv", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kernels_that_compute_something_else_are_refused(
    dtype: str, kv: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model's own check runs with a cache in its type, and would pass."""
    build_checkpoint(tmp_path, CONFIGS["granite"])
    attend = NativeBackend.attend

    def attend_wrongly(self: NativeBackend, *args: Any) -> torch.Tensor:
        out = attend(self, *args)
        return out if self._format is KVFormat.PLAIN else out * 1.5

    monkeypatch.setattr(NativeBackend, "attend", attend_wrongly)
    with pytest.raises(UnsupportedModel, match=f"kv_cache_dtype {kv} differ"):
        load(tmp_path, kv, dtype)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"model": "null"}, "kv_cache_dtype needs a model"),
        ({"device": "cuda"}, "kv_cache_dtype needs device cpu"),
        ({"dtype": "float16"}, "kv_cache_dtype needs dtype float32 or bfloat16"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype: 'fp8_e5m2' is not one of auto, int8"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    settings: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        configure(**{"kv_cache_dtype": "int8", **settings})


def test_heads_without_a_kernel_are_refused(tmp_path: Path) -> None:
    build_checkpoint(tmp_path, LlamaConfig(**SHAPE | {"head_dim": 516}))
    with pytest.raises(UnsupportedModel, match=r"int8 needs the native attention .* in bfloat16"):
        load(tmp_path, "int8")


def test_a_machine_without_kernels_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_checkpoint(tmp_path, LlamaConfig(**SHAPE))

    def no_compiler() -> Path:
        raise RuntimeError("no C++ compiler: neither $CXX nor g++ is in PATH")

    monkeypatch.setattr(required_kernels, "build", no_compiler)
    monkeypatch.setattr(required_kernels, "load_library", lambda: None)
    config = coded(engine_config(tmp_path, "bfloat16"), "fp8")
    with pytest.raises(
        UnsupportedModel, match=r"kv_cache_dtype fp8 needs the native kernels: no C"
    ):
        load_model_runner(config, lambda *_: None)


def test_a_device_that_is_found_to_be_cuda_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "resolve_device", lambda _: torch.device("cuda"))
    with pytest.raises(UnsupportedModel, match="kv_cache_dtype int8 needs device cpu"):
        load(Path("/nowhere"), "int8")

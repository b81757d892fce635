"""Multi-head latent attention: what is cached, which modules it replaces, and what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DeepseekV2Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from protocol.config import KVCacheDtype
from tests.combinations import in_turn
from tests.families.configs import small_config
from tests.worker.checkpoints import (
    ARCHITECTURES,
    LATENT_NAMES,
    SHAPE,
    build_checkpoint,
    load_model,
)
from tests.worker.parity import ROOMY, make_runner
from tests.worker.recurrent_models import KEY_DECAYS
from worker_proc.attention.latent_attention import LatentAttention
from worker_proc.attention.latent_products import Angles, LatentShape, NativeProducts, TorchProducts
from worker_proc.errors import UnsupportedModel
from worker_proc.kv.kv_tensors import bytes_per_block
from worker_proc.loading.loaded_model import LoadedModel
from worker_proc.modules import latent
from worker_proc.modules.latent import install_latent
from worker_proc.native.build import build, compiler
from worker_proc.native.kernels import NativeLibrary, load_library
from worker_proc.native.structures import Rotation

pytestmark = pytest.mark.usefixtures("two_threads")

LATENT = [a for a in ARCHITECTURES if a.name in LATENT_NAMES - {"glm4_moe_lite"}]
V2_LITE = LatentShape(num_heads=16, nope_dim=128, rope_dim=64, value_dim=128, rank=512)
ODD = LatentShape(num_heads=3, nope_dim=20, rope_dim=6, value_dim=13, rank=18)
ROTATIONS = {
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "bailing_hybrid"), Rotation.PAIRS),
    "kimi_linear": Rotation.NONE,
}


def load(directory: Path) -> LoadedModel:
    return load_model(directory, "float32")


@pytest.fixture
def deepseek(tmp_path: Path) -> Path:
    build_checkpoint(tmp_path, next(a for a in LATENT if a.name == "deepseek_v3").config())
    return tmp_path


@pytest.mark.parametrize(
    ("architecture", "has_kernels"),
    in_turn([*LATENT, *KEY_DECAYS], [True, False]),
    ids=lambda value: getattr(value, "name", value),
)
def test_modules_are_replaced_with_their_rotation(
    architecture: Any, has_kernels: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an earlier start has proven is not tried again."""
    if has_kernels and compiler() is None:
        pytest.skip("no C++ compiler")
    library = NativeLibrary(build()) if has_kernels else None
    build_checkpoint(tmp_path, architecture.config())
    loaded, proven = install_latent(load(tmp_path), library)
    rotation = ROTATIONS.get(architecture.name, Rotation.HALVES)
    assert set(proven.values()) == {rotation}
    assert set(proven) == {layer.module_name for layer in loaded.layers}
    for layer in loaded.layers:
        assert layer.spec.is_latent
        assert isinstance(loaded.model.get_submodule(layer.module_name), LatentAttention)
    assert not any("kv_b_proj" in name for name, _ in loaded.model.named_parameters())
    monkeypatch.setattr(latent, "_prove", None)
    again, _ = install_latent(load(tmp_path), library, proven)
    assert again.layers == loaded.layers
    unproven, nothing = install_latent(load(tmp_path), library, {})
    assert not nothing
    assert not any(layer.spec.is_latent for layer in unproven.layers)


def _scaled(module: Any, name: str, factor: float) -> Callable[..., Any]:
    """Return a method whose result's first part is greater than the module's by a factor."""
    method = getattr(module, name)

    def scaled(*args: Any, **kwargs: Any) -> Any:
        first, *rest = method(*args, **kwargs)
        return (first * factor, *rest)

    return scaled


@pytest.mark.parametrize("part", ["forward", "expand_kv"])
def test_modules_that_compute_something_else_stay(part: str, deepseek: Path) -> None:
    """If only one of them does, all stay: layers share the shape of their cache."""
    loaded = load(deepseek)
    module = loaded.model.get_submodule(loaded.layers[1].module_name)
    module.__dict__[part] = _scaled(module, part, 1.01)
    same, proven = install_latent(loaded, None)
    assert same is loaded
    assert not proven
    assert isinstance(module, DeepseekV3Attention)


@pytest.mark.parametrize("name", ["deepseek_v3", "kimi_linear"])
def test_modules_that_depend_on_more_than_rows_and_angles_stay(name: str, tmp_path: Path) -> None:
    """What is added from some position on shows at the last positions, with angles and without."""
    architectures = (*LATENT, *KEY_DECAYS)
    build_checkpoint(tmp_path, next(a for a in architectures if a.name == name).config())
    loaded = load(tmp_path)
    module = loaded.model.get_submodule(loaded.layers[0].module_name)
    forward = module.forward

    def far(hidden_states: torch.Tensor, position_ids: torch.Tensor, **kwargs: Any) -> Any:
        return forward(hidden_states + (position_ids[0, :, None] > 100), **kwargs)

    module.__dict__["forward"] = far
    same, _ = install_latent(loaded, None)
    assert same is loaded


def test_heads_that_transformers_cannot_compute_are_refused(tmp_path: Path) -> None:
    """MiniCPM3 repeats keys by `num_key_value_heads`, but projects as many as queries."""
    config = next(a for a in LATENT if a.name == "minicpm3").config()
    config.num_key_value_heads = 1
    build_checkpoint(tmp_path, config)
    loaded = load(tmp_path)
    name = r"minicpm3: model\.layers\.0\.self_attn"
    with pytest.raises(UnsupportedModel, match=f"^{name} fails in transformers \\(RuntimeError: "):
        install_latent(loaded, None)


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
def test_modules_with_an_indexer_are_replaced_in_bfloat16(tmp_path: Path) -> None:
    """The float32 copy that is tried has an indexer of its own."""
    build()
    build_checkpoint(tmp_path, small_config("deepseek_v32"))
    runner = make_runner(tmp_path, ROOMY, dtype="bfloat16")
    assert all(tensors.keys is tensors.values for tensors in runner._pool.tensors)
    assert runner.facts.exact_resume, runner.facts.exact_resume_reason


def test_attention_without_latent_rows_stays(tmp_path: Path) -> None:
    build_checkpoint(tmp_path, ARCHITECTURES[0].config())
    loaded = load(tmp_path)
    assert install_latent(loaded, None) == (loaded, {})


def test_the_cache_holds_a_ninth_for_the_shape_of_v2_lite(tmp_path: Path) -> None:
    """A token and layer take 576 numbers, instead of 16 heads of 192 and 128."""
    sizes = {"num_hidden_layers": 3, "num_attention_heads": 16, "num_key_value_heads": 16}
    config = DeepseekV2Config(
        **{name: value for name, value in (SHAPE | sizes).items() if name != "head_dim"},
        q_lora_rank=None,
        kv_lora_rank=V2_LITE.rank,
        qk_rope_head_dim=V2_LITE.rope_dim,
        qk_nope_head_dim=V2_LITE.nope_dim,
        v_head_dim=V2_LITE.value_dim,
        first_k_dense_replace=3,
    )
    build_checkpoint(tmp_path, config)
    runner = make_runner(tmp_path, ROOMY)
    per_token = 3 * V2_LITE.row_dim * 4
    for tensors in runner._pool.tensors:
        assert tensors.keys is tensors.values
    pools = [tensors.keys for tensors in runner._pool.tensors]
    assert sum(pool[0].nbytes for pool in pools) == runner.facts.block_size * per_token
    specs = [layer.spec for layer in load(tmp_path).layers]
    before = bytes_per_block(specs, 1, torch.float32)
    assert before == 3 * 5120 * 4
    assert before >= 8 * per_token


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize(
    ("rotation", "shape", "dtype"),
    in_turn(
        [Rotation.HALVES, Rotation.PAIRS, Rotation.NONE],
        [V2_LITE, ODD],
        [torch.float32, torch.bfloat16],
    ),
    ids=str,
)
@torch.inference_mode()
def test_products_of_heads_equal_plain_ones_with_the_same_bits_for_any_rows(
    shape: LatentShape, dtype: torch.dtype, rotation: Rotation, kernels: NativeLibrary
) -> None:
    generator = torch.Generator().manual_seed(2)

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator).to(dtype)

    outputs = shape.num_heads * (shape.nope_dim + shape.value_dim)
    weight = normal(outputs, shape.rank) * shape.rank**-0.5
    plain = TorchProducts(shape, rotation, weight)
    native = NativeProducts(kernels, shape, rotation, weight)
    query, row = normal(200, shape.num_heads, shape.head_dim), normal(200, shape.row_dim)
    attended = normal(200, shape.num_heads, shape.rank)
    turns = torch.rand(200, shape.rope_dim // 2, generator=generator) * 7
    angles = Angles(*(part.repeat(1, 2).to(dtype) for part in (turns.cos(), turns.sin())))
    tolerance = 1e-4 if dtype == torch.float32 else 5e-2

    def compute(products: Any, first: int, end: int) -> list[torch.Tensor]:
        part = slice(first, end)
        rotated = row[part].clone()
        own = Angles(*(each[part].contiguous() for each in angles))
        queries = products.queries(query[part].clone(), rotated, own)
        return [queries, rotated, products.values(attended[part])]

    together = compute(native, 0, 200)
    for want, got in zip(compute(plain, 0, 200), together, strict=True):
        torch.testing.assert_close(want, got, rtol=tolerance, atol=tolerance)
    for first, end in ((0, 1), (17, 19), (90, 200), (5, 45)):
        for whole, got in zip(together, compute(native, first, end), strict=True):
            assert torch.equal(whole[first:end], got)


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
@torch.inference_mode()
def test_a_row_that_is_not_a_number_reaches_no_other(kernels: NativeLibrary) -> None:
    products = NativeProducts(kernels, ODD, Rotation.NONE, torch.randn(3 * 33, ODD.rank))
    query, row = torch.randn(4, 3, ODD.head_dim), torch.randn(4, ODD.row_dim)
    expected = products.queries(query.clone(), row, None)
    query[2] = torch.nan
    found = products.queries(query.clone(), row, None)
    others = [0, 1, 3]
    assert torch.equal(found[others], expected[others])
    assert found[2].isnan().all()


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize("kv_cache_dtype", [KVCacheDtype.INT8, KVCacheDtype.FP8])
def test_a_cache_of_codes_is_refused_for_latent_rows(
    kv_cache_dtype: KVCacheDtype, deepseek: Path
) -> None:
    build()
    reason = f"kv_cache_dtype {kv_cache_dtype}: deepseek_v3 has multi-head latent attention"
    with pytest.raises(UnsupportedModel, match=reason):
        make_runner(deepseek, ROOMY, kv_cache_dtype=kv_cache_dtype)


class _Gated(torch.nn.Module):
    """Returns rows times a gate that is closed for large ones."""

    def __init__(self) -> None:
        super().__init__()
        self.kv_a_proj_with_mqa = torch.nn.Linear(4, 4)

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, None]:
        return rows * (rows.norm(dim=-1, keepdim=True) < 10.0), None


def test_rows_that_a_gate_closes_are_equal() -> None:
    assert latent._error(_Gated(), _Gated(), {}) == 0.0


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
def test_heads_that_the_kernel_does_not_cover_keep_their_keys_and_values(
    deepseek: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build()
    monkeypatch.setattr("worker_proc.attention.native.MAX_LATENT_DIM", 16)
    loaded = load(deepseek)
    assert install_latent(loaded, load_library()) == (loaded, {})
    replaced, _ = install_latent(loaded, None)
    assert replaced is not loaded

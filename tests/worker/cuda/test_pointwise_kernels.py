"""Norms, rotations and activations round and compute as transformers' modules do."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.glm4.modeling_glm4 import apply_rotary_pos_emb as rotate_pairs
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as rotate_halves

from tests.worker.cuda.attention_steps import Step, ints, written_slots
from tests.worker.cuda.interpreter import DEVICE, prepare_triton
from worker_proc.kv.kv_groups import LayerSpec
from worker_proc.modules.pointwise import FusedRMSNorm, activation_of, fused_norm
from worker_proc.native.structures import Activation, Rotation

prepare_triton()
from worker_proc.cuda.pointwise import (  # noqa: E402
    TritonLibrary,
    activate_and_multiply,
    add_and_norm,
    add_up,
    rotate_and_store,
)

EPSILON = 1e-5
LIBRARY = TritonLibrary()
DTYPES = (torch.float32, torch.bfloat16)
MAX_ERROR = {torch.float32: 1e-5, torch.bfloat16: 0.02}


def rows_of(num_rows: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_rows + size)
    return torch.randn(num_rows, size, generator=generator).to(DEVICE, dtype)


def norm_of(size: int, dtype: torch.dtype, *, seed: int = 0) -> LlamaRMSNorm:
    norm = LlamaRMSNorm(size, EPSILON)
    norm.weight.data = 1.0 + rows_of(1, size + seed, torch.float32)[0, :size] * 0.2
    return norm.to(DEVICE, dtype)


def fused(norm: nn.Module, dtype: torch.dtype) -> FusedRMSNorm:
    found = fused_norm(norm, LIBRARY, dtype)
    assert found is not None
    return found[1]


@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_norms_are_proven(dtype: torch.dtype) -> None:
    gemma = Gemma3RMSNorm(20, EPSILON).to(DEVICE, dtype)
    gemma.weight.data += 0.5
    if dtype == torch.bfloat16:  # in float32 both ways give the same values
        assert fused(norm_of(20, dtype), dtype).round_first
    assert torch.allclose(fused(gemma, dtype).factors, torch.full((20,), 1.5, device=DEVICE))
    assert fused_norm(nn.LayerNorm(20, bias=False).to(DEVICE, dtype), LIBRARY, dtype) is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_norm_of_added", [False, True])
@torch.inference_mode()
def test_residual_and_norms_in_one_pass(dtype: torch.dtype, has_norm_of_added: bool) -> None:
    size, factor = 40, 0.22
    after, before = norm_of(size, dtype), norm_of(size, dtype, seed=1)
    hidden, added = rows_of(3, size, dtype), rows_of(4, size, dtype)[:3]
    expected_sum = hidden + (after(added) if has_norm_of_added else added) * factor
    found = add_and_norm(
        hidden,
        added,
        fused(after, dtype) if has_norm_of_added else None,
        factor,
        fused(before, dtype),
    )
    torch.testing.assert_close(hidden, expected_sum, atol=MAX_ERROR[dtype], rtol=0.01)
    torch.testing.assert_close(found, before(expected_sum), atol=MAX_ERROR[dtype], rtol=0.01)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gates_are_opened_and_multiplied(dtype: torch.dtype) -> None:
    gate_up = rows_of(3, 2 * 30, dtype)
    gates, factors = gate_up.chunk(2, dim=1)
    for activation, function in (
        (Activation.SILU, F.silu),
        (Activation.GELU_TANH, lambda x: F.gelu(x, approximate="tanh")),
        (Activation.GELU, F.gelu),
        (Activation.RELU_SQUARED, lambda x: F.relu(x) ** 2),
    ):
        found = activate_and_multiply(gate_up, activation)
        error = MAX_ERROR[dtype]
        torch.testing.assert_close(found, function(gates) * factors, atol=error, rtol=0.01)
        assert activation_of(function, LIBRARY, DEVICE) is activation
    assert activation_of(F.relu, LIBRARY, DEVICE) is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rotation", "num_rotated", "head_norm"),
    [
        (Rotation.HALVES, 16, "each"),
        (Rotation.PAIRS, 8, ""),
        (Rotation.NONE, 16, "all"),
    ],
)
@torch.inference_mode()
def test_queries_are_returned_and_keys_and_values_are_stored(
    rotation: Rotation, num_rotated: int, head_norm: str, dtype: torch.dtype
) -> None:
    spec = LayerSpec(4, 2, 16, 12, None)
    parts = ((6, 1), (3, 2))
    step = Step.make(spec, dtype, parts, 1)
    sizes = [4 * 16, 2 * 16, 2 * 12]
    qkv = rows_of(3, sum(sizes), dtype)
    angles = rows_of(1, 3 * num_rotated // 2, torch.float32).view(3, -1)
    angles = torch.cat([angles, angles], dim=1)
    cosines, sines = angles.cos().to(dtype), angles.sin().to(dtype)
    query, key, value = qkv.split(sizes, dim=1)
    norms = None
    if head_norm:
        lengths = (16, 16) if head_norm == "each" else (64, 32)
        modules = [norm_of(size, dtype, seed=i) for i, size in enumerate(lengths)]
        norms = (fused(modules[0], dtype), fused(modules[1], dtype))
        query, key = (
            norm(x.unflatten(1, (-1, len(norm.weight)))).flatten(1)
            for norm, x in zip(modules, (query, key), strict=True)
        )
    query, key, value = (
        x.unflatten(1, (-1, dim)) for x, dim in ((query, 16), (key, 16), (value, 12))
    )
    if rotation is not Rotation.NONE:
        rotate = rotate_halves if rotation is Rotation.HALVES else rotate_pairs
        turned = rotate(
            *(x.transpose(0, 1).unsqueeze(0) for x in (query, key)), cosines[None], sines[None]
        )
        query, key = (x[0].transpose(0, 1) for x in turned)
    found = rotate_and_store(step.place, qkv, norms, (cosines, sines), rotation=rotation, spec=spec)
    options = {"atol": MAX_ERROR[dtype], "rtol": 0.01}
    torch.testing.assert_close(found, query, **options)
    row = 0
    for index, (start, size) in enumerate(parts):
        for position in range(start, start + size):
            block, slot = step.slot_of(index, position)
            torch.testing.assert_close(step.place.kv.keys[block, slot], key[row], **options)
            torch.testing.assert_close(
                step.place.kv.values[block, slot], value[row], atol=0.0, rtol=0.0
            )
            row += 1


def test_keys_that_are_cached_already_go_to_the_null_block() -> None:
    spec = LayerSpec(1, 1, 16, 16, None)
    step = Step.make(spec, torch.float32, ((5, 1), (2, 3)), 1)
    kept = step.place._replace(step=step.place.step._replace(kept_from=ints([6, 4])))
    before = step.place.kv.keys.clone()
    angles = torch.ones(4, 16, device=DEVICE), torch.zeros(4, 16, device=DEVICE)
    qkv = rows_of(4, 3 * 16, torch.float32)
    rotate_and_store(kept, qkv, None, angles, rotation=Rotation.HALVES, spec=spec)
    assert written_slots(step, before) == {(0, 0), step.slot_of(1, 4)}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [1, 7])
def test_ranks_are_added_up_in_float32_in_their_order(num_rows: int, dtype: torch.dtype) -> None:
    """The sum of three such values depends on its order, and is longer than a tile."""
    gathered = (rows_of(3 * num_rows, 513, dtype) * 1e3).view(3, num_rows, 513)
    out = torch.empty_like(gathered[0])
    add_up(gathered, out)
    first, second, third = gathered.float()
    assert torch.equal(out, ((first + second) + third).to(dtype))
    if dtype is torch.float32:
        assert not torch.equal(out, first + (second + third))

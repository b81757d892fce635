"""Packed linears compute what plain ones do, with the same bits for a row in every batch."""

import random

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from tests.combinations import in_turn
from worker_proc.modules.packed_linear import (
    WIDE_OUT_FEATURES,
    can_pack,
    make_linear,
    pack_linears,
)
from worker_proc.native.kernels import load_library

pytestmark = pytest.mark.usefixtures("two_threads")

CPU = torch.device("cpu")
MAX_ROWS = 130
LIBRARY = load_library()
DTYPES = [d for d in (torch.float32, torch.bfloat16) if can_pack(d, CPU, LIBRARY)]


@pytest.mark.parametrize(
    ("shape", "dtype", "bias"),
    in_turn([(64, 96), (70, 45), (576, 1536), (32, WIDE_OUT_FEATURES + 8)], DTYPES, [True, False]),
    ids=str,
)
@torch.inference_mode()
def test_a_packed_layer_equals_the_plain_one(
    dtype: torch.dtype, bias: bool, shape: tuple[int, int]
) -> None:
    torch.manual_seed(1)
    linear = nn.Linear(*shape, bias=bias).to(dtype)
    packed = make_linear(linear.weight, linear.bias, LIBRARY)
    for leading in ((0,), (1,), (2,), (1, 33), (3, 11), (65,)):
        hidden = torch.randn(*leading, shape[0]).to(dtype)
        want, got = linear(hidden), packed(hidden)
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(want, got, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    in_turn([(96, 160), (1536, 576), (64, WIDE_OUT_FEATURES)], DTYPES),
    ids=str,
)
@torch.inference_mode()
def test_a_row_has_the_same_bits_in_every_batch(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    torch.manual_seed(2)
    rng = random.Random(2)
    packed = make_linear(torch.randn(shape[1], shape[0], dtype=dtype), None, LIBRARY)
    rows = torch.randn(MAX_ROWS, shape[0], dtype=dtype)
    alone = packed(rows[:1])[0]
    for num_rows in (2, 3, 4, 5, 6, 7, 8, 15, 16, 17, 32, 33, 34, 64, 65, 97, MAX_ROWS):
        others = rng.sample(range(1, MAX_ROWS), num_rows - 1)
        place = rng.randrange(num_rows)
        others.insert(place, 0)
        assert torch.equal(alone, packed(rows[others])[place]), num_rows


@pytest.mark.parametrize(
    ("shape", "dtype"),
    in_turn([(704, 256), (1536, 576), (896, 4864), (1024, 1024)], DTYPES),
    ids=str,
)
@torch.inference_mode()
def test_every_row_is_summed_in_the_same_order(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """The two halves of each sum nearly cancel, so another order shows in almost every output."""
    torch.manual_seed(3)
    num_inputs, num_outputs = shape
    half = torch.randn(num_outputs, num_inputs // 2)
    packed = make_linear(torch.cat([half, half], 1).to(dtype), None, LIBRARY)
    left = torch.randn(600, num_inputs // 2).to(dtype).float()
    right = left * (2**-6 * torch.randn(left.shape) - 1)
    rows = torch.cat([left, right], 1).to(dtype)
    expected = torch.cat([packed(rows[i : i + 2]) for i in range(0, len(rows), 2)])
    for num_rows in (3, 17, 31, 32, 33, 48, 64, 65, 128, 255, 257, len(rows)):
        assert torch.equal(packed(rows[:num_rows]), expected[:num_rows]), num_rows


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@torch.inference_mode()
def test_rows_may_have_any_stride(dtype: torch.dtype) -> None:
    """They may be an odd number of values apart."""
    wide = torch.randn(4, 65, dtype=dtype)
    packed = make_linear(torch.randn(32, 64, dtype=dtype), None, LIBRARY)
    for rows in (wide[:, :64], wide[:, 1:], wide[::2, :64], wide[:, :64].t().contiguous().t()):
        assert torch.equal(packed(rows), packed(rows.contiguous()))


@torch.inference_mode()
def test_every_linear_of_a_model_is_replaced_and_tied_weights_stay() -> None:
    embedding = nn.Embedding(50, 16)
    head = nn.Linear(16, 50, bias=False)
    head.weight = embedding.weight
    conv = Conv1D(24, 16)
    conv.bias.normal_()
    model = nn.Sequential(embedding, nn.Sequential(conv, nn.Linear(24, 16)), head)
    ids = torch.arange(7)
    want = model(ids)
    calls: list[tuple[int, int]] = []
    assert pack_linears(model, LIBRARY, lambda done, total: calls.append((done, total))) == 3
    torch.testing.assert_close(want, model(ids), rtol=1e-5, atol=1e-5)
    assert calls == [(1, 3), (2, 3), (3, 3)]
    assert not any(type(module) in (nn.Linear, Conv1D) for module in model.modules())
    assert model[2].weight.dtype == torch.float32


def test_float16_and_cuda_keep_their_plain_layers() -> None:
    for library in (LIBRARY, None):
        assert not can_pack(torch.float16, CPU, library)
        assert not can_pack(torch.float32, torch.device("cuda"), library)

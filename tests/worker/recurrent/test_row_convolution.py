"""Convolutions of torch, computed by rows, give its results, and a row the same bits anywhere."""

import pytest
import torch
from torch import nn

from worker_proc.native.kernels import load_library
from worker_proc.recurrent.row_convolution import Convolutions, RowConvolutions

LENGTHS = (40, 5, 1)
"""Places that a convolution gives at once."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("channels", "groups", "size", "dilation", "has_bias"),
    [(21, 21, 4, 3, False), (24, 3, 2, 1, True), (21, 21, 2, 1, True)],
)
@torch.inference_mode()
def test_results_are_those_of_torch_and_of_each_place_alone(
    *, channels: int, groups: int, size: int, dilation: int, has_bias: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(3)
    layer = nn.Conv1d(
        channels, channels, size, groups=groups, dilation=dilation, bias=has_bias, dtype=dtype
    )
    reach = dilation * (size - 1)
    columns = torch.randn(2, channels, max(LENGTHS) + reach).to(dtype)
    with RowConvolutions(Convolutions(load_library())):
        whole = layer(columns)
        for length in LENGTHS:
            for start in range(0, max(LENGTHS), length):
                part = layer(columns[..., start : start + length + reach].contiguous())
                assert torch.equal(part, whole[..., start : start + length])
    expected = layer.float()(columns.float())
    torch.testing.assert_close(whole.float(), expected, atol=0.03, rtol=0.02)


@torch.inference_mode()
def test_weights_other_than_parameters_may_change() -> None:
    convolutions = Convolutions(load_library())
    columns, weight = torch.randn(1, 4, 6), torch.randn(4, 2, 2)
    with RowConvolutions(convolutions):
        before = torch.conv1d(columns, weight, groups=2)
        weight *= 2
        assert torch.equal(torch.conv1d(columns, weight, groups=2), before * 2)

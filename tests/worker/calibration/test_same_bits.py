"""Two tensors have the same bits, or not."""

import pytest
import torch

from worker_proc.calibration.same_bits import have_same_bits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_signs_of_zeros_differ_and_nans_do_not(dtype: torch.dtype) -> None:
    def made(*values: float) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype)

    values = made(0.0, 1.5, torch.nan)
    assert have_same_bits(values, values.clone())
    assert have_same_bits(values, made(0.0, 1.5, -torch.nan))
    assert not have_same_bits(values, made(-0.0, 1.5, torch.nan))
    assert not have_same_bits(values, made(0.0, 1.5 + torch.finfo(dtype).eps, torch.nan))
    assert not have_same_bits(values, made(0.0, 1.5, 1.5))


def test_integers_and_tensors_with_other_strides_are_compared() -> None:
    numbers = torch.arange(6).view(2, 3)
    assert have_same_bits(numbers.t(), numbers.t().contiguous())
    assert not have_same_bits(numbers, numbers + 1)

"""An error that is not a number counts as a failure, at whichever place it comes."""

import math

import pytest
import torch

from worker_proc.modules.trial_errors import greatest, greatest_error

NAN = math.nan


@pytest.mark.parametrize("errors", [[NAN, 0.1], [0.1, NAN], [0.1, NAN, 0.2]], ids=str)
def test_a_trial_without_a_number_is_not_skipped(errors: list[float]) -> None:
    assert greatest(errors) == math.inf


def test_the_greatest_of_numbers_is_returned() -> None:
    assert greatest([0.1, 0.3, 0.2]) == 0.3


def test_errors_are_relative_to_the_greatest_value() -> None:
    expected = torch.tensor([1.0, -4.0])
    assert greatest_error(torch.tensor([1.5, -4.0]), expected) == pytest.approx(0.125)
    assert greatest_error(torch.tensor([NAN, -4.0]), expected) == math.inf
    assert greatest_error(torch.zeros(2), torch.zeros(2)) == math.inf

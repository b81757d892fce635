"""The comparison of two computations of logits."""

import pytest
import torch

from worker_proc.calibration.self_check import median_error


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("is_expected", [False, True])
def test_a_row_that_is_not_a_number_exceeds_every_bound(place: int, is_expected: bool) -> None:
    """A few rows may differ, because rounding sends them to other experts; NaN has other causes."""
    rows = torch.ones(3, 4)
    other, bad = rows.clone(), rows.clone()
    other[place], bad[place] = 5.0, torch.nan
    assert median_error([other], [rows]) == 0.0
    pair = ([rows], [bad]) if is_expected else ([bad], [rows])
    assert median_error(*pair) == torch.inf

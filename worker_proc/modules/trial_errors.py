"""Scales, failures and errors of the trials that compare a replacement with its module."""

import math
from collections.abc import Iterable

import torch

TRIAL_SCALES = (0.1, 1.0, 30.0)
"""Scales of random rows, unless a kind of module needs others."""
TRIAL_FAILURES = (TypeError, ValueError, AttributeError, RuntimeError, IndexError)
"""Exceptions of a module that takes or computes something other than expected."""


def greatest(errors: Iterable[float]) -> float:
    """Return the greatest error, or infinity if any error is NaN.

    `max` alone would skip a NaN unless it is the first error.
    """
    found = list(errors)
    return math.inf if any(map(math.isnan, found)) else max(found)


def row_errors(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return the error of each row, `[...]` for `[..., size]`, relative to the expected norm."""
    lengths = expected.norm(dim=-1).clamp_min(1e-30)  # a gate may have closed a row
    errors: torch.Tensor = (found - expected).norm(dim=-1) / lengths
    return errors


def greatest_row_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the greatest of `row_errors`, or infinity if any of them is NaN."""
    return greatest([float(row_errors(found, expected).max())])


def greatest_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the greatest difference, relative to the greatest expected value; see `greatest`."""
    return greatest([float((found - expected).abs().max() / expected.abs().max())])

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


def greatest_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the greatest difference, relative to the greatest expected value; see `greatest`."""
    return greatest([float((found - expected).abs().max() / expected.abs().max())])

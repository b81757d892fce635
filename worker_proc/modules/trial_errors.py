"""Trials of what would replace a module: rows, failures, and how far results are from its own."""

import math
from collections.abc import Iterable

import torch

TRIAL_SCALES = (0.1, 1.0, 30.0)
"""Of random rows, where a kind of module needs no others."""
TRIAL_FAILURES = (TypeError, ValueError, AttributeError, RuntimeError, IndexError)
"""What a module raises if it takes or computes something other than it is tried for."""


def greatest(errors: Iterable[float]) -> float:
    """Return the greatest error, or infinity if one is not a number.

    `max` alone would skip such an error, unless it is the first.
    """
    found = list(errors)
    return math.inf if any(map(math.isnan, found)) else max(found)


def greatest_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the greatest difference, relative to the greatest expected value; see `greatest`."""
    return greatest([float((found - expected).abs().max() / expected.abs().max())])

"""How far the results of a replacement are from those of the module that it would replace."""

import math
from collections.abc import Iterable

import torch


def greatest(errors: Iterable[float]) -> float:
    """Return the greatest error, or infinity if one is not a number.

    `max` alone would skip such an error, unless it is the first.
    """
    found = list(errors)
    return math.inf if any(map(math.isnan, found)) else max(found)


def greatest_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the greatest difference, relative to the greatest expected value; see `greatest`."""
    return greatest([float((found - expected).abs().max() / expected.abs().max())])

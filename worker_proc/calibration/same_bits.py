"""Compares tensors bit by bit."""

import torch

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""A dtype of integers for each size of an element, in bytes."""


def have_same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors of one shape and dtype have the same bits; NaN equals any NaN.

    0.0 and -0.0 differ, unlike in `torch.equal`: a client would see the sign in a vector.
    """
    integers = _INTEGERS[one.element_size()]
    is_same = one.view(integers) == other.view(integers)
    return bool((is_same | (one.isnan() & other.isnan())).all())

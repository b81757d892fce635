"""Where a program can be cut: at layer boundaries, and before and after projections.

A hook is called between two native calls. It reads and writes rows in place: the inputs of a
projection, and its outputs.
"""

import enum
from collections.abc import Callable
from typing import NamedTuple

import torch

Hook = Callable[[torch.Tensor, torch.Tensor], None]
"""Takes rows of inputs, `[T, in_features]`, and of outputs, `[T, out_features]`, in the order of
the step's tokens. Both are views of the decoder's buffers, valid during the call."""


class Projection(enum.StrEnum):
    """The projections of a layer, named as in transformers."""

    QUERY = "q_proj"
    KEY = "k_proj"
    VALUE = "v_proj"
    OUT = "o_proj"
    GATE = "gate_proj"
    UP = "up_proj"
    DOWN = "down_proj"


class When(enum.Enum):
    """On which side of a projection a hook is called."""

    BEFORE = 0
    """The inputs can be changed; the outputs have not been computed, and have no columns."""
    AFTER = 1
    """Nothing has been computed from the outputs yet."""


class HookPoint(NamedTuple):
    """One side of a layer's projection.

    Queries, keys and values have the same inputs, and may be computed together; then all of their
    hooks are called before or after all three. The same applies to gates and factors.
    """

    layer: int
    projection: Projection
    when: When


class Columns(NamedTuple):
    """A part of each row of a buffer."""

    buffer: int
    first: int
    width: int


class Cut(NamedTuple):
    """A hook's place in a program."""

    position: int
    """The index of the instruction that follows."""
    point: HookPoint
    inputs: Columns
    outputs: Columns

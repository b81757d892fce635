"""Where a program can be cut: at the boundaries of layers, and around their projections.

A hook is called between two native calls. It reads and writes rows in place: what a projection
takes, and what it has made or will make.
"""

import enum
from collections.abc import Callable
from typing import NamedTuple

import torch

Hook = Callable[[torch.Tensor, torch.Tensor], None]
"""Takes the rows of inputs, `[T, in_features]`, and of outputs, `[T, out_features]`, in the order
of the step's tokens. Both are views of the decoder's buffers, valid during the call."""


class Projection(enum.StrEnum):
    """The projections of a layer, by the names of transformers' modules."""

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
    """Its inputs can be changed; its outputs are not made yet, and have no columns."""
    AFTER = 1
    """Nothing has been computed from its outputs yet."""


class HookPoint(NamedTuple):
    """A side of a projection of a layer.

    Queries, keys and values have the same inputs, and may be computed together: then all of their
    hooks are called on the same side of all three. So it is with gates and factors.
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
    """Of the instruction that follows."""
    point: HookPoint
    inputs: Columns
    outputs: Columns

"""The states of a model's recurrent layers, as its forward shows them."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, slots=True)
class StateSpec:
    """One state of a recurrent module, which one function of its forward reads and writes."""

    function: str
    """The function of transformers that computes with it."""
    shape: tuple[int, ...]
    """Of one block."""
    is_window: bool
    """Whether it holds rows of the model's type; else it holds float32."""
    holds_ids: bool = False
    """Whether it holds whole numbers, such as ids of tokens."""

    def dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        """Return the type of its numbers, for a model of some type."""
        if self.holds_ids:
            return torch.int32
        return model_dtype if self.is_window else torch.float32


@dataclass(frozen=True, slots=True)
class RecurrentSpec:
    """A recurrent module: its states, in the order in which its forward uses them."""

    module_name: str
    input_size: int
    """Of the rows that it takes."""
    states: tuple[StateSpec, ...]
    other_sizes: dict[str, int] = field(default_factory=dict)
    """Of further rows of the same tokens, by the names of arguments."""


def state_bytes(specs: Iterable[RecurrentSpec], model_dtype: torch.dtype) -> int:
    """Return the size of one state block: the states of one text in all modules."""
    return sum(
        math.prod(state.shape) * state.dtype(model_dtype).itemsize
        for spec in specs
        for state in spec.states
    )

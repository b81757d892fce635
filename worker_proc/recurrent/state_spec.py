"""The states of a model's recurrent layers, as recorded from its forward."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, slots=True)
class StateSpec:
    """A state of a recurrent module, which one function of its forward reads and writes."""

    function: str
    """The function of transformers that uses the state."""
    shape: tuple[int, ...]
    """The shape of the state in one block."""
    is_window: bool
    """True if it holds rows in the model's dtype; False: float32."""
    holds_ids: bool = False
    """True if it holds integers, such as token ids."""

    def dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the state in a model of dtype `model_dtype`."""
        if self.holds_ids:
            return torch.int32
        return model_dtype if self.is_window else torch.float32


@dataclass(frozen=True, slots=True)
class RecurrentSpec:
    """A recurrent module, with its states in the order in which its forward uses them."""

    module_name: str
    input_size: int
    """The size of its input rows."""
    states: tuple[StateSpec, ...]
    other_sizes: dict[str, int] = field(default_factory=dict)
    """The sizes of further inputs with a row for each token, by argument name."""


def state_bytes(specs: Iterable[RecurrentSpec], model_dtype: torch.dtype) -> int:
    """Return the bytes of one state block: the states of one text in all modules."""
    return sum(
        math.prod(state.shape) * state.dtype(model_dtype).itemsize
        for spec in specs
        for state in spec.states
    )

"""A stand-in for transformers' cache, which gives a module states and records those it writes."""

import inspect
from types import FunctionType

import torch
from torch import nn
from torch.nn import functional

from worker_proc.errors import UnsupportedModel
from worker_proc.recurrent.cache_argument import CACHE
from worker_proc.recurrent.state_spec import StateSpec

_WRITING = {"update_conv_state", "update_recurrent_state"}
"""The cache's methods that write states."""


def keeps_states(module: nn.Module) -> bool:
    """Return whether a module's own code writes states to the cache that it receives."""
    kind = type(module)
    if CACHE not in inspect.signature(kind.forward).parameters:
        return False
    methods = (inspect.unwrap(method) for method in vars(kind).values() if callable(method))
    return any(
        _WRITING.intersection(method.__code__.co_names)
        for method in methods
        if isinstance(method, FunctionType)
    )


class StandInCache:
    """Replaces transformers' cache in one call, with the states of some texts."""

    def __init__(self, states: dict[str, torch.Tensor] | None) -> None:
        """`states` are those before the first rows, by name; None: the texts begin here."""
        self._before = states or {}
        self.after: dict[str, torch.Tensor] = {}
        """The states after the last rows, in the order in which they were written."""

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self._before.get(f"conv_state {state_idx}")

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self._before.get(f"recurrent_state {state_idx}")

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
    ) -> torch.Tensor:
        """Return the kept columns followed by the new ones, and keep the last columns."""
        before = self.get_conv_state(layer_idx, state_idx)
        size = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
        if before is not None:
            conv_states = torch.cat([before, conv_states], dim=-1)
        elif conv_states.shape[-1] < size:
            conv_states = functional.pad(conv_states, (size - conv_states.shape[-1], 0))
        self.after[f"conv_state {state_idx}"] = conv_states[..., -size:]
        return conv_states

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0
    ) -> torch.Tensor:
        self.after[f"recurrent_state {state_idx}"] = recurrent_states
        return recurrent_states

    def is_recording_past(self, layer_idx: int) -> bool:
        return False


def describe_states(cache: StandInCache, model_dtype: torch.dtype) -> tuple[StateSpec, ...]:
    """Return the specs of the states that a call on the meta device has written."""
    found = []
    for name, state in cache.after.items():
        if not state.numel():
            raise UnsupportedModel(f"its state {name} has no numbers")
        holds_ids = state.dtype == torch.long
        if not holds_ids and state.dtype not in (torch.float32, model_dtype):
            raise UnsupportedModel(f"a state of type {state.dtype}")
        is_window = not holds_ids and state.dtype == model_dtype
        found.append(StateSpec(name, tuple(state.shape[1:]), is_window, holds_ids))
    return tuple(found)

"""RWKV's averages of a channel's preceding values, with exponentially decaying weights."""

from typing import Any

import torch

from worker_proc.native.kernels import NativeLibrary
from worker_proc.native.recurrence import WeightedAverageArgs
from worker_proc.recurrent.rowwise import rowwise
from worker_proc.recurrent.state_pool import StatePool
from worker_proc.recurrent.step_texts import NO_STATE, Text

NO_EXPONENT = -1e38
"""Exponent of sums to which nothing has been added."""


class WeightedAverage:
    """Replaces transformers' `rwkv_linear_attention` in one module.

    A state is `[3, num_channels]`: the sum of weighted values, the sum of weights, and the
    logarithm of a factor that is left out of both.
    """

    function = "rwkv_linear_attention"

    def __init__(
        self, pool: StatePool, states: torch.Tensor, library: NativeLibrary | None
    ) -> None:
        self._pool = pool
        self._states = states
        self._library = library

    def __call__(
        self,
        time_decay: torch.Tensor,
        time_first: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        """Return `[1, T, num_channels]`, given keys and values of this shape, and no state."""
        decays = -rowwise(torch.exp, time_decay.float())
        bonuses = time_first.float().contiguous()
        keys, values = key[0], value[0].to(key.dtype)
        if self._library is None:
            return self._by_torch(decays, bonuses, keys, values).unsqueeze(0), None
        keys, values = keys.contiguous(), values.contiguous()
        out = torch.empty(keys.shape, dtype=keys.dtype)
        tensors = keys, values, decays, bonuses, self._states, out
        arguments = WeightedAverageArgs(
            *(tensor.data_ptr() for tensor in tensors),
            keys.shape[1],
            keys.dtype == torch.bfloat16,
        )
        self._library.weighted_average(arguments, self._pool.texts_with(len(keys)).arguments)
        return out.unsqueeze(0), None

    def _by_torch(
        self,
        decays: torch.Tensor,
        bonuses: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        out = torch.empty(keys.shape, dtype=keys.dtype)
        for text in self._pool.texts_with(len(keys)):
            own = slice(text.first_row, text.first_row + text.num_rows)
            rows = (keys[own].float(), values[own].float())
            self._average_text(text, (decays, bonuses), rows, out[own])
        return out

    def _average_text(
        self,
        text: Text,
        parameters: tuple[torch.Tensor, torch.Tensor],
        rows: tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor,
    ) -> None:
        decays, bonuses = parameters
        state = torch.zeros_like(self._states[0])
        state[2] = NO_EXPONENT
        if text.source != NO_STATE:
            state = self._states[text.source].clone()
        for place, (key, value) in enumerate(zip(*rows, strict=True)):
            sums = _added(state, state[2], key + bonuses, value)
            out[place] = (sums[0] / sums[1]).to(out.dtype)
            state = _added(state, state[2] + decays, key, value)
            for block, end in text.cuts.items():
                if end == place + 1:
                    self._states[block] = state


def _added(
    state: torch.Tensor, exponent: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    """Return the sums after adding a value with weight exp(key); both sums share an exponent."""
    greater = torch.maximum(exponent, key)
    before, added = rowwise(torch.exp, exponent - greater), rowwise(torch.exp, key - greater)
    return torch.stack([before * state[0] + added * value, before * state[1] + added, greater])

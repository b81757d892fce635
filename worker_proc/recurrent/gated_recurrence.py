"""The recurrence of Griffin, with one number for each channel: decay · state + input."""

import torch

from worker_proc.native.kernels import NativeLibrary
from worker_proc.native.recurrence import GatedRecurrenceArgs
from worker_proc.recurrent.state_pool import StatePool
from worker_proc.recurrent.step_texts import NO_STATE


class GatedRecurrence:
    """Scans the packed rows of the current step, with states `[num_channels]`."""

    def __init__(
        self, pool: StatePool, states: torch.Tensor, library: NativeLibrary | None
    ) -> None:
        self._pool = pool
        self._states = states
        self._library = library

    def __call__(self, inputs: torch.Tensor, decays: torch.Tensor) -> torch.Tensor:
        """Return the state after each row; inputs and decays are float32 `[T, num_channels]`."""
        if self._library is None:
            return self._by_torch(inputs, decays)
        inputs, decays = inputs.contiguous(), decays.contiguous()
        out = torch.empty_like(inputs)
        tensors = inputs, decays, self._states, out
        arguments = GatedRecurrenceArgs(*(one.data_ptr() for one in tensors), inputs.shape[1])
        self._library.gated_recurrence(arguments, self._pool.texts_with(len(inputs)).arguments)
        return out

    def _by_torch(self, inputs: torch.Tensor, decays: torch.Tensor) -> torch.Tensor:
        """Scan row by row; elementwise products and sums have the same bits in every tensor."""
        out = torch.empty_like(inputs)
        for text in self._pool.texts_with(len(inputs)):
            state = torch.zeros_like(inputs[0])
            if text.source != NO_STATE:
                state = self._states[text.source]
            for row in range(text.first_row, text.first_row + text.num_rows):
                state = torch.add(state * decays[row], inputs[row], out=out[row])
            for block, end in text.cuts.items():
                self._states[block] = out[text.first_row + end - 1]
        return out

"""Causal convolutions of each channel, over packed rows and the windows that precede them."""

from typing import Any

import torch
from torch.nn import functional

from worker_proc.errors import UnsupportedModel
from worker_proc.native.kernels import NativeLibrary
from worker_proc.native.recurrence import ConvolutionArgs
from worker_proc.native.structures import Activation
from worker_proc.recurrent.calls import check_arguments
from worker_proc.recurrent.rowwise import rowwise
from worker_proc.recurrent.state_pool import StatePool
from worker_proc.recurrent.state_spec import StateSpec
from worker_proc.recurrent.step_texts import NO_STATE

MAX_TAPS = 16
_ACTIVATIONS = {None: None, "silu": Activation.SILU, "swish": Activation.SILU}


class CausalConvolution:
    """Replaces transformers' `causal_conv1d_fn` in one module.

    The state is the window of the last rows, `[size - 1, num_channels]`.
    """

    function = "causal_conv1d_fn"

    def __init__(
        self, pool: StatePool, windows: torch.Tensor, library: NativeLibrary | None
    ) -> None:
        self._pool = pool
        self._windows = windows
        self._library = library
        self._weight: torch.Tensor | None = None  # [size, num_channels]
        self._bias: torch.Tensor | None = None

    @staticmethod
    def describe(
        hidden_states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        **others: Any,
    ) -> tuple[StateSpec, torch.Tensor]:
        """Return the state of a call on the meta device, and its result."""
        check_arguments(CausalConvolution.function, others)
        num_channels, size = weight.shape
        if activation not in _ACTIVATIONS:
            raise UnsupportedModel(f"a causal convolution with the activation {activation}")
        if not 2 <= size <= MAX_TAPS:
            raise UnsupportedModel(f"a causal convolution of {size} positions, not 2 to {MAX_TAPS}")
        spec = StateSpec(CausalConvolution.function, (size - 1, num_channels), is_window=True)
        return spec, torch.empty_like(hidden_states)

    def __call__(
        self,
        hidden_states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        **others: Any,
    ) -> torch.Tensor:
        """Return `[1, num_channels, T]`, given the same shape, like transformers' function."""
        if self._weight is None:
            self._weight = weight.detach().float().t().contiguous()
            self._bias = None if bias is None else bias.detach().float().contiguous()
        rows = hidden_states[0].t()
        if rows.dtype != self._windows.dtype:
            raise RuntimeError(f"rows in {rows.dtype} for windows in {self._windows.dtype}")
        if self._library is None:
            out = self._by_torch(rows, activation)
        else:
            out = self._by_kernel(self._library, rows, _ACTIVATIONS[activation])
        return out.t().unsqueeze(0)

    def _by_kernel(
        self, library: NativeLibrary, rows: torch.Tensor, activation: Activation | None
    ) -> torch.Tensor:
        assert self._weight is not None
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        out = torch.empty(rows.shape, dtype=rows.dtype)
        arguments = ConvolutionArgs(
            rows.data_ptr(),
            self._windows.data_ptr(),
            out.data_ptr(),
            self._weight.data_ptr(),
            None if self._bias is None else self._bias.data_ptr(),
            rows.stride(0),
            rows.shape[1],
            len(self._weight),
            -1 if activation is None else activation,
            rows.dtype == torch.bfloat16,
        )
        library.convolve(arguments, self._pool.texts_with(len(rows)).arguments)
        return out

    def _by_torch(self, rows: torch.Tensor, activation: str | None) -> torch.Tensor:
        assert self._weight is not None
        size = len(self._weight)
        out = torch.empty(rows.shape, dtype=rows.dtype)
        for text in self._pool.texts_with(len(rows)):
            own = slice(text.first_row, text.first_row + text.num_rows)
            before = rows.new_zeros(size - 1, rows.shape[1])
            if text.source != NO_STATE:
                before = self._windows[text.source]
            joined = torch.cat([before, rows[own]])
            sums = rows.new_zeros(text.num_rows, rows.shape[1], dtype=torch.float32)
            if self._bias is not None:
                sums += self._bias
            for tap, factors in enumerate(self._weight):
                sums += joined[tap : tap + text.num_rows].float() * factors
            convolved = sums.to(rows.dtype)
            if activation is not None:
                convolved = rowwise(functional.silu, convolved)
            out[own] = convolved
            for block, row in text.cuts.items():
                self._windows[block] = joined[row : row + size - 1]
        return out

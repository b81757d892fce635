"""The selective scan of Mamba-1: each channel has its own state and time step."""

from typing import Any, NamedTuple

import torch
from torch.nn import functional

from worker_proc.errors import UnsupportedModel
from worker_proc.native.kernels import NativeLibrary
from worker_proc.native.recurrence import SelectiveScanArgs
from worker_proc.recurrent.calls import check_arguments
from worker_proc.recurrent.rowwise import rowwise
from worker_proc.recurrent.scan import COLUMNS
from worker_proc.recurrent.state_pool import StatePool
from worker_proc.recurrent.state_spec import StateSpec
from worker_proc.recurrent.step_texts import NO_STATE, Text


class _Rows(NamedTuple):
    """The inputs of a scan over T tokens, in the dtype of `inputs`."""

    inputs: torch.Tensor  # [T, num_channels]
    steps: torch.Tensor  # the same
    keys: torch.Tensor  # [T, num_keys]
    queries: torch.Tensor  # the same
    gates: torch.Tensor | None  # [T, num_channels]


class _Channels(NamedTuple):
    """Parameters of the channels, in float32."""

    decays: torch.Tensor  # [tile, num_keys, 16], not above 0
    skips: torch.Tensor | None  # [num_channels]
    biases: torch.Tensor | None  # [num_channels], added to the steps


class SelectiveScan:
    """Replaces transformers' `mamba_selective_scan` in one module.

    `hidden_states`, `dt` and `z` are `[1, num_channels, T]`, `B` and `C` are `[1, num_keys, T]`,
    and `A` is `[num_channels, num_keys]`. The state is `[tile, num_keys, 16]`, with 16 channels in
    each tile.
    """

    function = "mamba_selective_scan"

    def __init__(
        self, pool: StatePool, states: torch.Tensor, library: NativeLibrary | None
    ) -> None:
        self._pool = pool
        self._states = states
        self._library = library
        self._channels: _Channels | None = None

    @staticmethod
    def describe(  # noqa: PLR0917 (the signature is transformers')
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        D: torch.Tensor | None = None,
        z: torch.Tensor | None = None,
        delta_bias: torch.Tensor | None = None,
        delta_softplus: bool = False,
        return_last_state: bool = False,
        **others: Any,
    ) -> tuple[StateSpec, torch.Tensor]:
        """Return the state of a call on the meta device, and its result."""
        check_arguments(SelectiveScan.function, others)
        if not delta_softplus or return_last_state:
            raise UnsupportedModel(
                f"{SelectiveScan.function} is called with delta_softplus={delta_softplus} and"
                f" return_last_state={return_last_state}, not with True and False"
            )
        num_channels, num_keys = A.shape
        shape = -(-num_channels // COLUMNS), num_keys, COLUMNS
        spec = StateSpec(SelectiveScan.function, shape, is_window=False)
        return spec, torch.empty_like(hidden_states)

    def __call__(  # noqa: PLR0917
        self,
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        D: torch.Tensor | None = None,
        z: torch.Tensor | None = None,
        delta_bias: torch.Tensor | None = None,
        **others: Any,
    ) -> torch.Tensor:
        """Return `[1, num_channels, T]`, in the dtype of `hidden_states`."""
        if self._channels is None:
            skips, biases = (None if v is None else v.float().contiguous() for v in (D, delta_bias))
            self._channels = _Channels(_tiled(A.float()), skips, biases)
        type_ = hidden_states.dtype
        inputs, steps, keys, queries = (_rows_of(v, type_) for v in (hidden_states, dt, B, C))
        rows = _Rows(inputs, steps, keys, queries, None if z is None else _rows_of(z, type_))
        if self._library is None:
            out = self._by_torch(rows, self._channels)
        else:
            out = self._by_kernel(self._library, rows, self._channels)
        return out.t().unsqueeze(0)

    def _by_kernel(self, library: NativeLibrary, rows: _Rows, channels: _Channels) -> torch.Tensor:
        num_rows, num_channels = rows.inputs.shape
        out = torch.empty(rows.inputs.shape, dtype=rows.inputs.dtype)
        arguments = SelectiveScanArgs(
            *(_address(tensor) for tensor in (*rows, *channels, self._states, out)),
            *(0 if tensor is None else tensor.stride(0) for tensor in rows),
            num_channels,
            rows.keys.shape[1],
            rows.inputs.dtype == torch.bfloat16,
        )
        library.selective_scan(arguments, self._pool.texts_with(num_rows).arguments)
        return out

    def _by_torch(self, rows: _Rows, channels: _Channels) -> torch.Tensor:
        out = torch.empty(rows.inputs.shape, dtype=rows.inputs.dtype)
        inputs, steps = rows.inputs.float(), rows.steps.float()
        steps = steps if channels.biases is None else steps + channels.biases
        wide = _Rows(
            inputs,
            rowwise(functional.softplus, steps),
            rows.keys.float(),
            rows.queries.float(),
            None if rows.gates is None else rowwise(functional.silu, rows.gates.float()),
        )
        for text in self._pool.texts_with(len(inputs)):
            self._scan_text(text, wide, channels, out)
        return out

    def _scan_text(self, text: Text, rows: _Rows, channels: _Channels, out: torch.Tensor) -> None:
        num_channels = rows.inputs.shape[1]
        decays = _untiled(channels.decays, num_channels)
        state = torch.zeros_like(decays)
        if text.source != NO_STATE:
            state = _untiled(self._states[text.source], num_channels)
        for place in range(text.num_rows):
            row = text.first_row + place
            step = rows.steps[row].unsqueeze(1)
            added = (step * rows.inputs[row].unsqueeze(1)) * rows.keys[row]
            state = state * rowwise(torch.exp, decays * step) + added
            result = (state * rows.queries[row]).sum(1)
            if channels.skips is not None:
                result = result + rows.inputs[row] * channels.skips
            if rows.gates is not None:
                result = result * rows.gates[row]
            out[row] = result.to(out.dtype)
            for block, end in text.cuts.items():
                if end == place + 1:
                    self._states[block] = _tiled(state)


def _rows_of(values: torch.Tensor, type_: torch.dtype) -> torch.Tensor:
    """Return `[1, size, T]` as `[T, size]`, with contiguous rows."""
    rows = values[0].t().to(type_)
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _tiled(values: torch.Tensor) -> torch.Tensor:
    """Return `[num_channels, num_keys]` as `[tile, num_keys, 16]`, padded with zeros."""
    num_channels, num_keys = values.shape
    num_tiles = -(-num_channels // COLUMNS)
    padded = values.new_zeros(num_tiles * COLUMNS, num_keys)
    padded[:num_channels] = values
    return padded.view(num_tiles, COLUMNS, num_keys).transpose(1, 2).contiguous()


def _untiled(tiles: torch.Tensor, num_channels: int) -> torch.Tensor:
    """Return `[num_channels, num_keys]`, the inverse of `_tiled`."""
    return tiles.transpose(1, 2).reshape(-1, tiles.shape[1])[:num_channels]

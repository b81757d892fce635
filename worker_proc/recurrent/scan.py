"""The token-by-token scan that all recurrent states share.

Each head has a state, a matrix of `num_keys` rows and `num_values` columns. For each token,

    state = decay · state
    state = state + key ⊗ (rate · (value - correction))
    out   = query · state + skip · value

where the correction is key · state in a delta rule, and 0 otherwise. Sums are ordered as in the
kernel of recurrence.h, or as in torch: a row's bits do not depend on how its text is chunked.
"""

from typing import NamedTuple

import torch

from worker_proc.native.kernels import NativeLibrary
from worker_proc.native.recurrence import HeadRowsArgs, ScanArgs
from worker_proc.recurrent.state_pool import StatePool
from worker_proc.recurrent.step_texts import NO_STATE, Text

COLUMNS = 16
"""The columns of a tile, the part of a state that a kernel computes at once."""


class Norm(NamedTuple):
    """Normalization and scaling of queries or keys before a scan."""

    factor: float = 1.0
    epsilon: float | None = None
    """Added to the squared norm when rows are normalized to unit length; None: not normalized."""


PLAIN = Norm()


class ScanRows(NamedTuple):
    """The inputs of a scan over T tokens."""

    queries: torch.Tensor  # [T, num_key_heads, num_keys]
    keys: torch.Tensor  # the same
    values: torch.Tensor  # [T, num_heads, num_values]
    decays: torch.Tensor  # [T, num_heads], or [T, num_heads, num_keys]; float32
    rates: torch.Tensor  # [T, num_heads], float32
    skips: torch.Tensor | None = None  # [num_heads], float32


class Scan:
    """Scans packed rows, with one module's states, `[block, head, tile, key, column]`."""

    def __init__(
        self,
        pool: StatePool,
        states: torch.Tensor,
        library: NativeLibrary | None,
        *,
        corrects: bool,
    ) -> None:
        self._pool = pool
        self._states = states
        self._library = library
        self._corrects = corrects

    def __call__(
        self, rows: ScanRows, query_norm: Norm = PLAIN, key_norm: Norm = PLAIN
    ) -> torch.Tensor:
        """Return `[T, num_heads, num_values]`, in the dtype of the values."""
        if self._library is None:
            queries, keys = _normed(rows.queries, query_norm), _normed(rows.keys, key_norm)
            return self._by_torch(rows._replace(queries=queries, keys=keys))
        queries = _prepared(self._library, rows.queries, query_norm)
        keys = _prepared(self._library, rows.keys, key_norm)
        return self._by_kernel(self._library, rows._replace(queries=queries, keys=keys))

    def _by_kernel(self, library: NativeLibrary, rows: ScanRows) -> torch.Tensor:
        values, decays, rates = rows.values, rows.decays.contiguous(), rows.rates.contiguous()
        _, num_heads, num_values = values.shape
        if values.stride(2) != 1 or values.stride(1) != num_values:
            values = values.contiguous()
        out = torch.empty(values.shape, dtype=values.dtype)
        arguments = ScanArgs(
            rows.queries.data_ptr(),
            rows.keys.data_ptr(),
            values.data_ptr(),
            decays.data_ptr(),
            rates.data_ptr(),
            None if rows.skips is None else rows.skips.data_ptr(),
            self._states.data_ptr(),
            out.data_ptr(),
            values.stride(0),
            num_heads,
            *rows.keys.shape[1:],
            num_values,
            decays.dim() == 3,
            self._corrects,
            values.dtype == torch.bfloat16,
        )
        library.scan(arguments, self._pool.texts_with(len(values)).arguments)
        return out

    def _by_torch(self, rows: ScanRows) -> torch.Tensor:
        num_heads = rows.values.shape[1]
        repeats = num_heads // rows.keys.shape[1]
        queries, keys = (r.repeat_interleave(repeats, 1) for r in (rows.queries, rows.keys))
        rows = rows._replace(queries=queries, keys=keys)
        out = torch.empty(rows.values.shape, dtype=rows.values.dtype)
        for text in self._pool.texts_with(len(rows.values)):
            self._scan_text(text, rows, out)
        return out

    def _scan_text(self, text: Text, rows: ScanRows, out: torch.Tensor) -> None:
        _, num_heads, num_values = rows.values.shape
        state = self._states.new_zeros(num_heads, rows.keys.shape[2], num_values)
        if text.source != NO_STATE:
            state = from_tiles(self._states[text.source], num_values)
        for place in range(text.num_rows):
            row = text.first_row + place
            value, key = rows.values[row].float(), rows.keys[row]
            state = state * rows.decays[row].view(num_heads, -1, 1)
            correction = (key.unsqueeze(-1) * state).sum(1) if self._corrects else 0.0
            added = (value - correction) * rows.rates[row].unsqueeze(-1)
            state = state + key.unsqueeze(-1) * added.unsqueeze(1)
            result = (rows.queries[row].unsqueeze(-1) * state).sum(1)
            if rows.skips is not None:
                result = result + rows.skips.unsqueeze(-1) * value
            out[row] = result.to(out.dtype)
            for block, end in text.cuts.items():
                if end == place + 1:
                    to_tiles(state, self._states[block])


def tiled_shape(num_heads: int, num_keys: int, num_values: int) -> tuple[int, ...]:
    """Return the shape of a block's states."""
    return num_heads, -(-num_values // COLUMNS), num_keys, COLUMNS


def from_tiles(tiles: torch.Tensor, num_values: int) -> torch.Tensor:
    """Return a block's states as `[num_heads, num_keys, num_values]`."""
    num_heads, _, num_keys, _ = tiles.shape
    return tiles.transpose(1, 2).reshape(num_heads, num_keys, -1)[..., :num_values]


def to_tiles(state: torch.Tensor, tiles: torch.Tensor) -> None:
    """Write `[num_heads, num_keys, num_values]` to a block's states."""
    num_heads, num_tiles, num_keys, _ = tiles.shape
    padded = state.new_zeros(num_heads, num_keys, num_tiles * COLUMNS)
    padded[..., : state.shape[2]] = state
    tiles.copy_(padded.view(num_heads, num_keys, num_tiles, COLUMNS).transpose(1, 2))


def _normed(rows: torch.Tensor, norm: Norm) -> torch.Tensor:
    rows = rows.float()
    if norm.epsilon is not None:
        rows = rows * torch.rsqrt((rows * rows).sum(-1, keepdim=True) + norm.epsilon)
    return rows * norm.factor


def _prepared(library: NativeLibrary, rows: torch.Tensor, norm: Norm) -> torch.Tensor:
    num_rows, num_heads, dim = rows.shape
    if rows.stride(2) != 1 or rows.stride(1) != dim:
        rows = rows.contiguous()
    out = torch.empty(rows.shape, dtype=torch.float32)
    library.prepare_heads(
        HeadRowsArgs(
            rows.data_ptr(),
            out.data_ptr(),
            rows.stride(0),
            num_rows,
            num_heads,
            dim,
            rows.dtype == torch.bfloat16,
            norm.epsilon is not None,
            norm.epsilon or 0.0,
            norm.factor,
        )
    )
    return out

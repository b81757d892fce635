"""The compiled kernels as Python functions over tensors.

The kernels use the same OpenMP threads as torch, since both are linked to the libgomp that is
already loaded.
"""

import ctypes
import enum
import logging
import os
from pathlib import Path
from typing import Any

import torch

from worker_proc.native.build import library_path

NATIVE_DTYPES = (torch.float32, torch.bfloat16)

_log = logging.getLogger(__name__)
_POINTER, _INT, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float
_TILE_ROWS, _TILE_INPUTS = 16, 32
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "troika_attend": (*[_POINTER] * 6, _FLOAT, _FLOAT),
    "troika_rms_norm": (_POINTER, _LONG, _POINTER, _POINTER, _INT, _INT, _FLOAT, _INT, _INT),
    "troika_activate": (_POINTER, _LONG, _POINTER, *[_INT] * 5),
    "troika_pack_weight": (_POINTER, _INT, _INT, _POINTER),
    "troika_linear": (_POINTER, _LONG, _POINTER, _POINTER, _POINTER, _INT, _INT, _INT),
}


class Activation(enum.IntEnum):
    """Activations of pointwise.cpp, by their numbers there."""

    SILU = 0
    GELU_TANH = 1


def _fields(names: str, kind: Any) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class LayerArgs(ctypes.Structure):
    """`Layer` of attention.cpp."""

    _fields_ = (
        *_fields("keys values", _POINTER),
        *_fields("num_heads num_kv_heads head_dim value_head_dim block_size window is_bf16", _INT),
    )


class StepArgs(ctypes.Structure):
    """`Step` of attention.cpp."""

    _fields_ = (
        *_fields("num_rows num_items item_size", _INT),
        *_fields("slots first_row num_tokens start table_offset tables", _POINTER),
        *_fields("item_segment item_token", _POINTER),
    )


class RowsArgs(ctypes.Structure):
    """`Rows` of attention.cpp."""

    _fields_ = (("data", _POINTER), *_fields("row_stride head_stride", _LONG))


class NativeLibrary:
    """The compiled kernels. Rows are float32 or bfloat16."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        for name, types in _ARGUMENTS.items():
            function = getattr(self._library, name)
            function.argtypes, function.restype = types, None
        self.has_tiles = bool(self._library.troika_enable_tiles())
        """Whether this process can compute `linear`, which needs AMX."""

    def attend(
        self,
        layer: LayerArgs,
        step: StepArgs,
        rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        scoring: tuple[float, float],
        out: torch.Tensor,
    ) -> None:
        """Store keys and values, and attend into `out`, `[T, num_heads, value_head_dim]`.

        `rows` are query, key and value, `[T, heads, dim]` each; `scoring` is the factor on scores,
        and their soft cap or 0.
        """
        parts = (layer, step, *map(_rows_args, rows))
        self._library.troika_attend(*map(ctypes.byref, parts), out.data_ptr(), *scoring)

    def rms_norm(
        self, hidden: torch.Tensor, weight: torch.Tensor, epsilon: float, round_first: bool
    ) -> torch.Tensor:
        """Normalize the last dimension, and multiply it by `weight`, which is float32.

        With `round_first` the factors are applied to values of the dtype of `hidden`.
        """
        rows = _dense_rows(hidden)
        out = torch.empty(hidden.shape, dtype=hidden.dtype)
        self._library.troika_rms_norm(
            rows.data_ptr(),
            rows.stride(0),
            weight.data_ptr(),
            out.data_ptr(),
            *rows.shape,
            epsilon,
            hidden.dtype == torch.bfloat16,
            round_first,
        )
        return out

    def activate(
        self, hidden: torch.Tensor, activation: Activation, *, multiplies: bool = False
    ) -> torch.Tensor:
        """Apply an activation to every value of `[..., size]`.

        If it multiplies, rows hold gates, then factors: f(gate) · up, `[..., size / 2]`.
        """
        rows = _dense_rows(hidden)
        size = rows.shape[1] // 2 if multiplies else rows.shape[1]
        out = torch.empty(*hidden.shape[:-1], size, dtype=hidden.dtype)
        self._library.troika_activate(
            rows.data_ptr(),
            rows.stride(0),
            out.data_ptr(),
            len(rows),
            size,
            activation,
            multiplies,
            hidden.dtype == torch.bfloat16,
        )
        return out

    def pack_weight(self, weight: torch.Tensor) -> torch.Tensor:
        """Return `[num_outputs, num_inputs]` in bfloat16 in the layout of `linear`."""
        weight = weight.contiguous()
        num_outputs, num_inputs = weight.shape
        padded = _round_up(num_outputs, _TILE_ROWS) * _round_up(num_inputs, _TILE_INPUTS)
        packed = torch.empty(padded, dtype=torch.bfloat16)
        self._library.troika_pack_weight(weight.data_ptr(), *weight.shape, packed.data_ptr())
        return packed

    def linear(
        self, hidden: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, size: int
    ) -> torch.Tensor:
        """Return `[rows, size]` for `[rows, num_inputs]` in bfloat16; `bias` is float32."""
        rows = _dense_rows(hidden)
        out = torch.empty(len(rows), size, dtype=torch.bfloat16)
        bias_at = None if bias is None else bias.data_ptr()
        self._library.troika_linear(
            rows.data_ptr(),
            rows.stride(0),
            packed.data_ptr(),
            bias_at,
            out.data_ptr(),
            *rows.shape,
            size,
        )
        return out


def load_library() -> NativeLibrary | None:
    """Return the kernels, if this user has compiled them for this machine."""
    try:
        path = library_path()
        if path.stat().st_uid != os.getuid():
            return None
        return NativeLibrary(path)
    except (OSError, RuntimeError, AttributeError) as error:
        _log.debug("computing without native kernels: %s", error)
        return None


def _round_up(size: int, part: int) -> int:
    return -(-size // part) * part


def _dense_rows(hidden: torch.Tensor) -> torch.Tensor:
    rows = hidden.reshape(-1, hidden.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _rows_args(tensor: torch.Tensor) -> RowsArgs:
    assert tensor.stride(2) == 1
    return RowsArgs(tensor.data_ptr(), tensor.stride(0), tensor.stride(1))

"""The compiled kernels as Python functions over tensors.

The kernels use the same OpenMP threads as torch, since both are linked to the libgomp that is
already loaded.
"""

import ctypes
import enum
import logging
import os
from pathlib import Path

import torch

from worker_proc.native.build import library_path

NATIVE_DTYPES = (torch.float32, torch.bfloat16)

_log = logging.getLogger(__name__)
_POINTER = ctypes.c_void_p
_INT = ctypes.c_int32


class Activation(enum.IntEnum):
    """Activations of pointwise.cpp, by their numbers there."""

    SILU = 0
    GELU_TANH = 1


class LayerArgs(ctypes.Structure):
    """`Layer` of attention.cpp."""

    _fields_ = (
        ("keys", _POINTER),
        ("values", _POINTER),
        ("num_heads", _INT),
        ("num_kv_heads", _INT),
        ("head_dim", _INT),
        ("value_head_dim", _INT),
        ("block_size", _INT),
        ("window", _INT),
        ("is_bf16", _INT),
    )


class StepArgs(ctypes.Structure):
    """`Step` of attention.cpp."""

    _fields_ = (
        ("num_rows", _INT),
        ("num_items", _INT),
        ("item_size", _INT),
        ("slots", _POINTER),
        ("first_row", _POINTER),
        ("num_tokens", _POINTER),
        ("start", _POINTER),
        ("table_offset", _POINTER),
        ("tables", _POINTER),
        ("item_segment", _POINTER),
        ("item_token", _POINTER),
    )


class RowsArgs(ctypes.Structure):
    """`Rows` of attention.cpp."""

    _fields_ = (
        ("data", _POINTER),
        ("row_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
    )


class NativeLibrary:
    """The compiled kernels."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        self._attend = library.troika_attend
        self._attend.argtypes = (*[_POINTER] * 6, ctypes.c_float, ctypes.c_float)
        self._attend.restype = None
        self._rms_norm = library.troika_rms_norm
        self._rms_norm.argtypes = (
            *(_POINTER, ctypes.c_int64, _POINTER, _POINTER),
            *(_INT, _INT, ctypes.c_float, _INT, _INT),
        )
        self._rms_norm.restype = None
        self._activate = library.troika_activate
        self._activate.argtypes = (_POINTER, ctypes.c_int64, _POINTER, *[_INT] * 5)
        self._activate.restype = None

    def attend(
        self,
        layer: LayerArgs,
        step: StepArgs,
        rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        scoring: tuple[float, float],
        out: torch.Tensor,
    ) -> None:
        """Store the keys and values of `rows`, and attend into `out`.

        Args:
            layer: pool and shape.
            step: segments and tables of the step.
            rows: query, key and value, `[T, heads, dim]` each.
            scoring: factor on scores, and their soft cap or 0.
            out: `[T, num_heads, value_head_dim]`, contiguous.
        """
        query, key, value = (_rows_args(tensor) for tensor in rows)
        self._attend(
            ctypes.byref(layer),
            ctypes.byref(step),
            ctypes.byref(query),
            ctypes.byref(key),
            ctypes.byref(value),
            out.data_ptr(),
            *scoring,
        )

    def rms_norm(
        self, hidden: torch.Tensor, weight: torch.Tensor, epsilon: float, round_first: bool
    ) -> torch.Tensor:
        """Normalize the last dimension.

        Args:
            hidden: `[..., size]`, float32 or bfloat16.
            weight: `[size]`, float32.
            epsilon: added to the mean of squares.
            round_first: round to the dtype of `hidden` before multiplying by `weight`.
        """
        size = hidden.shape[-1]
        rows = _dense_rows(hidden)
        out = torch.empty(hidden.shape, dtype=hidden.dtype)
        self._rms_norm(
            rows.data_ptr(),
            rows.stride(0),
            weight.data_ptr(),
            out.data_ptr(),
            len(rows),
            size,
            epsilon,
            hidden.dtype == torch.bfloat16,
            round_first,
        )
        return out

    def activate(
        self, hidden: torch.Tensor, activation: Activation, *, multiplies: bool = False
    ) -> torch.Tensor:
        """Apply an activation to every value of `[..., size]`, float32 or bfloat16.

        If it multiplies, each row holds gates and then as many factors: returns f(gate) · up,
        `[..., size / 2]`.
        """
        rows = _dense_rows(hidden)
        size = rows.shape[1] // 2 if multiplies else rows.shape[1]
        out = torch.empty(*hidden.shape[:-1], size, dtype=hidden.dtype)
        self._activate(
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


def load_library() -> NativeLibrary | None:
    """Return the kernels, if this user has compiled them for this machine."""
    try:
        path = library_path()
        if path.stat().st_uid != os.getuid():
            return None
        return NativeLibrary(path)
    except (OSError, RuntimeError, AttributeError) as error:
        _log.info("computing without native kernels: %s", error)
        return None


def _dense_rows(hidden: torch.Tensor) -> torch.Tensor:
    rows = hidden.reshape(-1, hidden.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _rows_args(tensor: torch.Tensor) -> RowsArgs:
    assert tensor.stride(2) == 1
    return RowsArgs(tensor.data_ptr(), tensor.stride(0), tensor.stride(1))

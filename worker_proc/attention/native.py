"""The CPU's fast backend: attends over the pool in place, without gathering.

The kernel's results for a token depend on its own text alone, so they are the same bits whatever
batch, chunk or step it is computed in.
"""

import ctypes
import logging
import os
from pathlib import Path

import torch

from worker_proc.attention.interface import PagedLayer, Rows, Scoring
from worker_proc.attention.layer_spec import LayerSpec
from worker_proc.native.build import library_path
from worker_proc.inputs import StepInputs

NATIVE_DTYPES = (torch.float32, torch.bfloat16)
MAX_HEAD_DIM = 512
MAX_HEADS_PER_KV_HEAD = 32
ITEM_TOKENS = 64
"""Tokens of one chunk that one thread takes at a time."""

_log = logging.getLogger(__name__)
_POINTER = ctypes.c_void_p


class _Layer(ctypes.Structure):
    _fields_ = (
        ("keys", _POINTER),
        ("values", _POINTER),
        ("num_heads", ctypes.c_int32),
        ("num_kv_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("value_head_dim", ctypes.c_int32),
        ("block_size", ctypes.c_int32),
        ("window", ctypes.c_int32),
        ("is_bf16", ctypes.c_int32),
    )


class _Step(ctypes.Structure):
    _fields_ = (
        ("num_rows", ctypes.c_int32),
        ("num_items", ctypes.c_int32),
        ("item_size", ctypes.c_int32),
        ("slots", _POINTER),
        ("first_row", _POINTER),
        ("num_tokens", _POINTER),
        ("start", _POINTER),
        ("table_offset", _POINTER),
        ("tables", _POINTER),
        ("item_segment", _POINTER),
        ("item_token", _POINTER),
    )


class _Rows(ctypes.Structure):
    _fields_ = (
        ("data", _POINTER),
        ("row_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
    )


class NativeLibrary:
    """The compiled kernels."""

    def __init__(self, path: Path) -> None:
        self._attend = ctypes.CDLL(str(path)).troika_attend
        self._attend.argtypes = (
            *[ctypes.c_void_p] * 6,
            ctypes.c_float,
            ctypes.c_float,
        )
        self._attend.restype = None

    def attend(
        self,
        layer: _Layer,
        step: _Step,
        rows: Rows,
        scoring: Scoring,
        out: torch.Tensor,
    ) -> None:
        """Store the keys and values of `rows`, and attend into `out`."""
        query, key, value = (_describe_rows(tensor) for tensor in rows)
        self._attend(
            ctypes.byref(layer),
            ctypes.byref(step),
            ctypes.byref(query),
            ctypes.byref(key),
            ctypes.byref(value),
            out.data_ptr(),
            scoring.scale,
            scoring.softcap or 0.0,
        )


def load_library() -> NativeLibrary | None:
    """Return the kernels if they have been compiled for this machine by this user."""
    path = library_path()
    try:
        if path.stat().st_uid != os.getuid():
            return None
        return NativeLibrary(path)
    except OSError as error:
        _log.info("attention runs without its native kernel: %s", error)
        return None


def can_attend(specs: list[LayerSpec], dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether the kernel covers these layers."""
    return (
        device.type == "cpu"
        and dtype in NATIVE_DTYPES
        and all(
            max(spec.head_dim, spec.value_head_dim) <= MAX_HEAD_DIM
            and spec.num_heads // spec.num_kv_heads <= MAX_HEADS_PER_KV_HEAD
            for spec in specs
        )
    )


def _describe_rows(tensor: torch.Tensor) -> _Rows:
    if tensor.stride(2) != 1:
        tensor = tensor.contiguous()
    return _Rows(tensor.data_ptr(), tensor.stride(0), tensor.stride(1))


class NativeBackend:
    """Attention by the native kernel; see the module's description."""

    def __init__(self, library: NativeLibrary, block_size: int, dtype: torch.dtype) -> None:
        self._library = library
        self._block_size = block_size
        self._is_bf16 = dtype == torch.bfloat16
        self._layers: dict[PagedLayer, _Layer] = {}
        self._step = _Step()
        self._arrays: list[torch.Tensor] = []

    def pool_shapes(
        self, spec: LayerSpec, num_blocks: int
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return `[block, kv_head, dim, slot]` and, for values, `[block, kv_head, slot, dim]`."""
        heads, size = spec.num_kv_heads, self._block_size
        return (
            (num_blocks, heads, spec.head_dim, size),
            (num_blocks, heads, size, spec.value_head_dim),
        )

    def begin_step(self, inputs: StepInputs) -> None:
        """Lay out the step's segments and share its work out into items."""
        parts = inputs.parts
        tables: list[int] = []
        offsets: list[int] = []
        items: list[tuple[int, int]] = []
        for segment, part in enumerate(parts):
            offsets.append(len(tables))
            tables += part.request.block_ids[: (part.end - 1) // self._block_size + 1]
            items += [(segment, token) for token in range(0, part.num_tokens, ITEM_TOKENS)]
        items.sort(key=lambda item: parts[item[0]].num_tokens)
        columns = (
            inputs.first_rows,
            [part.num_tokens for part in parts],
            [part.start for part in parts],
            offsets,
            tables,
            [segment for segment, _ in items],
            [token for _, token in items],
        )
        self._arrays = [torch.tensor(column, dtype=torch.int32) for column in columns]
        self._arrays.append(inputs.slot_mapping)
        pointers = [array.data_ptr() for array in self._arrays]
        num_rows = len(inputs.slot_mapping)
        self._step = _Step(num_rows, len(items), ITEM_TOKENS, pointers[-1], *pointers[:-1])

    def attend(
        self,
        layer: PagedLayer,
        rows: Rows,
        scoring: Scoring,
    ) -> torch.Tensor:
        """Store the row's keys and values, and attend; see `AttentionBackend`."""
        known = self._layers.get(layer)
        if known is None:
            known = self._layers[layer] = self._describe(layer)
        spec = layer.spec
        out = rows.query.new_empty(len(rows.query), spec.num_heads, spec.value_head_dim)
        self._library.attend(known, self._step, rows, scoring, out)
        return out

    def _describe(self, layer: PagedLayer) -> _Layer:
        spec, kv = layer.spec, layer.kv
        assert kv.keys.is_contiguous()
        assert kv.values.is_contiguous()
        return _Layer(
            kv.keys.data_ptr(),
            kv.values.data_ptr(),
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            spec.value_head_dim,
            self._block_size,
            spec.window or 0,
            self._is_bf16,
        )

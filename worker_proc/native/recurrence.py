"""The arguments of the kernels of recurrent layers and of gated norms."""

import ctypes
from typing import Any

_POINTER, _INT, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float


def _fields(names: str, kind: Any) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class GatedNormArgs(ctypes.Structure):
    """Mirrors `GatedNorm` of pointwise.h."""

    _fields_ = (
        *_fields("rows gates weight out", _POINTER),
        *_fields("row_stride gate_stride", _LONG),
        *_fields("num_rows size group_size is_bf16 gates_first is_sigmoid rounds_between", _INT),
        ("epsilon", _FLOAT),
    )


class RecurrentTexts(ctypes.Structure):
    """Mirrors `RecurrentTexts` of recurrent/recurrence.h."""

    _fields_ = (
        *_fields("first_row num_rows source cuts cut_row cut_block", _POINTER),
        *_fields("num_texts total_rows", _INT),
    )


class ConvolutionArgs(ctypes.Structure):
    """Mirrors `Convolution` of recurrent/recurrence.h."""

    _fields_ = (
        *_fields("rows windows out weight bias", _POINTER),
        ("row_stride", _LONG),
        *_fields("num_channels size activation is_bf16", _INT),
    )


class HeadRowsArgs(ctypes.Structure):
    """Mirrors `HeadRows` of recurrent/recurrence.h."""

    _fields_ = (
        *_fields("rows out", _POINTER),
        ("row_stride", _LONG),
        *_fields("num_rows num_heads dim is_bf16 normalizes", _INT),
        *_fields("epsilon factor", _FLOAT),
    )


class ScanArgs(ctypes.Structure):
    """Mirrors `Scan` of recurrent/recurrence.h."""

    _fields_ = (
        *_fields("queries keys values decays rates skips states out", _POINTER),
        ("value_stride", _LONG),
        *_fields("num_heads num_key_heads num_keys num_values", _INT),
        *_fields("has_key_decays corrects is_bf16", _INT),
    )


class SelectiveScanArgs(ctypes.Structure):
    """Mirrors `SelectiveScan` of recurrent/selective_scan.h."""

    _fields_ = (
        *_fields("inputs steps keys queries gates decays skips biases states out", _POINTER),
        *_fields("input_stride step_stride key_stride query_stride gate_stride", _LONG),
        *_fields("num_channels num_keys is_bf16", _INT),
    )


class GatedRecurrenceArgs(ctypes.Structure):
    """Mirrors `GatedRecurrence` of recurrent/channel_scan.h."""

    _fields_ = (*_fields("inputs decays states out", _POINTER), ("num_channels", _INT))


class WeightedAverageArgs(ctypes.Structure):
    """Mirrors `WeightedAverage` of recurrent/channel_scan.h."""

    _fields_ = (
        *_fields("keys values decays bonuses states out", _POINTER),
        *_fields("num_channels is_bf16", _INT),
    )

"""The kernels of exchange.cpp over tensors."""

import ctypes
from typing import Any

import torch

_INT, _LONG = ctypes.c_int32, ctypes.c_int64
_POINTER = ctypes.c_void_p
ALL_PUBLISHED = -1
"""The result of a wait for which no rank is missing."""


class ExchangeArgs(ctypes.Structure):
    """Mirrors `Exchange` of exchange.h."""

    _fields_ = (
        ("memory", _POINTER),
        ("rank", _INT),
        ("num_ranks", _INT),
        *((name, _LONG) for name in ("slot_bytes", "sequence", "wait_ns")),
        *((name, _INT) for name in ("missing", "num_summed", "is_published")),
    )


class _RowsArgs(ctypes.Structure):
    """Mirrors `ExchangedRows` of exchange.h."""

    _fields_ = (
        ("data", _POINTER),
        ("num_rows", _LONG),
        ("row_bytes", _LONG),
        ("stride", _LONG),
    )


def exchange_bytes(num_ranks: int, slot_bytes: int) -> int:
    """Return the bytes of shared memory that an exchange needs, as in exchange.h."""
    line_bytes = 128
    return (1 + num_ranks) * line_bytes + 2 * num_ranks * slot_bytes


class NativeExchange:
    """One rank's view of an exchange; rows are two-dimensional, with dense last dimensions."""

    def __init__(self, library: ctypes.CDLL, args: ExchangeArgs) -> None:
        """Take memory that is shared with the other ranks, and was zeroed once."""
        rows = ctypes.POINTER(_RowsArgs)
        exchange = ctypes.POINTER(ExchangeArgs)
        self.args = args
        args.missing = ALL_PUBLISHED  # a program with sums of no rows ends like any other
        self._publish = _bind(library.troika_publish, None, exchange, rows, _LONG)
        self._await = _bind(library.troika_await_ranks, _INT, exchange, _LONG, _LONG)
        self._add = _bind(library.troika_add_ranks, None, exchange, rows, _LONG, _INT)
        self._gather = _bind(library.troika_gather_ranks, None, exchange, rows, _LONG, _POINTER)

    def publish(self, rows: torch.Tensor, sequence: int) -> None:
        """Publish rows, of at most a slot's bytes, to the other ranks."""
        self._publish(ctypes.byref(self.args), _rows_args(rows), sequence)

    def wait(self, sequence: int, timeout_ns: int) -> int:
        """Wait until all ranks have published a number.

        Returns ALL_PUBLISHED, or after the timeout a rank that is missing.
        """
        found: int = self._await(ctypes.byref(self.args), sequence, timeout_ns)
        return found

    def add(self, rows: torch.Tensor, sequence: int) -> None:
        """Replace rows of float32 or bfloat16 by their sums over all ranks."""
        assert rows.dtype in (torch.float32, torch.bfloat16)
        is_bf16 = rows.dtype == torch.bfloat16
        self._add(ctypes.byref(self.args), _rows_args(rows), sequence, is_bf16)

    def gather(self, rows: torch.Tensor, sequence: int, out: torch.Tensor) -> None:
        """Write all ranks' rows side by side to a dense tensor."""
        self._gather(ctypes.byref(self.args), _rows_args(rows), sequence, out.data_ptr())


def _bind(function: Any, result: Any, *arguments: Any) -> Any:
    function.argtypes, function.restype = arguments, result
    return function


def _rows_args(rows: torch.Tensor) -> Any:
    item = rows.element_size()
    row_bytes, stride = rows.shape[1] * item, rows.stride(0) * item
    return ctypes.byref(_RowsArgs(rows.data_ptr(), rows.shape[0], row_bytes, stride))

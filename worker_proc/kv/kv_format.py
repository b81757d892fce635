"""Formats of keys and values in the pools: the model's dtype, or codes of 8 bits.

A token's key (or value) of one KV head has codes and one float32 scale, which depends on that row
alone. worker_proc/native/attention/coded_kv.h computes and reads them; `round_rows` returns the
values that they represent.
"""

import enum

import torch

from protocol.config import KVCacheDtype

CODE_DTYPE = torch.uint8
_SCALE_BYTES = torch.float32.itemsize
_MIN_MAGNITUDE = 1e-30
"""Rows without a greater magnitude count as zero."""


class KVFormat(enum.IntEnum):
    """Formats, by their numbers in step.h."""

    PLAIN = 0
    """The model's dtype."""
    INT8 = 1
    """Integers from -127 to 127."""
    FP8 = 2
    """e4m3: four exponent bits, three significand bits, a maximum of 448."""

    @property
    def config_name(self) -> str:
        """The value of `kv_cache_dtype`; empty: the model's dtype."""
        return "" if self is KVFormat.PLAIN else self.name.lower()

    def pool_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of a pool's elements in a model of dtype `dtype`."""
        return dtype if self is KVFormat.PLAIN else CODE_DTYPE

    def row_bytes(self, dim: int, dtype: torch.dtype) -> int:
        """Return the bytes of a token's key or value in one head, including its scale."""
        return dim * dtype.itemsize if self is KVFormat.PLAIN else dim + _SCALE_BYTES


FORMATS = {
    KVCacheDtype.AUTO: KVFormat.PLAIN,
    KVCacheDtype.INT8: KVFormat.INT8,
    KVCacheDtype.FP8: KVFormat.FP8,
    KVCacheDtype.FP8_E4M3: KVFormat.FP8,
}


def round_rows(rows: torch.Tensor, format: KVFormat) -> torch.Tensor:
    """Return the values that codes of keys or values represent, `[..., dim]`, in their dtype."""
    if format is KVFormat.PLAIN:
        return rows
    # With a tensor, torch divides as the kernel does.
    max_code = torch.tensor(127.0 if format is KVFormat.INT8 else 448.0)
    values = rows.float()
    greatest = values.abs().amax(-1, keepdim=True)
    inverse = max_code / greatest
    if format is KVFormat.INT8:
        codes = (values.double() * inverse).round().float()  # the kernel rounds a product once
    else:
        codes = (values * inverse).to(torch.float8_e4m3fn).float()
    rounded = torch.where(greatest <= _MIN_MAGNITUDE, 0.0, codes * (greatest / max_code))
    return torch.where(greatest.isfinite(), rounded, torch.nan).to(rows.dtype)

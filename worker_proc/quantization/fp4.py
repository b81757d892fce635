"""Numbers of 4 bits in e2m1, with scales of groups of inputs: MXFP4 and NVFP4.

A layer has two consecutive inputs in a byte, `[outputs, inputs / 2]`, the first one in the lower
bits, and scales `[outputs, inputs / group]`. Scales of MXFP4 are powers of two of 32 inputs, stored
as their exponents (e8m0). Those of NVFP4 are numbers in e4m3 of 16 inputs, and a number of the
whole weight multiplies them (modelopt), or divides them (compressed-tensors).
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch

from worker_proc.quantization.headers import StoredTensor
from worker_proc.quantization.mxfp4 import E2M1_GROUP, E2M1_VALUES
from worker_proc.quantization.scheme import (
    ReadTensor,
    checked,
    num_groups,
    require,
    require_matrix,
    require_scales,
    require_type,
)
from worker_proc.quantization.weight import CodeKind, QuantizedWeight

NVFP4_GROUP = 16


class WholeScale(NamedTuple):
    """The number of a whole weight in NVFP4."""

    name: str
    divides: bool


class Fp4Scheme:
    """Numbers in e2m1; without a number of the whole weight its scales are powers of two."""

    kind = CodeKind.FP4
    codes_rows = False

    def __init__(self, codes: str, *scales: str, whole: WholeScale | None = None) -> None:
        """`scales` are the names that the tensor of scales may have."""
        self._codes, self._scales, self._whole = codes, scales, whole
        self._group_size = E2M1_GROUP if whole is None else NVFP4_GROUP

    def shape(self, stored: Mapping[str, StoredTensor], read: ReadTensor) -> tuple[int, int]:
        num_outputs, num_bytes = require_matrix(stored, self._codes, "I8", "U8")
        shape = num_outputs, num_groups(2 * num_bytes, self._group_size)
        if self._whole is None:
            require_scales(stored, self._scales, shape)
        else:
            [name] = self._scales
            require_type(require(stored, name, shape), name, "F8_E4M3")
            whole = require(stored, self._whole.name, (), (1,))
            require_type(whole, self._whole.name, "F32")
        return num_outputs, 2 * num_bytes

    def read(self, tensors: Mapping[str, torch.Tensor]) -> QuantizedWeight:
        pairs = tensors[self._codes].contiguous().view(torch.uint8)
        codes = torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(1)
        scales = read_scales(tensors, *self._scales)
        if self._whole is not None:
            number = tensors[self._whole.name]
            scales = scales / number if self._whole.divides else scales * number
        zeros = torch.zeros_like(scales)
        table = torch.tensor(E2M1_VALUES)
        weight = QuantizedWeight(self.kind, codes, scales, zeros, self._group_size, table=table)
        return checked(weight)


def read_scales(tensors: Mapping[str, torch.Tensor], *names: str) -> torch.Tensor:
    """Return the scales of a layer in float32; whole numbers are exponents."""
    scales = next(tensors[name] for name in names if name in tensors)
    if scales.dtype == torch.uint8:
        scales = scales.view(torch.float8_e8m0fnu)
    return scales.float()

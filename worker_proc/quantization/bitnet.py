"""Checkpoints of BitNet, whose weights are -1, 0 or 1, as transformers writes them.

A layer has `weight`, uint8 `[outputs / 4, inputs]`, and `weight_scale`, one value. A code is the
weight plus 1. Bits 2 · i and 2 · i + 1 of row r are the code of output i · outputs / 4 + r. The
scale multiplies the weights of the class `autobitlinear`, and divides those of `bitlinear`.
"""

from collections.abc import Mapping

import torch

from worker_proc.quantization.headers import StoredTensor
from worker_proc.quantization.scheme import (
    CheckpointFormat,
    ReadTensor,
    Settings,
    checked,
    require,
    require_matrix,
    require_type,
)
from worker_proc.quantization.weight import CodeKind, QuantizedWeight

_SCALE = "weight_scale"
_DIVIDED, _MULTIPLIED = "bitlinear", "autobitlinear"
_BITS, _PER_BYTE = 2, 4


class TernaryScheme:
    """Codes of 2 bits, with one scale for the whole weight."""

    kind = CodeKind.INT4
    codes_rows = False

    def __init__(self, *, divides: bool) -> None:
        """`divides`: weights are divided by the stored scale."""
        self._divides = divides

    def shape(self, stored: Mapping[str, StoredTensor], read: ReadTensor) -> tuple[int, int]:
        num_rows, num_inputs = require_matrix(stored, "weight", "U8")
        require_type(require(stored, _SCALE, (), (1,)), _SCALE, "F32", "BF16", "F16")
        return num_rows * _PER_BYTE, num_inputs

    def read(self, tensors: Mapping[str, torch.Tensor]) -> QuantizedWeight:
        packed, scale = tensors["weight"], tensors[_SCALE].float().reshape(1, 1)
        codes = torch.cat([(packed >> _BITS * part) & 3 for part in range(_PER_BYTE)])
        scales = (1 / scale if self._divides else scale).expand(len(codes), 1).contiguous()
        zeros = torch.ones_like(scales)
        return checked(QuantizedWeight(self.kind, codes, scales, zeros, codes.shape[1]))


def read_bitnet(settings: Settings) -> CheckpointFormat:
    """Return the format that the settings describe."""
    settings.one_of("quantization_mode", ("offline",), "offline")
    settings.one_of("use_rms_norm", (False,), False)
    name = settings.one_of("linear_class", (_DIVIDED, _MULTIPLIED), _DIVIDED)
    scheme = TernaryScheme(divides=name == _DIVIDED)
    return CheckpointFormat("bitnet", ("weight",), frozenset({_SCALE}), lambda _: scheme)

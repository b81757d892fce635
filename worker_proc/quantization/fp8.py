"""FP8 checkpoints: numbers in e4m3 with scales of blocks, outputs, or the whole weight.

A layer has `weight`, e4m3 `[outputs, inputs]`, and `weight_scale_inv`,
`[outputs / block, inputs / block]`, the scales of blocks (DeepSeek, Qwen). Without blocks it, or
`weight_scale`, has one value, or one for each output (Ministral-3). DeepSeek-V4 names the scales
`scale`, and stores powers of two as their exponents (e8m0); its experts may be in MXFP4 (fp4.py).
Mistral-Large-4 names them `qscale_weight`.
"""

from collections.abc import Mapping

import torch

from worker_proc.quantization.fp4 import Fp4Scheme, read_scales
from worker_proc.quantization.headers import StoredTensor
from worker_proc.quantization.scheme import (
    UNUSED_PARTS,
    CheckpointFormat,
    ReadTensor,
    Settings,
    checked,
    require_matrix,
    require_scales,
)
from worker_proc.quantization.weight import CodeKind, QuantizedWeight

_WEIGHT_SCALE = "weight_scale"
_SCALES = ("weight_scale_inv", _WEIGHT_SCALE, "scale", "qscale_weight")


class Fp8Scheme:
    """Numbers in e4m3."""

    kind = CodeKind.FP8
    codes_rows = False

    def __init__(self, block: tuple[int, int] | None, *scales: str) -> None:
        """`scales` are the names that the tensor of scales may have."""
        self._scales = scales
        self._block = block

    def shape(self, stored: Mapping[str, StoredTensor], read: ReadTensor) -> tuple[int, int]:
        num_outputs, num_inputs = require_matrix(stored, "weight", "F8_E4M3")
        if self._block is not None:
            rows, columns = self._block
            shape = -(-num_outputs // rows), -(-num_inputs // columns)
            require_scales(stored, self._scales, shape)
        else:
            shapes = (), (1,), (1, 1), (num_outputs,), (num_outputs, 1)
            require_scales(stored, self._scales, *shapes)
        return num_outputs, num_inputs

    def read(self, tensors: Mapping[str, torch.Tensor]) -> QuantizedWeight:
        codes = tensors["weight"].contiguous().view(torch.uint8)
        scales = read_scales(tensors, *self._scales)
        group_size = codes.shape[1]
        if self._block is not None:
            rows, group_size = self._block
            scales = scales.repeat_interleave(rows, 0)[: len(codes)]
        else:
            scales = scales.reshape(-1, 1).expand(len(codes), 1)
        scales = scales.contiguous()
        zeros = torch.zeros_like(scales)
        return checked(QuantizedWeight(self.kind, codes, scales, zeros, group_size))


def read_fp8(settings: Settings) -> CheckpointFormat:
    """Return the format that the settings describe."""
    settings.one_of("fmt", ("e4m3",), "e4m3")
    settings.one_of("expert_dtype", ("fp8", "fp4"), "fp8")
    settings.one_of("activation_scheme", ("dynamic", "static"), "dynamic")
    block = None
    if settings.get("weight_block_size") is not None:
        block = read_block(settings, "weight_block_size")
    scheme = Fp8Scheme(block, *_SCALES)
    parts, others = UNUSED_PARTS | set(_SCALES), {"I8": Fp4Scheme("weight", "scale")}
    return CheckpointFormat("fp8", ("weight",), parts, lambda _: scheme, schemes_of_dtypes=others)


def read_fbgemm_fp8(settings: Settings) -> CheckpointFormat:
    """Return the format of FBGEMM, with a scale of each output."""
    scheme, parts = Fp8Scheme(None, _WEIGHT_SCALE), UNUSED_PARTS | {_WEIGHT_SCALE}
    return CheckpointFormat("fbgemm_fp8", ("weight",), parts, lambda _: scheme)


def read_block(settings: Settings, key: str) -> tuple[int, int]:
    """Return the outputs and inputs of a block from a key."""
    size = settings.get(key)
    if not isinstance(size, list) or not all(type(part) is int and part > 0 for part in size):
        size = []
    if len(size) != 2:
        raise settings.unsupported(key, "two lengths of at least 1")
    return size[0], size[1]

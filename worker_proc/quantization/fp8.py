"""FP8 checkpoints: numbers in e4m3 with scales of blocks, outputs, or the whole weight.

A layer has `weight`, e4m3 `[outputs, inputs]`, and `weight_scale_inv`,
`[outputs / block, inputs / block]`, the scales of blocks (DeepSeek, Qwen); or `weight_scale`, with
one value, or one for each output.
"""

from collections.abc import Mapping

import torch

from worker_proc.quantization.headers import StoredTensor
from worker_proc.quantization.scheme import (
    UNUSED_PARTS,
    CheckpointFormat,
    ReadTensor,
    Settings,
    checked,
    require,
    require_matrix,
)
from worker_proc.quantization.weight import CodeKind, QuantizedWeight


class Fp8Scheme:
    """Numbers in e4m3."""

    kind = CodeKind.FP8
    codes_rows = False

    def __init__(self, scale: str, block: tuple[int, int] | None) -> None:
        self._scale = scale
        self._block = block

    def shape(self, stored: Mapping[str, StoredTensor], read: ReadTensor) -> tuple[int, int]:
        num_outputs, num_inputs = require_matrix(stored, "weight", "F8_E4M3")
        if self._block is not None:
            rows, columns = self._block
            shape = -(-num_outputs // rows), -(-num_inputs // columns)
            require(stored, self._scale, shape)
        else:
            require(stored, self._scale, (), (1,), (1, 1), (num_outputs,), (num_outputs, 1))
        return num_outputs, num_inputs

    def read(self, tensors: Mapping[str, torch.Tensor]) -> QuantizedWeight:
        codes = tensors["weight"].contiguous().view(torch.uint8)
        scales = tensors[self._scale].float()
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
    settings.one_of("expert_dtype", ("fp8",), "fp8")
    settings.one_of("activation_scheme", ("dynamic", "static"), "dynamic")
    block, scale = None, "weight_scale"
    if settings.get("weight_block_size") is not None:
        block, scale = read_block(settings, "weight_block_size"), "weight_scale_inv"
    scheme = Fp8Scheme(scale, block)
    return CheckpointFormat("fp8", "weight", UNUSED_PARTS | {scale}, lambda _: scheme)


def read_block(settings: Settings, key: str) -> tuple[int, int]:
    """Return the outputs and inputs of a block from a key."""
    size = settings.get(key)
    if not isinstance(size, list) or not all(type(part) is int and part > 0 for part in size):
        size = []
    if len(size) != 2:
        raise settings.unsupported(key, "two lengths of at least 1")
    return size[0], size[1]

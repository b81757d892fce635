"""FP8 checkpoints: numbers in e4m3 with scales of blocks, outputs, or the whole weight.

A layer has `weight`, e4m3 `[outputs, inputs]`, and `weight_scale_inv`,
`[outputs / block, inputs / block]`, the scales of blocks (DeepSeek, Qwen); or `weight_scale`, with
one value, or one for each output. DeepSeek-V4 names the scales of blocks `scale`, and stores powers
of two as their exponents (e8m0). Its experts may be in MXFP4: `weight`, int8
`[outputs, inputs / 2]`, has two consecutive inputs in a byte, the first one in the lower bits, and
`scale`, `[outputs, inputs / 32]`, the scales of 32 inputs.
"""

from collections.abc import Mapping, Sequence

import torch

from worker_proc.quantization.headers import StoredTensor
from worker_proc.quantization.mxfp4 import E2M1_GROUP, E2M1_VALUES
from worker_proc.quantization.scheme import (
    UNUSED_PARTS,
    CheckpointFormat,
    ReadTensor,
    Settings,
    checked,
    num_groups,
    require,
    require_matrix,
    require_type,
)
from worker_proc.quantization.weight import CodeKind, QuantizedWeight

_BLOCK_SCALES = ("weight_scale_inv", "scale")


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
            _require_scales(stored, self._scales, shape)
        else:
            shapes = (), (1,), (1, 1), (num_outputs,), (num_outputs, 1)
            _require_scales(stored, self._scales, *shapes)
        return num_outputs, num_inputs

    def read(self, tensors: Mapping[str, torch.Tensor]) -> QuantizedWeight:
        codes = tensors["weight"].contiguous().view(torch.uint8)
        scales = _read_scales(tensors, self._scales)
        group_size = codes.shape[1]
        if self._block is not None:
            rows, group_size = self._block
            scales = scales.repeat_interleave(rows, 0)[: len(codes)]
        else:
            scales = scales.reshape(-1, 1).expand(len(codes), 1)
        scales = scales.contiguous()
        zeros = torch.zeros_like(scales)
        return checked(QuantizedWeight(self.kind, codes, scales, zeros, group_size))


class Fp4Scheme:
    """Numbers of 4 bits in e2m1, with powers of two as scales of 32 inputs."""

    kind = CodeKind.FP4
    codes_rows = False

    def shape(self, stored: Mapping[str, StoredTensor], read: ReadTensor) -> tuple[int, int]:
        num_outputs, num_bytes = require_matrix(stored, "weight", "I8")
        num_scales = num_groups(2 * num_bytes, E2M1_GROUP)
        _require_scales(stored, _BLOCK_SCALES, (num_outputs, num_scales))
        return num_outputs, 2 * num_bytes

    def read(self, tensors: Mapping[str, torch.Tensor]) -> QuantizedWeight:
        pairs = tensors["weight"].contiguous().view(torch.uint8)
        codes = torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(1)
        scales = _read_scales(tensors, _BLOCK_SCALES)
        zeros = torch.zeros_like(scales)
        table = torch.tensor(E2M1_VALUES)
        return checked(QuantizedWeight(self.kind, codes, scales, zeros, E2M1_GROUP, table=table))


def _require_scales(
    stored: Mapping[str, StoredTensor], names: Sequence[str], *shapes: tuple[int, ...]
) -> None:
    """Raise ValueError unless a layer has scales of one of the names and shapes."""
    name = next((name for name in names if name in stored), " or ".join(names))
    require_type(require(stored, name, *shapes), name, "F32", "BF16", "F16", "F8_E8M0", "U8")


def _read_scales(tensors: Mapping[str, torch.Tensor], names: Sequence[str]) -> torch.Tensor:
    """Return the scales of a layer in float32; whole numbers are exponents."""
    scales = next(tensors[name] for name in names if name in tensors)
    if scales.dtype == torch.uint8:
        scales = scales.view(torch.float8_e8m0fnu)
    return scales.float()


def read_fp8(settings: Settings) -> CheckpointFormat:
    """Return the format that the settings describe."""
    settings.one_of("fmt", ("e4m3",), "e4m3")
    settings.one_of("expert_dtype", ("fp8", "fp4"), "fp8")
    settings.one_of("activation_scheme", ("dynamic", "static"), "dynamic")
    if settings.get("weight_block_size") is None:
        scheme, parts = Fp8Scheme(None, "weight_scale"), UNUSED_PARTS | {"weight_scale"}
        return CheckpointFormat("fp8", "weight", parts, lambda _: scheme)
    scheme = Fp8Scheme(read_block(settings, "weight_block_size"), *_BLOCK_SCALES)
    parts, others = UNUSED_PARTS | set(_BLOCK_SCALES), {"I8": Fp4Scheme()}
    return CheckpointFormat("fp8", "weight", parts, lambda _: scheme, schemes_of_dtypes=others)


def read_block(settings: Settings, key: str) -> tuple[int, int]:
    """Return the outputs and inputs of a block from a key."""
    size = settings.get(key)
    if not isinstance(size, list) or not all(type(part) is int and part > 0 for part in size):
        size = []
    if len(size) != 2:
        raise settings.unsupported(key, "two lengths of at least 1")
    return size[0], size[1]

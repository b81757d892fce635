"""MXFP4 checkpoints of gpt-oss: experts as numbers of 4 bits, with powers of two as scales.

The weight `NAME` of a mixture, `[experts, inputs, outputs]` in the model, is stored as
`NAME_blocks`, uint8 `[experts, outputs, inputs / 32, 16]`, whose bytes hold two consecutive inputs,
the first one in the lower bits, and `NAME_scales`, uint8 `[experts, outputs, inputs / 32]`, the
exponents of the scales of 32 inputs, plus 127. All other tensors are plain.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from worker_proc.errors import CheckpointError
from worker_proc.quantization.headers import StoredTensor
from worker_proc.quantization.scheme import CheckpointFormat, Scheme, Settings, require

BLOCKS, SCALES = "_blocks", "_scales"
E2M1_GROUP = 32
"""The number of inputs of a block."""
_BYTES = E2M1_GROUP // 2
_BIAS, _NOT_A_NUMBER = 127, 255
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_VALUES = (*_MAGNITUDES, *(-value for value in _MAGNITUDES))
"""The values of the codes; the fourth bit of a code is the sign."""


class Mxfp4Scheme:
    """Numbers of 4 bits, in blocks of 32 inputs."""

    ends: tuple[str, ...] = (BLOCKS, SCALES)

    def shape(self, stored: Mapping[str, StoredTensor]) -> tuple[int, ...]:
        blocks = require(stored, BLOCKS)
        if len(blocks.shape) != 4 or blocks.shape[3] != _BYTES:
            shape = f"[experts, outputs, blocks, {_BYTES}]"
            raise ValueError(f"has {BLOCKS} of shape {list(blocks.shape)} instead of {shape}")
        require(stored, SCALES, blocks.shape[:3])
        for end in self.ends:
            if stored[end].dtype != "U8":
                raise ValueError(f"has {end} stored as {stored[end].dtype} instead of U8")
        num_experts, num_outputs, num_groups, _ = blocks.shape
        return num_experts, num_groups * E2M1_GROUP, num_outputs

    def read(
        self, slices: Mapping[str, Any], shape: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """Dequantize one expert after the other; products are exact in bfloat16."""
        weight = torch.empty(*shape, dtype=dtype)
        for number in range(len(weight)):
            blocks, scales = (slices[end][number : number + 1][0] for end in self.ends)
            if bool((scales == _NOT_A_NUMBER).any()):
                raise ValueError("has scales that are not numbers")
            weight[number] = dequantize(blocks, scales).to(dtype).t()
        return weight


def dequantize(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return `[outputs, inputs]` in float32 for the blocks and scales of one expert."""
    values = torch.tensor(E2M1_VALUES)
    codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)
    exponents = scales.int().sub_(_BIAS).unsqueeze(-1)
    return torch.ldexp(values[codes.int()], exponents).flatten(-2)


def read_mxfp4(settings: Settings) -> CheckpointFormat:
    """Return the format; its settings name what is not quantized, which the tensors show, too."""
    method = settings.one_of("quant_method", ("mxfp4",))
    return CheckpointFormat(method, (), frozenset(), _no_scheme, Mxfp4Scheme())


def _no_scheme(layer: str) -> Scheme:
    raise CheckpointError(f"{layer} is stored as codes, which mxfp4 has for experts only")

"""A layout of quantized weights, and codes that several layouts share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tests.worker.checkpoints import SHAPE

Encoded = tuple[dict[str, torch.Tensor], torch.Tensor]
"""The tensors of a layer, and the weight that they stand for, in float64."""
WIDE: dict[str, Any] = SHAPE | {"hidden_size": 128, "intermediate_size": 256}
"""Inputs of every layer are whole groups of 128, or half a group."""


@dataclass(frozen=True)
class Layout:
    """A format, its settings in config.json, and how it stores a weight."""

    name: str
    settings: dict[str, Any]
    encode: Callable[[torch.Tensor], Encoded]
    description: str = ""
    """The name of the format as readiness has it."""


@dataclass(frozen=True)
class Grouped:
    """Codes from 0 on, `[outputs, inputs]`, and what the groups of inputs have in common."""

    codes: torch.Tensor
    scales: torch.Tensor  # [outputs, groups]
    zeros: torch.Tensor  # [outputs, groups]
    group_of: torch.Tensor  # of each input

    @property
    def values(self) -> torch.Tensor:
        shifted = self.codes - self.zeros[:, self.group_of]
        return shifted.double() * self.scales.double()[:, self.group_of]


def group_codes(
    weight: torch.Tensor,
    num_bits: int,
    group_size: int,
    *,
    is_symmetric: bool,
    scale_dtype: torch.dtype,
    group_of: torch.Tensor | None = None,
) -> Grouped:
    """Round a weight; -1 stands for one group of all inputs."""
    num_inputs = weight.shape[1]
    if group_of is None:
        group_of = torch.arange(num_inputs) // (num_inputs if group_size == -1 else group_size)
    most = 2**num_bits - 1
    scales, zeros = [], []
    for group in range(int(group_of.max()) + 1):
        part = weight[:, group_of == group]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        if is_symmetric:
            scale = torch.maximum(-low, high) * 2 / most
            zero = torch.full_like(scale, 2 ** (num_bits - 1))
        else:
            scale = (high - low) / most
            zero = (-low / scale).round().clamp(0, most)
        scales.append(scale.to(scale_dtype))
        zeros.append(zero.int())
    scale_of, zero_of = torch.stack(scales, 1), torch.stack(zeros, 1)
    codes = (weight / scale_of.float()[:, group_of]).round() + zero_of[:, group_of]
    return Grouped(codes.clamp(0, most).int(), scale_of, zero_of, group_of)


def pack_words(codes: torch.Tensor, num_bits: int, order: Sequence[int] = ()) -> torch.Tensor:
    """Pack rows of codes into int32, the first one of each word in its lowest bits.

    `order` states which code of each word comes first, second and further.
    """
    per_word = 32 // num_bits
    words = codes.long().unflatten(1, (-1, per_word))
    packed = torch.zeros(words.shape[:2], dtype=torch.int64)
    for place, code in enumerate(order or range(per_word)):
        packed |= words[:, :, code] << num_bits * place
    return (packed - (packed >> 31 << 32)).int()  # the highest bit is the sign


def compressed_settings(
    format: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None
) -> Any:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }

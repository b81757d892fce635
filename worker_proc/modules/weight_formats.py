"""The formats in which a model's weights are packed: plain, or rounded for `--quantization`.

Codes are computed when weights are packed. In a checkpoint whose layers are already coded, only the
output layer is rounded. An embedding is never rounded: if the output layer shares its weight, the
output layer has separate codes.
"""

from typing import NamedTuple

from protocol.config import Quantization
from worker_proc.native.packed_weights import Format


class Formats(NamedTuple):
    """The formats in which a model's weights are packed."""

    layers: Format = Format.UNITS
    head: Format = Format.UNITS
    """For the output layer, which computes logits."""


PLAIN = Formats()
WEIGHT_FORMATS = {
    None: PLAIN,
    Quantization.W8A16: Formats(Format.INT8, head=Format.INT8),
    Quantization.W4A16: Formats(Format.INT4, head=Format.INT8),
    Quantization.W8A8: Formats(Format.INT8_FOR_CODES, head=Format.INT8),
}
"""With 4 bits, the output layer would cause nearly half of the error (docs/quantization.md)."""


def formats_of(quantization: Quantization | None, *, is_quantized: bool) -> Formats:
    """Return the formats in which a model's plain weights are packed.

    If the checkpoint `is_quantized`, only the output layer is rounded: the other plain layers were
    left out of its quantization on purpose.
    """
    formats = WEIGHT_FORMATS[quantization]
    return PLAIN._replace(head=formats.head) if is_quantized else formats

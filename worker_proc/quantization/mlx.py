"""Checkpoints of MLX, as mlx-lm writes them: affine codes of 2 to 8 bits, MXFP4, NVFP4 and MXFP8.

A layer has `weight`, uint32 `[outputs, words]`, and `scales` and `biases`, `[outputs, groups]`. A
weight is code · scale + bias. The words of an output hold the codes of its inputs, lowest bits
first; a code may span two words. Codes in floating point are numbers in e2m1 or e4m3; there are no
biases, and scales are uint8: powers of two (e8m0), or numbers in e4m3 (NVFP4). Embeddings have the
same layout. The experts of a mixture share one tensor with an additional first dimension, under
separate names. `quantization` in config.json has the settings of all layers, and exceptions by
layer name.
"""

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

import torch

from worker_proc.quantization.headers import StoredTensor
from worker_proc.quantization.methods import MLX, check_mlx_type
from worker_proc.quantization.mxfp4 import E2M1_VALUES
from worker_proc.quantization.scheme import (
    CheckpointFormat,
    ReadTensor,
    Scheme,
    Settings,
    checked,
    require,
    require_matrix,
    require_type,
)
from worker_proc.quantization.weight import CodeKind, QuantizedWeight

_BITS = (2, 3, 4, 5, 6, 8)
_GROUP_SIZES = (32, 64, 128)
_PIECE_BYTES = 2**20
"""Size of the codes that are unpacked at a time."""
_EXPERTS = re.compile(r"(.*\.)switch_mlp\.(gate|up|down)_proj")
_MIXTRAL_NAMES = {"gate": "w1", "down": "w2", "up": "w3"}


class FloatMode(NamedTuple):
    """A mode whose codes are floating-point numbers."""

    kind: CodeKind
    group_size: int
    scale_type: torch.dtype


_AFFINE = "affine"
_FLOAT_MODES = {
    "mxfp4": FloatMode(CodeKind.FP4, 32, torch.float8_e8m0fnu),
    "nvfp4": FloatMode(CodeKind.FP4, 16, torch.float8_e4m3fn),
    "mxfp8": FloatMode(CodeKind.FP8, 32, torch.float8_e8m0fnu),
}


class AffineScheme:
    """Integer codes with a scale and a minimum for each group of inputs."""

    codes_rows = False

    def __init__(self, num_bits: int, group_size: int) -> None:
        self.kind = CodeKind.INT4 if num_bits <= CodeKind.INT4.bits else CodeKind.INT8
        self._num_bits, self._group_size = num_bits, group_size

    def shape(self, stored: Mapping[str, StoredTensor], read: ReadTensor) -> tuple[int, int]:
        num_outputs, num_inputs = _shape_of_words(stored, self._num_bits, self._group_size)
        for name in ("scales", "biases"):
            tensor = require(stored, name, (num_outputs, num_inputs // self._group_size))
            require_type(tensor, name, "F32", "BF16", "F16")
        return num_outputs, num_inputs

    def read(self, tensors: Mapping[str, torch.Tensor]) -> QuantizedWeight:
        codes = unpack_bits(tensors["weight"], self._num_bits)
        scales, minimums = tensors["scales"].float(), tensors["biases"].float()
        zeros = torch.zeros_like(scales)
        weight = QuantizedWeight(
            self.kind, codes, scales, zeros, self._group_size, minimums=minimums
        )
        return checked(weight)


class FloatScheme:
    """Floating-point numbers with a scale for each group of inputs."""

    codes_rows = False

    def __init__(self, mode: FloatMode) -> None:
        self.kind, self._mode = mode.kind, mode

    def shape(self, stored: Mapping[str, StoredTensor], read: ReadTensor) -> tuple[int, int]:
        size = self._mode.group_size
        num_outputs, num_inputs = _shape_of_words(stored, self.kind.bits, size)
        if "biases" in stored:
            raise ValueError("has biases, which numbers in floating point have not")
        require_type(require(stored, "scales", (num_outputs, num_inputs // size)), "scales", "U8")
        return num_outputs, num_inputs

    def read(self, tensors: Mapping[str, torch.Tensor]) -> QuantizedWeight:
        codes = unpack_bits(tensors["weight"], self.kind.bits)
        scales = tensors["scales"].view(self._mode.scale_type).float()
        table = torch.tensor(E2M1_VALUES) if self.kind is CodeKind.FP4 else None
        zeros = torch.zeros_like(scales)
        size = self._mode.group_size
        return checked(QuantizedWeight(self.kind, codes, scales, zeros, size, table=table))


def _shape_of_words(
    stored: Mapping[str, StoredTensor], num_bits: int, group_size: int
) -> tuple[int, int]:
    """Return the outputs and inputs that the words of a layer hold codes of."""
    num_outputs, num_words = require_matrix(stored, "weight", "U32")
    num_inputs, rest = divmod(num_words * 32, num_bits)
    if rest or num_inputs % group_size:
        raise ValueError(
            f"has rows of {num_words} words, which are not codes of {num_bits} bits in groups of"
            f" {group_size}"
        )
    return num_outputs, num_inputs


def unpack_bits(words: torch.Tensor, num_bits: int) -> torch.Tensor:
    """Return codes as uint8, `[rows, words * 32 / num_bits]`, the first one in the lowest bits."""
    num_rows, num_words = words.shape
    codes = torch.empty((num_rows, num_words * 32 // num_bits), dtype=torch.uint8)
    per_piece = max(_PIECE_BYTES // max(codes.shape[1], 1), 1)
    pieces = zip(words.split(per_piece), codes.split(per_piece), strict=True)
    for stored, unpacked in pieces:
        _unpack_rows(stored, num_bits, unpacked)
    return codes


def _unpack_rows(words: torch.Tensor, num_bits: int, codes: torch.Tensor) -> None:
    """Unpack rows into `codes`; this temporarily takes several times their memory."""
    octets = words.contiguous().view(torch.uint8)
    size = math.lcm(num_bits, 8) // 8
    packs = octets.unflatten(1, (-1, size))
    joined = torch.zeros(packs.shape[:2], dtype=torch.int64)
    for place in range(size):
        joined |= packs[:, :, place].long() << 8 * place
    num_codes = 8 * size // num_bits
    for place in range(num_codes):
        codes[:, place::num_codes] = (joined >> num_bits * place) & (2**num_bits - 1)


def name_of_expert(layer: str, number: int) -> str:
    """Return the name of one expert's layer in transformers' checkpoints."""
    found = _EXPERTS.fullmatch(layer)
    if found is None:
        raise ValueError("has weights of several matrices")
    before, part = found.groups()
    if before.endswith("block_sparse_moe."):
        return f"{before}experts.{number}.{_MIXTRAL_NAMES[part]}"
    return f"{before}experts.{number}.{part}_proj"


def read_mlx(settings: Settings, model_type: str) -> CheckpointFormat:
    """Return the format that the settings describe."""
    check_mlx_type(model_type)
    common = _read_scheme(settings)
    own = {
        name: _read_scheme(settings.section(name))
        for name, value in settings.items()
        if isinstance(value, dict)
    }
    return CheckpointFormat(
        MLX,
        ("weight",),
        frozenset({"scales", "biases"}),
        lambda layer: own.get(layer, common),
        name_of_expert=name_of_expert,
    )


def _read_scheme(settings: Settings) -> Scheme:
    """Return the scheme of settings; those of one layer without a mode are affine, too."""
    name = settings.one_of("mode", (_AFFINE, *_FLOAT_MODES), _AFFINE)
    if name != _AFFINE:
        mode = _FLOAT_MODES[name]
        settings.one_of("bits", (mode.kind.bits,), mode.kind.bits)
        settings.one_of("group_size", (mode.group_size,), mode.group_size)
        return FloatScheme(mode)
    return AffineScheme(settings.one_of("bits", _BITS), settings.one_of("group_size", _GROUP_SIZES))

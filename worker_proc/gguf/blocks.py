"""Codes, scales and minimums from the blocks of GGUF's quantized types.

A row of a weight is a sequence of blocks. Blocks of 32 values have a scale in fp16, and some a
minimum; those of 256 values, the K types, have scales of their 32 or 16 values in multiples of one
in fp16. Codes of 5 and 6 bits are widened to 8. Blocks of MXFP4 have a power of two as their scale,
and numbers of 4 bits.
"""

from collections.abc import Callable

import torch

from worker_proc.gguf.types import TensorType
from worker_proc.quantization.mxfp4 import E2M1_GROUP, E2M1_VALUES
from worker_proc.quantization.weight import CodeKind, Multiples, QuantizedWeight


def code_kind(type: TensorType) -> CodeKind:
    """Return what the codes of a type of blocks become."""
    if type is TensorType.MXFP4:
        return CodeKind.FP4
    is_small = type in (TensorType.Q4_0, TensorType.Q4_1, TensorType.Q4_K)
    return CodeKind.INT4 if is_small else CodeKind.INT8


def read_blocks(type: TensorType, blocks: torch.Tensor) -> QuantizedWeight:
    """Return the weight that blocks stand for: uint8, `[num_outputs, blocks of a row, bytes]`."""
    return _READERS[type](blocks)


def _halves(parts: torch.Tensor) -> torch.Tensor:
    """Return fp16 numbers, `[num_outputs, blocks]`, of two bytes each."""
    return parts.contiguous().view(torch.float16).squeeze(-1)


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Return the lower halves of `[..., n]` bytes, and behind them the upper halves."""
    return torch.cat((packed & 15, packed >> 4), -1)


def _bits(packed: torch.Tensor, shifts: range) -> torch.Tensor:
    """Return `[..., len(shifts), n]`: one bit of each of n bytes after the other."""
    places = torch.tensor(list(shifts), dtype=torch.uint8).unsqueeze(1)
    return packed.unsqueeze(-2) >> places & 1


def _weight(
    kind: CodeKind,
    codes: torch.Tensor,
    scales: torch.Tensor,
    *,
    zero: int = 0,
    minimums: torch.Tensor | None = None,
) -> QuantizedWeight:
    """Return a weight of groups of 32 inputs; codes are `[num_outputs, blocks, 32]`."""
    scales = scales.float()
    return QuantizedWeight(
        kind,
        codes.flatten(1),
        scales,
        torch.full_like(scales, zero),
        group_size=32,
        minimums=None if minimums is None else minimums.float(),
    )


def _q4_0(blocks: torch.Tensor) -> QuantizedWeight:
    codes = _nibbles(blocks[..., 2:])
    return _weight(CodeKind.INT4, codes, _halves(blocks[..., :2]), zero=8)


def _q4_1(blocks: torch.Tensor) -> QuantizedWeight:
    scales, minimums = _halves(blocks[..., :2]), _halves(blocks[..., 2:4])
    return _weight(CodeKind.INT4, _nibbles(blocks[..., 4:]), scales, minimums=minimums)


def _with_fifth_bits(packed: torch.Tensor, fifth: torch.Tensor) -> torch.Tensor:
    """Return codes of 5 bits: 16 bytes with two codes each, and 4 bytes with a bit of each code."""
    bits = fifth.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8) & 1
    return _nibbles(packed) | bits.flatten(-2) << 4


def _q5_0(blocks: torch.Tensor) -> QuantizedWeight:
    codes = _with_fifth_bits(blocks[..., 6:], blocks[..., 2:6])
    return _weight(CodeKind.INT8, codes, _halves(blocks[..., :2]), zero=16)


def _q5_1(blocks: torch.Tensor) -> QuantizedWeight:
    codes = _with_fifth_bits(blocks[..., 8:], blocks[..., 4:8])
    scales, minimums = _halves(blocks[..., :2]), _halves(blocks[..., 2:4])
    return _weight(CodeKind.INT8, codes, scales, minimums=minimums)


def _q8_0(blocks: torch.Tensor) -> QuantizedWeight:
    codes = blocks[..., 2:] ^ 128  # from signed to counted from 0
    return _weight(CodeKind.INT8, codes, _halves(blocks[..., :2]), zero=128)


def _nested(
    kind: CodeKind,
    codes: torch.Tensor,
    scales: Multiples,
    *,
    zero: int = 0,
    minimums: Multiples | None = None,
) -> QuantizedWeight:
    """Return a weight of groups whose scales are multiples; codes are `[num_outputs, ...]`."""
    values = scales.values()
    codes = codes.flatten(1)
    return QuantizedWeight(
        kind,
        codes,
        values,
        torch.full_like(values, zero),
        group_size=codes.shape[1] // values.shape[1],
        minimums=None if minimums is None else minimums.values(),
        scale_multiples=scales,
        minimum_multiples=minimums,
    )


def _sixes(blocks: torch.Tensor) -> tuple[Multiples, Multiples]:
    """Return scales and minimums of Q4_K and Q5_K: 8 of 6 bits each, in 12 bytes.

    The first four bytes have four scales, the next four minimums. The other eight numbers have
    their lower bits in the last bytes, and their two upper ones above those of the first numbers.
    """
    first, second, rest = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat((first & 63, rest & 15 | first >> 6 << 4), -1)
    minimums = torch.cat((second & 63, rest >> 4 | second >> 6 << 4), -1)
    units, lows = _halves(blocks[..., :2]), _halves(blocks[..., 2:4])
    return (
        Multiples(scales.view(torch.int8).flatten(1), units),
        Multiples(minimums.view(torch.int8).flatten(1), -lows),  # they are subtracted
    )


def _pairs_of_32(packed: torch.Tensor) -> torch.Tensor:
    """Return `[..., 8, 32]` codes of 128 bytes: those of 32 bytes are two groups."""
    pairs = _nibbles(packed.unflatten(-1, (4, 32)))
    return pairs.reshape(*packed.shape[:-1], 8, 32)


def _q4_k(blocks: torch.Tensor) -> QuantizedWeight:
    scales, minimums = _sixes(blocks)
    return _nested(CodeKind.INT4, _pairs_of_32(blocks[..., 16:]), scales, minimums=minimums)


def _q5_k(blocks: torch.Tensor) -> QuantizedWeight:
    scales, minimums = _sixes(blocks)
    codes = _pairs_of_32(blocks[..., 48:]) | _bits(blocks[..., 16:48], range(8)) << 4
    return _nested(CodeKind.INT8, codes, scales, minimums=minimums)


def _q6_k(blocks: torch.Tensor) -> QuantizedWeight:
    """Each half of a block has 64 bytes with the lower bits of 128 codes, and 32 with the upper."""
    low = _nibbles(blocks[..., :128].unflatten(-1, (2, 64)))
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).unsqueeze(1)
    high = blocks[..., 128:192].unflatten(-1, (2, 1, 32)) >> shifts & 3
    codes = low | high.flatten(-2) << 4
    scales = Multiples(
        blocks[..., 192:208].contiguous().view(torch.int8).flatten(1), _halves(blocks[..., 208:])
    )
    return _nested(CodeKind.INT8, codes, scales, zero=32)


def _mxfp4(blocks: torch.Tensor) -> QuantizedWeight:
    scales = blocks[..., 0].contiguous().view(torch.float8_e8m0fnu).float()
    codes, zeros = _nibbles(blocks[..., 1:]).flatten(1), torch.zeros_like(scales)
    table = torch.tensor(E2M1_VALUES)
    return QuantizedWeight(CodeKind.FP4, codes, scales, zeros, E2M1_GROUP, table=table)


_READERS: dict[TensorType, Callable[[torch.Tensor], QuantizedWeight]] = {
    TensorType.Q4_0: _q4_0,
    TensorType.Q4_1: _q4_1,
    TensorType.Q5_0: _q5_0,
    TensorType.Q5_1: _q5_1,
    TensorType.Q8_0: _q8_0,
    TensorType.Q4_K: _q4_k,
    TensorType.Q5_K: _q5_k,
    TensorType.Q6_K: _q6_k,
    TensorType.MXFP4: _mxfp4,
}

"""The types of tensors in GGUF files, by their numbers there, and the sizes of their blocks."""

import enum
from typing import NamedTuple


class Block(NamedTuple):
    """The smallest unit of a type: values that share a scale, or a single value."""

    num_values: int
    num_bytes: int


class TensorType(enum.IntEnum):
    """Types that are read without a further package."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    BF16 = 30
    MXFP4 = 39

    @property
    def block(self) -> Block:
        return _BLOCKS[self]

    @property
    def is_plain(self) -> bool:
        """True if values are stored as numbers, and not as blocks of codes."""
        return self.block.num_values == 1


_BLOCKS = {
    TensorType.F32: Block(1, 4),
    TensorType.F16: Block(1, 2),
    TensorType.Q4_0: Block(32, 18),
    TensorType.Q4_1: Block(32, 20),
    TensorType.Q5_0: Block(32, 22),
    TensorType.Q5_1: Block(32, 24),
    TensorType.Q8_0: Block(32, 34),
    TensorType.Q4_K: Block(256, 144),
    TensorType.Q5_K: Block(256, 176),
    TensorType.Q6_K: Block(256, 210),
    TensorType.BF16: Block(1, 2),
    TensorType.MXFP4: Block(32, 17),
}
_OTHER_NAMES = {
    **{9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS"},
    **{18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS"},
    **{24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0"},
    35: "TQ2_0",
}


READ = frozenset(map(int, TensorType))
"""The numbers of the types that are read."""


def type_name(number: int) -> str:
    """Return the name of a type, which need not be one that is read."""
    if number in READ:
        return TensorType(number).name
    return _OTHER_NAMES.get(number, f"type {number}")

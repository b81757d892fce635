"""Types of tensors for which there are no kernels: the `gguf` package dequantizes them.

It is installed by the extra `gguf`, and imported for these types only.
"""

from typing import TYPE_CHECKING, Any

from worker_proc.gguf.types import READ, Block, TensorType, type_name

if TYPE_CHECKING:
    import numpy as np


def why_not_dequantized(number: int) -> str:
    """Return why a type cannot be read, or an empty text."""
    known = ", ".join(one.name for one in TensorType)
    stated = f"is stored as {type_name(number)}; supported: {known}"
    try:
        quants = _package().quants
    except ImportError:
        return f"{stated}, and others with the package gguf: pip install gguf"
    try:
        block = further_block(number)
        quants.dequantize(_empty(block.num_bytes), _type(number))
    except (ValueError, KeyError, NotImplementedError):
        return f"{stated}, and others that the package gguf dequantizes"
    return ""


def further_block(number: int) -> Block:
    """Return what a type stores together; KeyError or ValueError: it is not known."""
    return Block(*_package().GGML_QUANT_SIZES[_type(number)])


def dequantize(blocks: "np.ndarray[Any, Any]", number: int) -> "np.ndarray[Any, Any]":
    """Return the values in float32 of uint8 `[rows, bytes]`."""
    values: np.ndarray[Any, Any] = _package().quants.dequantize(blocks, _type(number))
    return values


def _type(number: int) -> Any:
    assert number not in READ
    return _package().GGMLQuantizationType(number)


def _empty(num_bytes: int) -> "np.ndarray[Any, Any]":
    import numpy as np

    return np.zeros((1, num_bytes), dtype=np.uint8)


def _package() -> Any:
    import gguf

    return gguf

"""Checkpoints of bitsandbytes, as transformers writes them.

With 8 bits a layer has `weight`, int8 `[outputs, inputs]`, and `SCB`, float32 `[outputs]`: the
greatest magnitude of each output, which is code 127.

With 4 bits `weight` is uint8 `[outputs * inputs / 2, 1]`, whose bytes hold two consecutive inputs,
the first one in the higher bits. A code is an index into `weight.quant_map`, float32 `[16]`, whose
values are multiplied by the scale of a block of consecutive inputs, `weight.absmax`, float32.
Scales may be codes, too: uint8 indices into `weight.nested_quant_map`, float32 `[256]`, whose
values are multiplied by the scale of a block of scales, `weight.nested_absmax`, and then added to
an offset.
`weight.quant_state.bitsandbytes__TYPE` is a text in JSON with the shape, the lengths of blocks and
that offset.
"""

import json
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from worker_proc.quantization.headers import StoredTensor
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

_STATE = "weight.quant_state.bitsandbytes__"
_ABSMAX, _MAP = "weight.absmax", "weight.quant_map"
_NESTED_ABSMAX, _NESTED_MAP = "weight.nested_absmax", "weight.nested_quant_map"
_KINDS = {"nf4": CodeKind.NF4, "fp4": CodeKind.FP4}
_GREATEST = 127
_MAX_STATE_BYTES = 2**16


class Int8Scheme:
    """Whole numbers of 8 bits, with a scale for each output."""

    kind = CodeKind.INT8
    codes_rows = False

    def shape(self, stored: Mapping[str, StoredTensor], read: ReadTensor) -> tuple[int, int]:
        num_outputs, num_inputs = require_matrix(stored, "weight", "I8")
        require_type(require(stored, "SCB", (num_outputs,)), "SCB", "F32")
        if "weight_format" in stored:
            require_type(require(stored, "weight_format", (), (1,)), "weight_format", "U8")
            if int(read("weight_format")) != 0:
                raise ValueError("has a weight_format other than rows")
        return num_outputs, num_inputs

    def read(self, tensors: Mapping[str, torch.Tensor]) -> QuantizedWeight:
        codes = tensors["weight"].contiguous().view(torch.uint8) ^ 128
        scales = (tensors["SCB"].float() / _GREATEST).unsqueeze(1)
        zeros = torch.full_like(scales, 128)
        return checked(QuantizedWeight(self.kind, codes, scales, zeros, codes.shape[1]))


class _State(NamedTuple):
    """The contents of a layer's text."""

    shape: tuple[int, int]
    block_size: int
    nested_block_size: int | None
    offset: float


class TableScheme:
    """Codes of 4 bits, which are indices into a table of 16 values."""

    codes_rows = False

    def __init__(self, name: str) -> None:
        self.kind = _KINDS[name]
        self._state = f"{_STATE}{name}"

    def shape(self, stored: Mapping[str, StoredTensor], read: ReadTensor) -> tuple[int, int]:
        text = require(stored, self._state)
        require_type(text, self._state, "U8")
        if math.prod(text.shape) > _MAX_STATE_BYTES:
            raise ValueError(f"has a {self._state} of more than {_MAX_STATE_BYTES} bytes")
        state = _read_state(read(self._state))
        count = math.prod(state.shape)
        num_blocks = -(-count // state.block_size)
        parts = {
            "weight": ("U8", (-(-count // 2), 1)),
            _MAP: ("F32", (16,)),
            _ABSMAX: ("F32", (num_blocks,)),
        }
        if state.nested_block_size is not None:
            parts[_ABSMAX] = ("U8", (num_blocks,))
            parts[_NESTED_ABSMAX] = ("F32", (-(-num_blocks // state.nested_block_size),))
            parts[_NESTED_MAP] = ("F32", (256,))
        for name, (dtype, shape) in parts.items():
            require_type(require(stored, name, shape), name, dtype)
        return state.shape

    def read(self, tensors: Mapping[str, torch.Tensor]) -> QuantizedWeight:
        state = _read_state(tensors[self._state])
        num_outputs, num_inputs = state.shape
        octets = tensors["weight"].flatten()
        codes = torch.stack((octets >> 4, octets & 15), dim=-1).flatten()
        codes = codes[: math.prod(state.shape)].view(state.shape)
        scales = tensors[_ABSMAX]
        if state.nested_block_size is not None:
            own = tensors[_NESTED_ABSMAX].repeat_interleave(state.nested_block_size)
            scales = tensors[_NESTED_MAP][scales.int()] * own[: len(scales)] + state.offset
        group_size = state.block_size
        if num_inputs % group_size:  # blocks cross the ends of rows
            scales = scales.repeat_interleave(group_size)[: math.prod(state.shape)]
            group_size = 1
        scales = scales.float().view(num_outputs, -1)
        zeros = torch.zeros_like(scales)
        table = tensors[_MAP].float()
        return checked(QuantizedWeight(self.kind, codes, scales, zeros, group_size, table=table))


def _read_state(text: torch.Tensor) -> _State:
    """Return the contents of a layer's text; raise ValueError if it is invalid."""
    try:
        content = json.loads(bytes(text.flatten().tolist()))
        nested = content.get("nested_blocksize")
        num_outputs, num_inputs = map(int, content["shape"])
        state = _State(
            (num_outputs, num_inputs),
            int(content["blocksize"]),
            None if nested is None else int(nested),
            float(content.get("nested_offset", 0.0)),
        )
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"has a {_STATE[:-2]} that cannot be read: {error}") from error
    except RecursionError as error:
        raise ValueError(f"has a {_STATE[:-2]} that is nested too deeply") from error
    if min(num_outputs, num_inputs, state.block_size, state.nested_block_size or 1) < 1:
        raise ValueError(f"has a {_STATE[:-2]} with sizes below 1")
    return state


def read_bitsandbytes(settings: Settings) -> CheckpointFormat:
    """Return the format that the settings describe."""
    if settings.one_of("load_in_8bit", (True, False), False):
        parts, scheme = frozenset({"SCB", "weight_format"}), _always(Int8Scheme())
    else:
        settings.one_of("load_in_4bit", (True,))
        settings.one_of("bnb_4bit_quant_storage", ("uint8",), "uint8")
        name = settings.one_of("bnb_4bit_quant_type", tuple(_KINDS), "fp4")
        parts = frozenset({_ABSMAX, _MAP, _NESTED_ABSMAX, _NESTED_MAP, f"{_STATE}{name}"})
        scheme = _always(TableScheme(name))
    return CheckpointFormat("bitsandbytes", ("weight",), parts, scheme)


def _always(scheme: Scheme) -> Callable[[str], Scheme]:
    return lambda _: scheme

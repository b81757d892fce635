"""Instructions of a program over packed weights, and the rows of its buffers."""

from typing import Any

import torch

from worker_proc.native.packed_weights import (
    CODES,
    GROUPED,
    PANEL_OUTPUTS,
    SCALE_TYPES,
    UNIT_STEP,
    Format,
    PackedWeight,
    round_up,
)
from worker_proc.native.structures import Instruction, Kind

_ROW_BYTES = 64
_CODED_ROW_BYTES = 64  # size of `CodedRow` in products/coded_rows.h, which the codes follow
_ALIAS_BYTES = 2048
"""With a stride of a multiple of it, rows would share few sets of the L1 cache."""


def projection(weight: PackedWeight, **fields: Any) -> Instruction:
    """Return the instruction for a product with a packed weight, from buffer 0 to buffer 1.

    Its rows must be in the weight's order of inputs.
    """
    instruction = Instruction(
        weight=weight.panels.data_ptr(),
        scales=None if weight.scales is None else weight.scales.data_ptr(),
        format=weight.format,
        bias=None if weight.bias is None else weight.bias.data_ptr(),
        size=weight.num_inputs,
        num_units=weight.num_units,
        num_pairs=weight.num_pairs,
        **{"kind": Kind.PROJECT, "target": 1, "factor": 1.0, **fields},
    )
    if weight.grouping is not None and weight.scales is not None:
        for name, tensor in weight.grouping.tensors.items():
            setattr(instruction, name, tensor.data_ptr())
        if weight.grouping.table is not None:
            instruction.table = weight.grouping.table.data_ptr()
        instruction.scale_type = SCALE_TYPES[weight.scales.dtype]
        instruction.zero = weight.grouping.zero
        instruction.group_inputs = weight.grouping.num_inputs
        instruction.section_inputs = weight.grouping.section_inputs
    return instruction


def embedding(table: "torch.Tensor | PackedWeight", num_tokens: int, **fields: Any) -> Instruction:
    """Return the instruction that makes the rows of tokens, of a table or of a weight's outputs.

    A weight must be in grouped codes, with its inputs not permuted.
    """
    fields = {"factor": 1.0, "num_outputs": num_tokens, **fields, "kind": Kind.EMBED}
    if isinstance(table, PackedWeight):
        assert table.format in GROUPED
        assert table.order is None
        return projection(table, **{"target": 0, **fields})
    return Instruction(weight=table.data_ptr(), size=table.shape[1], **fields)


def row_stride(width: int, itemsize: int) -> int:
    """Return the bytes between rows of a program's buffer, which have room for whole panels."""
    return _without_alias(round_up(width, PANEL_OUTPUTS) * itemsize)


def coded_stride(num_inputs: int) -> int:
    """Return the bytes between rows of codes for `num_inputs` inputs."""
    tile_inputs = CODES[Format.INT8_FOR_CODES].per_unit * UNIT_STEP
    return _without_alias(_CODED_ROW_BYTES + round_up(num_inputs, tile_inputs))


def _without_alias(stride: int) -> int:
    return stride + _ROW_BYTES if stride % _ALIAS_BYTES == 0 else stride

"""Launches the products whose rows do not depend on the batch."""

import torch
import triton

from worker_proc.cuda.product_kernels import product_kernel

TILE_ROWS, TILE_OUTPUTS = 64, 64
TILE_BYTES = 128
"""The bytes of a row's inputs in a tile."""


def multiply(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return rows · weightᵀ + bias for `[..., inputs]` and `[outputs, inputs]`.

    The tiles depend only on the dtype.
    """
    flat = rows.reshape(-1, rows.shape[-1]).contiguous()
    (num_rows, num_inputs), num_outputs = flat.shape, len(weight)
    out = flat.new_empty(num_rows, num_outputs)
    grid = triton.cdiv(num_rows, TILE_ROWS), triton.cdiv(num_outputs, TILE_OUTPUTS)
    product_kernel[grid](
        *(flat, weight.contiguous(), bias, out, num_rows),
        NUM_INPUTS=num_inputs,
        NUM_OUTPUTS=num_outputs,
        HAS_BIAS=bias is not None,
        TILE_ROWS=TILE_ROWS,
        TILE_OUTPUTS=TILE_OUTPUTS,
        TILE_INPUTS=TILE_BYTES // flat.element_size(),
    )
    return out.view(*rows.shape[:-1], num_outputs)

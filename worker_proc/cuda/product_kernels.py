"""Matrix products in Triton whose rows do not depend on the number of rows.

cuBLAS chooses tiles, and may divide the sums over inputs, by the shape of a product. Here every
product has the same tiles, and one program sums each output in the order of the inputs.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows"])
def product_kernel(
    rows,
    matrix,
    bias,
    out,
    num_rows,
    NUM_INPUTS: tl.constexpr,
    NUM_OUTPUTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_OUTPUTS: tl.constexpr,
    TILE_INPUTS: tl.constexpr,
):
    """out = rows @ matrix.T + bias, all contiguous. Grid: tiles of rows, tiles of outputs."""
    row = tl.program_id(0).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    output = tl.program_id(1).to(tl.int64) * TILE_OUTPUTS + tl.arange(0, TILE_OUTPUTS)
    is_row, is_output = row < num_rows, output < NUM_OUTPUTS
    place = tl.arange(0, TILE_INPUTS)
    sums = tl.zeros([TILE_ROWS, TILE_OUTPUTS], tl.float32)
    for first in range(0, NUM_INPUTS, TILE_INPUTS):
        is_input = first + place < NUM_INPUTS
        x = tl.load(
            rows + row[:, None] * NUM_INPUTS + first + place[None, :],
            mask=is_row[:, None] & is_input[None, :],
            other=0.0,
        )
        y = tl.load(
            matrix + output[None, :] * NUM_INPUTS + first + place[:, None],
            mask=is_output[None, :] & is_input[:, None],
            other=0.0,
        )
        sums = tl.dot(x, y, sums, input_precision="ieee")
    if HAS_BIAS:
        sums += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)[None, :]
    tl.store(
        out + row[:, None] * NUM_OUTPUTS + output[None, :],
        sums.to(out.dtype.element_ty),
        mask=is_row[:, None] & is_output[None, :],
    )

"""Finds the slots of tokens in the blocks of the KV cache, and stores keys and values there.

Keys are stored as [blocks, block size, KV heads, head dimension], and so are values.

The step's arrays, int32: `first_rows` [P + 1], the row of each part's first token; `starts` [P],
its position; `table_rows` [P], its row in the block table; `kept_from` [P], the first position
whose KV is kept.
"""

import triton
import triton.language as tl

# Slices of one array, whose alignment varies. A kernel would be compiled for each alignment.
BY_PART = ["num_parts", "first_rows", "starts", "table_rows", "kept_from"]


@triton.jit
def part_at(first_rows, num_parts, index, TOKENS: tl.constexpr, STEP: tl.constexpr):
    """Return the last part p with first_rows[p] // TOKENS + p * STEP <= index."""
    low = num_parts * 0
    high = num_parts - 1
    while low < high:
        middle = (low + high + 1) // 2
        first = tl.load(first_rows + middle) // TOKENS + middle * STEP
        low = tl.where(first <= index, middle, low)
        high = tl.where(first <= index, high, middle - 1)
    return low


@triton.jit
def slot_of(table, table_row, table_stride, position, kept_from, BLOCK_SIZE: tl.constexpr):
    """Return a token's slot, or the null block's first slot if its KV is not kept."""
    block = tl.load(table + table_row.to(tl.int64) * table_stride + position // BLOCK_SIZE)
    slot = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
    return tl.where(position < kept_from, 0, slot)


@triton.jit
def slot_of_row(
    table,
    table_stride,
    first_rows,
    starts,
    table_rows,
    kept_from,
    num_parts,
    row,
    BLOCK_SIZE: tl.constexpr,
):
    """Return the slot of the token in a row of the step."""
    part = part_at(first_rows, num_parts, row, 1, 0)
    position = tl.load(starts + part) + row - tl.load(first_rows + part)
    kept = tl.load(kept_from + part)
    return slot_of(table, tl.load(table_rows + part), table_stride, position, kept, BLOCK_SIZE)


@triton.jit
def store_heads(
    x,
    target,
    first_head,
    NUM_HEADS: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
):
    """Store the heads of one token in `target`, [heads, DIM], from `first_head` on."""
    head = tl.arange(0, PADDED_HEADS)[:, None]
    dim = tl.arange(0, PADDED_DIM)[None, :]
    exists = (head < NUM_HEADS) & (dim < DIM)
    tl.store(target + (first_head + head) * DIM + dim, x, mask=exists)


@triton.jit
def load_heads(
    source,
    head_stride,
    NUM_HEADS: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
):
    """Return the heads of one token, with any value as padding."""
    head = tl.arange(0, PADDED_HEADS)[:, None]
    dim = tl.arange(0, PADDED_DIM)[None, :]
    exists = (head < NUM_HEADS) & (dim < DIM)
    # The stride may span a whole step.
    return tl.load(source + head.to(tl.int64) * head_stride + dim, mask=exists)


@triton.jit(do_not_specialize=BY_PART)
def store_kernel(
    key,
    value,
    keys,
    values,
    table,
    first_rows,
    starts,
    table_rows,
    kept_from,
    num_parts,
    key_strides,
    value_strides,
    table_stride,
    NUM_KV_HEADS: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PADDED_VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Store the keys and values of one token. Grid: tokens."""
    row = tl.program_id(0)
    slot = slot_of_row(
        *(table, table_stride, first_rows, starts, table_rows, kept_from, num_parts),
        *(row, BLOCK_SIZE),
    )
    wide_row = row.to(tl.int64)
    x = load_heads(
        *(key + wide_row * key_strides[0], key_strides[1]),
        *(NUM_KV_HEADS, PADDED_HEADS, HEAD_DIM, PADDED_DIM),
    )
    store_heads(x, keys, slot * NUM_KV_HEADS, NUM_KV_HEADS, PADDED_HEADS, HEAD_DIM, PADDED_DIM)
    x = load_heads(
        *(value + wide_row * value_strides[0], value_strides[1]),
        *(NUM_KV_HEADS, PADDED_HEADS, VALUE_DIM, PADDED_VALUE_DIM),
    )
    store_heads(
        *(x, values, slot * NUM_KV_HEADS),
        *(NUM_KV_HEADS, PADDED_HEADS, VALUE_DIM, PADDED_VALUE_DIM),
    )

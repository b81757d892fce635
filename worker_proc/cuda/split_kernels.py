"""Attention of one decode by several programs, each of which computes a split of its context.

Each split stores the state of its softmax, and `combine_kernel` merges the states.
"""

import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def keys_of_split(begin, end, TILE_KEYS: tl.constexpr):
    """Return the keys of this program's split, given the range of all keys."""
    length = tl.cdiv(tl.cdiv(end - begin, TILE_KEYS), tl.num_programs(2)) * TILE_KEYS
    begin += tl.program_id(2) * length
    return begin, tl.minimum(end, begin + length)


@triton.jit
def store_partial(
    running_max,
    running_sum,
    acc,
    partial_out,
    partial_stats,
    part,
    head,
    is_row,
    NUM_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PADDED_VALUE_DIM: tl.constexpr,
):
    """Store the state of a split's softmax for `combine_kernel`.

    `partial_out` is float32 [parts, heads, splits, value dimension], and `partial_stats` is float32
    [parts, heads, splits, 2].
    """
    dim = tl.arange(0, PADDED_VALUE_DIM)[None, :]
    exists = is_row[:, None] & (dim < VALUE_DIM)
    offset = (part.to(tl.int64) * NUM_HEADS + head) * tl.num_programs(2) + tl.program_id(2)
    tl.store(partial_out + offset[:, None] * VALUE_DIM + dim, acc, mask=exists)
    tl.store(partial_stats + offset * 2, running_max, mask=is_row)
    tl.store(partial_stats + offset * 2 + 1, running_sum, mask=is_row)


@triton.jit(do_not_specialize=["first_rows", "num_splits"])
def combine_kernel(
    partial_out,
    partial_stats,
    sinks,
    out,
    first_rows,
    num_splits,
    NUM_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PADDED_VALUE_DIM: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    TILE_SPLITS: tl.constexpr,
):
    """Merge the splits of one decode and head. Grid: parts, heads."""
    part = tl.program_id(0)
    head = tl.program_id(1)
    first_row = tl.load(first_rows + part)
    if tl.load(first_rows + part + 1) - first_row == 1:
        dim = tl.arange(0, PADDED_VALUE_DIM)
        exists = dim < VALUE_DIM
        first = (part.to(tl.int64) * NUM_HEADS + head) * num_splits
        index = tl.arange(0, TILE_SPLITS)
        running_max = tl.full([], float("-inf"), tl.float32)
        running_sum = tl.zeros([], tl.float32)
        if HAS_SINKS:
            running_max = tl.load(sinks + head).to(tl.float32) * LOG2_E
            running_sum += 1.0
        acc = tl.zeros([PADDED_VALUE_DIM], tl.float32)
        for first_split in range(0, num_splits, TILE_SPLITS):
            split = first_split + index
            is_split = split < num_splits
            offset = first + split
            split_max = tl.load(partial_stats + offset * 2, mask=is_split, other=float("-inf"))
            split_sum = tl.load(partial_stats + offset * 2 + 1, mask=is_split, other=0.0)
            split_acc = tl.load(
                partial_out + offset[:, None] * VALUE_DIM + dim[None, :],
                mask=is_split[:, None] & exists[None, :],
                other=0.0,
            )
            # The first split has keys, so this is finite.
            greatest = tl.maximum(running_max, tl.max(split_max, axis=0))
            shares = tl.exp2(split_max - greatest)
            rescale = tl.exp2(running_max - greatest)
            acc = acc * rescale + tl.sum(split_acc * shares[:, None], axis=0)
            running_sum = running_sum * rescale + tl.sum(split_sum * shares, axis=0)
            running_max = greatest
        target = out + (first_row.to(tl.int64) * NUM_HEADS + head) * VALUE_DIM + dim
        tl.store(target, (acc / running_sum).to(out.dtype.element_ty), mask=exists)

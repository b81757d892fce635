"""Norms, rotations and activations in Triton, one program for each row.

Values are rounded to the model's dtype at the same points as in transformers' modules.
"""

import triton
import triton.language as tl

from worker_proc.cuda.block_kernels import BY_PART, load_heads, slot_of_row, store_heads
from worker_proc.native.structures import Activation, Rotation

HALVES = tl.constexpr(Rotation.HALVES.value)
SILU = tl.constexpr(Activation.SILU.value)
GELU_TANH = tl.constexpr(Activation.GELU_TANH.value)
GELU = tl.constexpr(Activation.GELU.value)
# Values of HEAD_NORM: none, a norm of each head, or one norm over all heads.
NO_NORM, EACH_HEAD, ALL_HEADS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def normalized(x, factor, weight, ROUNDS_FIRST: tl.constexpr, TYPE: tl.constexpr):
    """Return normalized float32 values, rounded like a module's."""
    x = x * factor
    if ROUNDS_FIRST:
        x = x.to(TYPE).to(tl.float32)
    return (x * weight).to(TYPE).to(tl.float32)


@triton.jit
def norm_kernel(
    hidden,
    added,
    added_weight,
    weight,
    out,
    hidden_stride,
    added_stride,
    out_stride,
    factor,
    added_epsilon,
    epsilon,
    SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    ADDS: tl.constexpr,
    NORMS_ADDED: tl.constexpr,
    SCALES_ADDED: tl.constexpr,
    ADDED_ROUNDS_FIRST: tl.constexpr,
    NORMS: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr,
):
    """hidden += factor * norm(added), and out = norm(hidden); each part is optional. Grid: rows."""
    TYPE: tl.constexpr = hidden.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED_SIZE)
    exists = column < SIZE
    x = tl.load(hidden + row * hidden_stride + column, mask=exists, other=0.0).to(tl.float32)
    if ADDS:
        y = tl.load(added + row * added_stride + column, mask=exists, other=0.0).to(tl.float32)
        if NORMS_ADDED:
            y_weight = tl.load(added_weight + column, mask=exists, other=0.0)
            y_factor = tl.rsqrt(tl.sum(y * y, axis=0) / SIZE + added_epsilon)
            y = normalized(y, y_factor, y_weight, ADDED_ROUNDS_FIRST, TYPE)
        if SCALES_ADDED:
            y = (y * factor).to(TYPE).to(tl.float32)
        rounded = (x + y).to(TYPE)
        tl.store(hidden + row * hidden_stride + column, rounded, mask=exists)
        x = rounded.to(tl.float32)
    if NORMS:
        x_weight = tl.load(weight + column, mask=exists, other=0.0)
        x_factor = tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + epsilon)
        x = normalized(x, x_factor, x_weight, ROUNDS_FIRST, TYPE)
        tl.store(out + row * out_stride + column, x.to(TYPE), mask=exists)


@triton.jit
def activate_kernel(
    gates,
    factors,
    out,
    gates_stride,
    factors_stride,
    out_stride,
    size,
    ACTIVATION: tl.constexpr,
    MULTIPLIES: tl.constexpr,
    TILE: tl.constexpr,
):
    """out = activation(gates) * factors. Grid: rows, tiles of a row."""
    TYPE: tl.constexpr = out.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * TILE + tl.arange(0, TILE)
    exists = index < size
    x = tl.load(gates + row * gates_stride + index, mask=exists, other=0.0).to(tl.float32)
    if ACTIVATION == SILU:
        x = x * tl.sigmoid(x)
    elif ACTIVATION == GELU_TANH:
        x = x * tl.sigmoid(x * (x * x * 0.044715 + 1.0) * 1.5957691216)
    elif ACTIVATION == GELU:
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:  # the square of ReLU
        x = tl.maximum(x, 0.0) * tl.maximum(x, 0.0)
    if MULTIPLIES:
        y = tl.load(factors + row * factors_stride + index, mask=exists, other=0.0).to(tl.float32)
        x = x.to(TYPE).to(tl.float32) * y
    tl.store(out + row * out_stride + index, x.to(TYPE), mask=exists)


@triton.jit(do_not_specialize=["num_values"])
def add_up_kernel(
    gathered,
    out,
    num_values,
    NUM_RANKS: tl.constexpr,
    TILE: tl.constexpr,
):
    """out = the sum of all ranks' values, in float32 and in the order of the ranks. Grid: tiles."""
    index = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    exists = index < num_values
    total = tl.load(gathered + index, mask=exists, other=0.0).to(tl.float32)
    for rank in tl.static_range(1, NUM_RANKS):
        values = gathered + rank * num_values
        total += tl.load(values + index, mask=exists, other=0.0).to(tl.float32)
    tl.store(out + index, total.to(out.dtype.element_ty), mask=exists)


@triton.jit
def partners(dim, NUM_ROTATED: tl.constexpr, ROTATION: tl.constexpr):
    """Return each dimension's partner in the rotation, its angle, and whether it precedes it."""
    HALF: tl.constexpr = NUM_ROTATED // 2
    if ROTATION == HALVES:
        is_first = dim < HALF
        partner = tl.where(is_first, dim + HALF, dim - HALF)
        angle = dim
    else:
        is_first = dim % 2 == 0
        partner = tl.where(is_first, dim + 1, dim - 1)
        angle = dim // 2
    return tl.where(dim < NUM_ROTATED, partner, dim), angle, is_first


@triton.jit
def rotated(
    source,
    norm,
    cosines,
    sines,
    epsilon,
    NUM_HEADS: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    NUM_ROTATED: tl.constexpr,
    ROTATION: tl.constexpr,
    HEAD_NORM: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr,
):
    """Return one token's heads, [PADDED_HEADS, PADDED_DIM], normalized and rotated by position."""
    TYPE: tl.constexpr = source.dtype.element_ty
    ANGLE_TYPE: tl.constexpr = cosines.dtype.element_ty
    head = tl.arange(0, PADDED_HEADS)[:, None]
    dim = tl.arange(0, PADDED_DIM)[None, :]
    exists = (head < NUM_HEADS) & (dim < HEAD_DIM)
    partner, angle, is_first = partners(dim, NUM_ROTATED, ROTATION)
    x = tl.load(source + head * HEAD_DIM + dim, mask=exists, other=0.0).to(tl.float32)
    y = tl.load(source + head * HEAD_DIM + partner, mask=exists, other=0.0).to(tl.float32)
    if HEAD_NORM != NO_NORM:
        if HEAD_NORM == EACH_HEAD:
            factor = tl.rsqrt(tl.sum(x * x, axis=1) / HEAD_DIM + epsilon)[:, None]
            weights = norm + head * 0
        else:
            mean = tl.sum(tl.sum(x * x, axis=1), axis=0) / (NUM_HEADS * HEAD_DIM)
            factor = tl.rsqrt(mean + epsilon)
            weights = norm + head * HEAD_DIM
        x_weight = tl.load(weights + dim, mask=exists, other=0.0)
        y_weight = tl.load(weights + partner, mask=exists, other=0.0)
        x = normalized(x, factor, x_weight, ROUNDS_FIRST, TYPE)
        y = normalized(y, factor, y_weight, ROUNDS_FIRST, TYPE)
    if NUM_ROTATED > 0:
        is_rotated = dim < NUM_ROTATED
        cosine = tl.load(cosines + angle, mask=is_rotated, other=0.0).to(tl.float32)
        sine = tl.load(sines + angle, mask=is_rotated, other=0.0).to(tl.float32)
        straight = (x * cosine).to(ANGLE_TYPE).to(tl.float32)
        crossed = (y * sine).to(ANGLE_TYPE).to(tl.float32)
        turned = straight + tl.where(is_first, -crossed, crossed)
        x = tl.where(is_rotated, turned, x)
    return x.to(TYPE)


@triton.jit(do_not_specialize=BY_PART)
def rotate_and_store_kernel(
    qkv,
    query,
    keys,
    values,
    query_norm,
    key_norm,
    cosines,
    sines,
    table,
    first_rows,
    starts,
    table_rows,
    kept_from,
    num_parts,
    qkv_stride,
    angle_stride,
    table_stride,
    epsilon,
    NUM_HEADS: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    PADDED_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PADDED_VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_ROTATED: tl.constexpr,
    ROTATION: tl.constexpr,
    HEAD_NORM: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr,
):
    """Write one token's queries to `query`, and its keys and values to their blocks. Grid: rows.

    A row of `qkv` has the queries of all heads, then the keys and the values of all KV heads.
    `query` is [rows, heads, head dimension]. Blocks are as in block_kernels.py.
    """
    row = tl.program_id(0)
    wide_row = row.to(tl.int64)
    source = qkv + wide_row * qkv_stride
    cosines += wide_row * angle_stride
    sines += wide_row * angle_stride
    x = rotated(
        *(source, query_norm, cosines, sines, epsilon, NUM_HEADS, PADDED_HEADS),
        *(HEAD_DIM, PADDED_DIM, NUM_ROTATED, ROTATION, HEAD_NORM, ROUNDS_FIRST),
    )
    store_heads(x, query, wide_row * NUM_HEADS, NUM_HEADS, PADDED_HEADS, HEAD_DIM, PADDED_DIM)
    slot = slot_of_row(
        *(table, table_stride, first_rows, starts, table_rows, kept_from, num_parts),
        *(row, BLOCK_SIZE),
    )
    source += NUM_HEADS * HEAD_DIM
    x = rotated(
        *(source, key_norm, cosines, sines, epsilon, NUM_KV_HEADS, PADDED_KV_HEADS),
        *(HEAD_DIM, PADDED_DIM, NUM_ROTATED, ROTATION, HEAD_NORM, ROUNDS_FIRST),
    )
    first_head = slot * NUM_KV_HEADS
    store_heads(x, keys, first_head, NUM_KV_HEADS, PADDED_KV_HEADS, HEAD_DIM, PADDED_DIM)
    source += NUM_KV_HEADS * HEAD_DIM
    x = load_heads(*(source, VALUE_DIM, NUM_KV_HEADS, PADDED_KV_HEADS, VALUE_DIM, PADDED_VALUE_DIM))
    store_heads(
        *(x, values, first_head),
        *(NUM_KV_HEADS, PADDED_KV_HEADS, VALUE_DIM, PADDED_VALUE_DIM),
    )

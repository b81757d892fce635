"""Paged attention in Triton, over keys and values in the blocks where they are stored.

One kernel attends, with two kinds of tiles. A prefill tile holds some tokens of one part of the
step, with all query heads that share a KV head. A decode tile holds the only token of its part; its
context may be divided among several programs (`split_kernels.py`). The step's arrays on the device
(`block_kernels.py`) determine which tokens a tile holds, so no plan is made on the host, and a
launch depends only on the numbers of parts and tokens. `attention.py` launches the kernels.

A program takes its tiles of keys in the order of positions, with an online softmax: `running_max`
is the greatest score so far, `running_sum` the sum of the weights and `acc` that of the weighted
values, which are rescaled when a greater score occurs.
"""

import triton
import triton.language as tl

from worker_proc.cuda.block_kernels import BY_PART, part_at
from worker_proc.cuda.split_kernels import LOG2_E, keys_of_split, store_partial


@triton.jit
def load_tile(pointers, is_read, is_dim, IS_WHOLE: tl.constexpr, IS_PADDED: tl.constexpr):
    """Return a tile of keys or values; those that no query sees, and padding, are zero."""
    if not IS_WHOLE:
        tile = tl.load(pointers, mask=is_read & is_dim, other=0.0)
    elif IS_PADDED:
        tile = tl.load(pointers, mask=is_dim, other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def attend_to_tile(
    running_max,
    running_sum,
    acc,
    queries,
    position,
    keys,
    values,
    blocks,
    first_key,
    first_visible,
    end,
    kv_head,
    scale,
    softcap,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PADDED_VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    IS_WHOLE: tl.constexpr,  # all queries of the tile see all of these keys: no mask
    TILE_KEYS: tl.constexpr,
):
    """Add a tile of keys; return the running maxima, the sums of weights and those of values."""
    dim = tl.arange(0, PADDED_DIM)
    value_dim = tl.arange(0, PADDED_VALUE_DIM)
    seen = first_key + tl.arange(0, TILE_KEYS)
    # Keys that no query of the tile sees may belong to another request and may be NaN.
    is_read = (seen >= first_visible) & (seen < end)
    if IS_WHOLE:
        block = tl.load(blocks + seen // BLOCK_SIZE).to(tl.int64)
    else:
        block = tl.load(blocks + seen // BLOCK_SIZE, mask=is_read, other=0).to(tl.int64)
    slot = (block * BLOCK_SIZE + seen % BLOCK_SIZE) * NUM_KV_HEADS + kv_head
    key_pointers = keys + slot[None, :] * HEAD_DIM + dim[:, None]
    value_pointers = values + slot[:, None] * VALUE_DIM + value_dim[None, :]
    is_dim = dim[:, None] < HEAD_DIM
    tile_keys = load_tile(key_pointers, is_read[None, :], is_dim, IS_WHOLE, HEAD_DIM < PADDED_DIM)
    scores = tl.dot(queries, tile_keys, input_precision="ieee") * scale
    if HAS_SOFTCAP:
        scores = (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0) * softcap
    scores = scores * LOG2_E
    if not IS_WHOLE:
        is_seen = is_read[None, :] & (seen[None, :] <= position[:, None])
        if WINDOW > 0:
            is_seen = is_seen & (seen[None, :] > position[:, None] - WINDOW)
        scores = tl.where(is_seen, scores, float("-inf"))
    greatest = tl.maximum(running_max, tl.max(scores, axis=1))
    base = tl.where(greatest == float("-inf"), 0.0, greatest)
    weights = tl.exp2(scores - base[:, None])
    rescale = tl.exp2(running_max - base)
    is_dim = value_dim[None, :] < VALUE_DIM
    is_padded: tl.constexpr = VALUE_DIM < PADDED_VALUE_DIM
    tile_values = load_tile(value_pointers, is_read[:, None], is_dim, IS_WHOLE, is_padded)
    added = tl.dot(weights.to(tile_values.dtype), tile_values, input_precision="ieee")
    acc = acc * rescale[:, None] + added
    running_sum = running_sum * rescale + tl.sum(weights, axis=1)
    return greatest, running_sum, acc


@triton.jit
def part_of_tile(first_rows, num_parts, tile, IS_DECODE: tl.constexpr, TILE_TOKENS: tl.constexpr):
    """Return a tile's part and its first token there, which may be after the last."""
    if IS_DECODE:
        part = tile
        first_token = tile * 0
    else:
        part = part_at(first_rows, num_parts, tile, TILE_TOKENS, 1)
        first_tile = tl.load(first_rows + part) // TILE_TOKENS + part
        first_token = (tile - first_tile) * TILE_TOKENS
    return part, first_token


@triton.jit
def keys_that_all_see(
    first,
    begin,
    end,
    WINDOW: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
):
    """Return the range of whole tiles of keys that every query of a tile sees.

    `first` is the position of the first query; the tile's keys are those from `begin` to `end`.
    """
    whole_begin = begin
    if WINDOW > 0:
        last_position = first + TILE_TOKENS - 1
        whole_begin = tl.cdiv(tl.maximum(last_position - WINDOW + 1, 0), TILE_KEYS) * TILE_KEYS
        whole_begin = tl.maximum(whole_begin, begin)
    whole_end = tl.minimum(end, first + 1) // TILE_KEYS * TILE_KEYS
    whole_end = tl.maximum(whole_end, whole_begin)
    return whole_begin, whole_end


@triton.jit
def with_sinks(running_max, running_sum, acc, sinks, head, is_row):
    """Return the sums of weights and of weighted values, including each head's sink."""
    sink = tl.load(sinks + head, mask=is_row, other=0.0).to(tl.float32) * LOG2_E
    base = tl.maximum(running_max, sink)
    acc = acc * tl.exp2(running_max - base)[:, None]
    running_sum = running_sum * tl.exp2(running_max - base) + tl.exp2(sink - base)
    return running_sum, acc


@triton.jit
def rows_of_tile(
    first_token,
    num_tokens,
    kv_head,
    GROUP: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
):
    """Return the token in its part and the query head of each row, and which rows exist.

    A row is one of the GROUP query heads of a token. Other rows are padding.
    """
    index = tl.arange(0, TILE_ROWS)
    token = first_token + index // GROUP
    head = kv_head * GROUP + index % GROUP
    is_row = (index // GROUP < TILE_TOKENS) & (token < num_tokens)
    return token, head, is_row


@triton.jit
def load_queries(
    query, query_strides, row, head, is_row, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr
):
    """Return the query of each row's head, with zeros for padding rows."""
    dim = tl.arange(0, PADDED_DIM)
    wide_head = head[:, None].to(tl.int64)  # the stride may span a whole step
    pointers = query + row[:, None] * query_strides[0] + wide_head * query_strides[1] + dim
    return tl.load(pointers, mask=is_row[:, None] & (dim < HEAD_DIM), other=0.0)


@triton.jit
def keys_of_tile(
    start,
    first_token,
    num_tokens,
    WINDOW: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
):
    """Return the first position that some query sees, and the range of keys of this program.

    The range begins at a multiple of TILE_KEYS, and so may contain earlier positions.
    """
    end = start + tl.minimum(first_token + TILE_TOKENS, num_tokens)
    first_visible = start * 0
    if WINDOW > 0:
        first_visible = tl.maximum(start + first_token - WINDOW + 1, 0)
    begin = first_visible // TILE_KEYS * TILE_KEYS
    if IS_SPLIT:
        begin, end = keys_of_split(begin, end, TILE_KEYS)
    return first_visible, begin, end


@triton.jit
def loop_bounds(
    begin, end, whole_begin, whole_end, HAS_WHOLE_TILES: tl.constexpr, STAGE: tl.constexpr
):
    """Return the keys of one of the loops: before, within and after the whole tiles, or all."""
    if not HAS_WHOLE_TILES:
        loop_begin, loop_end = begin, end
    elif STAGE == 0:
        loop_begin, loop_end = begin, tl.minimum(whole_begin, end)
    elif STAGE == 1:
        loop_begin, loop_end = whole_begin, whole_end
    else:
        loop_begin, loop_end = whole_end, end
    return loop_begin, loop_end


@triton.jit
def store_result(
    running_sum,
    acc,
    out,
    row,
    head,
    is_row,
    NUM_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PADDED_VALUE_DIM: tl.constexpr,
):
    """Store the normalized sums of values in `out`, [rows, heads, value dimension]."""
    dim = tl.arange(0, PADDED_VALUE_DIM)[None, :]
    exists = is_row[:, None] & (dim < VALUE_DIM)
    result = acc / tl.where(running_sum == 0.0, 1.0, running_sum)[:, None]  # padding rows
    offset = (row * NUM_HEADS + head)[:, None] * VALUE_DIM + dim
    tl.store(out + offset, result.to(out.dtype.element_ty), mask=exists)


@triton.jit(do_not_specialize=BY_PART)
def attend_kernel(
    query,
    keys,
    values,
    sinks,
    out,
    partial_out,
    partial_stats,
    table,
    first_rows,
    starts,
    table_rows,
    num_parts,
    query_strides,
    table_stride,
    scale,
    softcap,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PADDED_VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: no window
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    IS_DECODE: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    MIN_TOKENS: tl.constexpr,  # fewest tokens of a part that prefill tiles compute
    HAS_WHOLE_TILES: tl.constexpr,  # a separate loop for keys that all queries see; may change bits
    TILE_ROWS: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
):
    """Attend for one tile and one KV head. Grid: tiles, KV heads, splits of the context."""
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    part, first_token = part_of_tile(first_rows, num_parts, tile, IS_DECODE, TILE_TOKENS)
    first_row = tl.load(first_rows + part)
    num_tokens = tl.load(first_rows + part + 1) - first_row
    if IS_DECODE:
        is_mine = num_tokens == 1
    else:
        is_mine = (num_tokens >= MIN_TOKENS) & (first_token < num_tokens)
    if is_mine:
        start = tl.load(starts + part)
        token, head, is_row = rows_of_tile(
            first_token, num_tokens, kv_head, GROUP, TILE_ROWS, TILE_TOKENS
        )
        position = start + token
        row = (first_row + token).to(tl.int64)
        queries = load_queries(query, query_strides, row, head, is_row, HEAD_DIM, PADDED_DIM)
        first_visible, begin, end = keys_of_tile(
            start, first_token, num_tokens, WINDOW, IS_SPLIT, TILE_TOKENS, TILE_KEYS
        )
        blocks = table + tl.load(table_rows + part).to(tl.int64) * table_stride
        running_max = tl.full([TILE_ROWS], float("-inf"), tl.float32)
        running_sum = tl.zeros([TILE_ROWS], tl.float32)
        acc = tl.zeros([TILE_ROWS, PADDED_VALUE_DIM], tl.float32)
        # Only tiles of keys that some queries do not see, at either end, need masks. A single loop
        # is as fast for decodes, which are limited by memory.
        whole_begin, whole_end = keys_that_all_see(
            start + first_token, begin, end, WINDOW, TILE_TOKENS, TILE_KEYS
        )
        for stage in tl.static_range(3 if HAS_WHOLE_TILES else 1):
            loop_begin, loop_end = loop_bounds(
                begin, end, whole_begin, whole_end, HAS_WHOLE_TILES, stage
            )
            for first_key in range(loop_begin, loop_end, TILE_KEYS):
                running_max, running_sum, acc = attend_to_tile(
                    *(running_max, running_sum, acc, queries, position, keys, values, blocks),
                    *(first_key, first_visible, end, kv_head, scale, softcap),
                    *(NUM_KV_HEADS, HEAD_DIM, PADDED_DIM, VALUE_DIM, PADDED_VALUE_DIM),
                    *(BLOCK_SIZE, WINDOW, HAS_SOFTCAP, stage == 1, TILE_KEYS),
                )
        if IS_SPLIT:
            store_partial(
                *(running_max, running_sum, acc, partial_out, partial_stats, part, head, is_row),
                *(NUM_HEADS, VALUE_DIM, PADDED_VALUE_DIM),
            )
        else:
            if HAS_SINKS:
                running_sum, acc = with_sinks(running_max, running_sum, acc, sinks, head, is_row)
            store_result(
                *(running_sum, acc, out, row, head, is_row),
                *(NUM_HEADS, VALUE_DIM, PADDED_VALUE_DIM),
            )

"""Chooses tokens in Triton, one program for each row, as defined in `sampling/inverse_cdf.py`.

Nothing is sorted. A rank in a row (descending score, ties by id) is a key, which is the score as an
ordered integer, and the number of preceding tokens with the same key. Both cuts, top_k and top_p,
bisect the keys: each step sums the weights of all tokens above a key. In nearly all rows the kept
tokens are near the best one, and the cuts read only a list of the near tokens; otherwise they read
the whole row. Weights are integers, so the order of summation cannot change a token.

Columns of `parameters`, int64, a line for each request: see `choice.pack_parameters`.
"""

import triton
import triton.language as tl

SEED, TEMPERATURE, TOP_P, TOP_K, MIN_WEIGHT = map(tl.constexpr, range(5))
NUM_COLUMNS = tl.constexpr(5)
NOT_FINITE = tl.constexpr(-1)
"""Stands for the token of a row whose logits are not finite."""

UNIT = tl.constexpr(2.0**40)
NEAR_NATS = tl.constexpr(12.0)
MIN_KEY = tl.constexpr(-2139095041)
"""The key of -inf."""
LOW_HALF = tl.constexpr(2**31 - 1)


@triton.jit
def score_of(logits, token, exists):
    """Return float32 scores in which zero has one sign."""
    x = tl.load(logits + token, mask=exists, other=-float("inf")).to(tl.float32)
    return tl.where(x == 0.0, 0.0, x)


@triton.jit
def key_of(score):
    """Return integers in the same order as the scores."""
    bits = score.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def weight_of(score, best, temperature, min_weight):
    """Return the integer weight of each score, 0 under the bound of min_p."""
    weight = (tl.exp(-tl.div_rn(best - score, temperature)) * UNIT).to(tl.int64)
    return tl.where(weight < min_weight, 0, weight)


@triton.jit
def tokens_at(members, first, TILE: tl.constexpr):
    """Return a tile of the tokens to search, ascending, and which of its elements are valid."""
    nearby, num_listed, count = members
    index = first + tl.arange(0, TILE)
    listed = tl.load(nearby + index, mask=index < num_listed, other=0)
    return tl.where(index < num_listed, listed, index), index < count


@triton.jit
def divide(row, members, key, cut, WEIGHS: tl.constexpr, TILE: tl.constexpr):
    """Sum the weights, or the number, of the tokens from `key` on, among those above `cut`.

    Returns the sum, the least key of these tokens, and the greatest key of the others.
    """
    logits, best, temperature, min_weight = row
    total = min_weight * 0
    least = key * 0 + 0x7FFFFFFF
    others = cut
    for first in range(0, members[2], TILE):
        token, exists = tokens_at(members, first, TILE)
        score = score_of(logits, token, exists)
        own = key_of(score)
        is_above = exists & (own > cut)
        amount = tl.where(is_above & (own >= key), 1, 0).to(tl.int64)
        if WEIGHS:
            amount *= weight_of(score, best, temperature, min_weight)
        total += tl.sum(amount, axis=0)
        least = tl.minimum(least, tl.min(tl.where(own >= key, own, 0x7FFFFFFF), axis=0))
        others = tl.maximum(others, tl.max(tl.where(is_above & (own < key), own, cut), axis=0))
    return total, least, others


@triton.jit
def find_key(row, members, target, cut, WEIGHS: tl.constexpr, TILE: tl.constexpr):
    """Return the key where the sum over ordered tokens exceeds `target`, and the sum before it.

    Tokens up to `cut` are left out; if the others do not reach the target, the key is `cut`.
    """
    low = cut.to(tl.int64)  # from this key on, the sum exceeds the target
    high = key_of(row[1]).to(tl.int64) + 1  # from this key on, it does not
    above = target * 0
    while high - low > 1:
        middle = ((low + high) >> 1).to(tl.int32)
        found, least, others = divide(row, members, middle, cut, WEIGHS, TILE)
        is_low = found > target
        # No token has a key in between, so that few tokens need few steps.
        low = tl.where(is_low, least.to(tl.int64), low)
        high = tl.where(is_low, high, others.to(tl.int64) + 1)
        above = tl.where(is_low, above, found)
    return low.to(tl.int32), above


@triton.jit
def weight_at(row, key):
    """Return the weight of all tokens with a key."""
    _, best, temperature, min_weight = row
    score = tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)
    return weight_of(score, best, temperature, min_weight)


@triton.jit
def scaled(draw, total):
    """Return floor(draw * total / 2**62), both below 2**62."""
    draw_high, draw_low = draw >> 31, draw & LOW_HALF
    total_high, total_low = total >> 31, total & LOW_HALF
    middle = draw_high * total_low + draw_low * total_high + ((draw_low * total_low) >> 31)
    return draw_high * total_high + (middle >> 31)


@triton.jit
def drawn(seed, position):
    """Return the 62 random bits of a seed and a position, as in `sampling/philox.py`."""
    counter = position.to(tl.uint32)  # the higher words are 0, since positions have 31 bits
    first, second, _, _ = tl.philox(seed, counter, counter * 0, counter * 0, counter * 0)
    return (first.to(tl.int64) << 30) | (second.to(tl.int64) >> 2)


@triton.jit
def top_p_target(total, top_p):
    """Return the sum above which the last token kept by top_p is the first."""
    bound = tl.ceil(total.to(tl.float64) * top_p).to(tl.int64)
    return tl.maximum(tl.minimum(bound, total), 1) - 1


@triton.jit
def list_near(row, nearby, has_cut, VOCAB, CAPACITY: tl.constexpr, TILE: tl.constexpr):
    """Return the weight of all tokens, that of the near ones, and the number of the near ones.

    If the row has a cut, the near tokens are written to `nearby`, as far as there is room.
    """
    logits, best, temperature, min_weight = row
    total = min_weight * 0
    near_total = min_weight * 0
    num_near = VOCAB * 0
    for first in range(0, VOCAB, TILE):
        token = first + tl.arange(0, TILE)
        exists = token < VOCAB
        score = score_of(logits, token, exists)
        weight = weight_of(score, best, temperature, min_weight)
        total += tl.sum(weight, axis=0)
        if has_cut:
            is_near = exists & (tl.div_rn(best - score, temperature) <= NEAR_NATS)
            index = num_near + tl.cumsum(is_near.to(tl.int32), axis=0) - 1
            tl.store(nearby + index, token, mask=is_near & (index < CAPACITY))
            num_near += tl.sum(is_near.to(tl.int32), axis=0)
            near_total += tl.sum(tl.where(is_near, weight, 0), axis=0)
    tl.debug_barrier()  # wait for writes of the program's other threads
    return total, near_total, num_near


@triton.jit
def cut_off(row, members, top_k, top_p, total, TILE: tl.constexpr):
    """Apply top_k and top_p; return the cut, the number of kept ties, and the kept weight.

    Tokens above the key `cut` are kept, and the first `num_tied` of those with that key.
    """
    cut = members[2] * 0 + MIN_KEY
    num_tied = top_k * 0
    if (top_k > 0) & (top_k < members[2]):
        cut, above = find_key(row, members, top_k - 1, cut, False, TILE)
        num_tied = top_k - above
    if (top_k > 0) | (top_p < 1.0):
        tied = num_tied * weight_at(row, cut)
        total, _, _ = divide(row, members, cut, cut, True, TILE)
        total += tied
    if top_p < 1.0:
        target = top_p_target(total, top_p)
        key, above = find_key(row, members, target, cut, True, TILE)
        weight = weight_at(row, key)
        num_tied = (target - above) // weight + 1
        cut = key
        total = above + num_tied * weight
    return cut, num_tied, total


@triton.jit
def drawn_token(row, members, cut, num_tied, target, VOCAB, TILE: tl.constexpr):
    """Return the first kept token, by id, up to which the sum of weights exceeds `target`."""
    logits, best, temperature, min_weight = row
    running = num_tied * 0
    num_before = num_tied * 0
    found = members[2] * 0 + VOCAB
    for first in range(0, members[2], TILE):
        token, exists = tokens_at(members, first, TILE)
        score = score_of(logits, token, exists)
        key = key_of(score)
        is_tied = exists & (key == cut)
        ties = tl.cumsum(is_tied.to(tl.int64), axis=0) + num_before  # including this one
        is_kept = (exists & (key > cut)) | (is_tied & (ties <= num_tied))
        weight = tl.where(is_kept, weight_of(score, best, temperature, min_weight), 0)
        sums = tl.cumsum(weight, axis=0) + running
        found = tl.minimum(found, tl.min(tl.where(exists & (sums > target), token, VOCAB), axis=0))
        running += tl.sum(weight, axis=0)
        num_before += tl.sum(is_tied.to(tl.int64), axis=0)
    return found


@triton.jit
def sampled(row, parameters, position, nearby, VOCAB, CAPACITY: tl.constexpr, TILE: tl.constexpr):
    """Return the token that a row draws."""
    top_k = tl.load(parameters + TOP_K)
    top_p = tl.load(parameters + TOP_P).to(tl.float64, bitcast=True)
    has_cut = (top_k > 0) | (top_p < 1.0)
    total, near_total, num_near = list_near(row, nearby, has_cut, VOCAB, CAPACITY, TILE)
    is_inside = tl.where(top_k > 0, num_near >= top_k, top_p_target(total, top_p) < near_total)
    is_listed = has_cut & is_inside & (num_near <= CAPACITY)
    count = tl.where(is_listed, num_near, VOCAB)
    members = (nearby, tl.where(is_listed, num_near, 0), count)
    cut, num_tied, total = cut_off(row, members, top_k, top_p, total, TILE)
    target = scaled(drawn(tl.load(parameters + SEED), position), total)
    return drawn_token(row, members, cut, num_tied, target, VOCAB, TILE)


@triton.jit(do_not_specialize=["lines", "positions"])
def choose_kernel(
    logits,
    parameters,
    lines,
    positions,
    nearby,
    chosen,
    logits_stride,
    vocab_size,
    CAPACITY: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write the token of each row, or NOT_FINITE, to `chosen`, int64. Grid: rows.

    `lines` are the lines of the rows in `parameters`, `positions` the positions of the tokens to
    choose, int32.
    """
    row = tl.program_id(0)
    logits += row.to(tl.int64) * logits_stride
    parameters += tl.load(lines + row).to(tl.int64) * NUM_COLUMNS
    tops = tl.full((TILE,), -float("inf"), tl.float32)
    ids = tl.full((TILE,), 0, tl.int32)
    is_bad = tl.full((TILE,), 0, tl.int32)
    for first in range(0, vocab_size, TILE):
        token = first + tl.arange(0, TILE)
        score = score_of(logits, token, token < vocab_size)
        is_bad = tl.where(score < float("inf"), is_bad, 1)  # false for a NaN, too
        ids = tl.where(score > tops, token, ids)
        tops = tl.where(score > tops, score, tops)
    best = tl.max(tops, axis=0)
    found = tl.min(tl.where(tops == best, ids, vocab_size), axis=0)
    is_finite = (tl.max(is_bad, axis=0) == 0) & (best > -float("inf"))
    temperature = tl.load(parameters + TEMPERATURE).to(tl.float64, bitcast=True).to(tl.float32)
    if is_finite & (temperature > 0.0):
        min_weight = tl.load(parameters + MIN_WEIGHT)
        own_list = nearby + row.to(tl.int64) * CAPACITY
        context = (logits, best, temperature, min_weight)
        position = tl.load(positions + row)
        found = sampled(context, parameters, position, own_list, vocab_size, CAPACITY, TILE)
    tl.store(chosen + row, tl.where(is_finite, found, NOT_FINITE).to(tl.int64))


@triton.jit(do_not_specialize=["num_tokens"])
def feed_kernel(token_ids, chosen, num_tokens, TILE: tl.constexpr):
    """Replace each ~i in `token_ids` by `chosen[i]`."""
    index = tl.program_id(0) * TILE + tl.arange(0, TILE)
    exists = index < num_tokens
    token_id = tl.load(token_ids + index, mask=exists, other=0)
    is_reference = exists & (token_id < 0)
    found = tl.load(chosen + ~token_id, mask=is_reference, other=0)
    tl.store(token_ids + index, tl.maximum(found, 0), mask=is_reference)

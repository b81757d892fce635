"""Tokens, drafts and vectors of the null runner: pure functions of the context."""

import math
import struct
from binascii import crc32
from collections.abc import Sequence

from protocol.message import pack_token_ids
from worker_proc.request import MirroredRequest

CONTEXT_TOKENS = 4  # tokens before the next one that it depends on, besides its position
ONE_DRAFT_WRONG_IN = 4
ONE_STEP_SHORT_IN = 8  # such a step has fewer drafts than configured, down to none


def next_token_id(
    token_ids: Sequence[int],
    vocab_size: int,
    eos_token_ids: Sequence[int],
    mask: bytes | None = None,
    adapter_id: int = 0,
) -> int:
    """Return the token that follows `token_ids`: an EOS id only if there is no other token.

    With a mask (one bit for each token) it is one of the allowed ones, EOS included.
    """
    tail = token_ids[-CONTEXT_TOKENS:]
    digest = crc32(pack_token_ids(tail), len(token_ids))
    if adapter_id:
        digest = crc32(adapter_id.to_bytes(8, "little"), digest)
    first = digest % vocab_size
    if mask is not None:
        allowed = [i for i in range(8 * len(mask)) if mask[i >> 3] >> (i & 7) & 1]
        return allowed[digest % len(allowed)] if allowed else first
    for offset in range(vocab_size):
        candidate = (first + offset) % vocab_size
        if candidate not in eos_token_ids:
            return candidate
    return first


def draft_token_ids(
    token_ids: list[int], max_tokens: int, vocab_size: int, eos_token_ids: Sequence[int]
) -> list[int]:
    """Return drafts for the tokens after `token_ids`, a pure function of these; some are wrong."""
    known = len(token_ids)
    digest = crc32(b"drafts", next_token_id(token_ids, 2**31, ()))
    if digest % ONE_STEP_SHORT_IN == 0:
        max_tokens = digest // ONE_STEP_SHORT_IN % (max_tokens + 1)
    # Appended to the text and removed again: a copy would cost its length in every step.
    for offset in range(max_tokens):
        token_id = next_token_id(token_ids, vocab_size, eos_token_ids)
        is_wrong = hash((digest, offset)) % ONE_DRAFT_WRONG_IN == 0  # equal on all machines
        token_ids.append((token_id + is_wrong) % vocab_size)
    drafts = token_ids[known:]
    del token_ids[known:]
    return drafts


def null_vector(request: MirroredRequest, size: int) -> bytes:
    """Return the packed vector of a prompt: a pure function of its tokens and the pooling."""
    pooling = request.sampling_params.pooling
    assert pooling is not None
    seed = crc32(pack_token_ids(request.token_ids), crc32(pooling.type.encode()))
    digests = (crc32(bytes([place]), seed) for place in range(size))
    vector = [digest / 2**31 - 1.0 for digest in digests][: pooling.dimensions]
    if pooling.normalize:
        length = math.hypot(*vector) or 1.0
        vector = [value / length for value in vector]
    return struct.pack(f"<{len(vector)}f", *vector)


def allows(mask: bytes, token_id: int) -> bool:
    """Return whether a mask, with one bit for each token, allows a token."""
    place, bit = divmod(token_id, 8)
    return place < len(mask) and bool(mask[place] >> bit & 1)

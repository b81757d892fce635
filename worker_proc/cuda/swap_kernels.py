"""Copies blocks between the device and pinned host memory, in Triton."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["block_ids", "num_blocks"])
def copy_blocks_kernel(tensors, block_ids, num_blocks, WORD: tl.constexpr, TILE: tl.constexpr):
    """Copy blocks of several tensors, words of type WORD at a time. Grid: blocks, tensors.

    `tensors`, int64 `[tensors, 3]`: addresses of source and target, words in a block. `block_ids`,
    int64: the ids of the sources, followed by those of the targets.
    """
    block = tl.program_id(0)
    entry = tensors + tl.program_id(1) * 3
    num_words = tl.load(entry + 2)
    source = tl.load(entry).to(tl.pointer_type(WORD))
    target = tl.load(entry + 1).to(tl.pointer_type(WORD))
    source += tl.load(block_ids + block) * num_words
    target += tl.load(block_ids + num_blocks + block) * num_words
    for first in range(0, num_words, TILE):
        word = first + tl.arange(0, TILE)
        values = tl.load(source + word, mask=word < num_words)
        tl.store(target + word, values, mask=word < num_words)

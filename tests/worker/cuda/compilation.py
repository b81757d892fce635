"""Compiles the kernels for a GPU, which need not be there: python -m tests.worker.cuda.compilation.

Prints a line for each kernel and target, with the shared memory of a program. It must run without
TRITON_INTERPRET.
"""

from typing import Any

import torch
import triton.language as tl
from triton import compile as compile_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from worker_proc.cuda import (
    attention_kernels,
    block_kernels,
    choice_kernels,
    pointwise_kernels,
    product_kernels,
    split_kernels,
    swap_kernels,
)
from worker_proc.cuda.attention import (
    STAGES,
    STAGES_OF_WHOLE_TILES,
    TILE_SPLITS,
    choose_tiles,
)
from worker_proc.cuda.block_kernels import BY_PART
from worker_proc.cuda.choice import MAX_NEAR, MAX_TILE_TOKENS
from worker_proc.cuda.coverage import MAX_HEAD_DIM, MAX_HEADS_PER_KV_HEAD
from worker_proc.cuda.device_sampler import FEED_TILE
from worker_proc.cuda.pointwise import ACTIVATION_TILE
from worker_proc.cuda.products import TILE_BYTES, TILE_OUTPUTS, TILE_ROWS
from worker_proc.cuda.swap import TILE_WORDS
from worker_proc.kv.kv_groups import LayerSpec
from worker_proc.native.structures import Activation, Rotation

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
TARGETS = [GPUTarget("cuda", capability, 32) for capability in (80, 90)]
MAX_SHARED_BYTES = 99 * 1024  # of a program on the smallest devices since 8.0
HEADS = {"NUM_HEADS": 16, "NUM_KV_HEADS": 8, "BLOCK_SIZE": 16}
PADDED_HEADS = {"PADDED_HEADS": 16, "PADDED_KV_HEADS": 8}
FLAGS = {"HAS_SOFTCAP": True, "HAS_SINKS": True, "ROUNDS_FIRST": True, "ROTATION": 0}
PLAIN = FLAGS | {"HAS_SOFTCAP": False, "HAS_SINKS": False}
FLOATS = {"scale", "softcap", "factor", "added_epsilon", "epsilon"}
INT_ARRAYS = {"table", "first_rows", "starts", "table_rows", "kept_from", "lines", "positions"}
INT_ARRAYS |= {"nearby"}
LONG_ARRAYS = {"parameters", "chosen", "token_ids", "tensors", "block_ids"}
FLOAT_ARRAYS = {"partial_out", "partial_stats", "sinks", "added_weight", "weight"}
FLOAT_ARRAYS |= {"query_norm", "key_norm"}
UNALIGNED = {
    *BY_PART,
    "num_values",
    "num_rows",
    "num_splits",
    "num_tokens",
    "num_blocks",
    "lines",
    "positions",
}
STRIDES = {"query_strides", "key_strides", "value_strides"}
INTS = {"num_parts", "num_splits", "size", "hidden_stride", "added_stride", "out_stride"}
INTS |= {"num_values", "num_rows", "logits_stride", "vocab_size", "num_tokens", "num_blocks"}
INTS |= {"gates_stride", "factors_stride", "table_stride", "qkv_stride", "angle_stride"}


def _dims(size: int) -> dict[str, int]:
    names = ("HEAD_DIM", "PADDED_DIM", "VALUE_DIM", "PADDED_VALUE_DIM", "NUM_ROTATED")
    return dict.fromkeys(names, size)


def _type(name: str, dtype: str) -> Any:
    if name in STRIDES:
        return ("i32", "i32")
    kinds = ((FLOATS, "fp32"), (FLOAT_ARRAYS, "*fp32"), (INT_ARRAYS, "*i32"), (LONG_ARRAYS, "*i64"))
    for names, kind in kinds:
        if name in names:
            return kind
    return "i32" if name in INTS else f"*{dtype}"


def _is_aligned(name: str) -> bool:
    """Return whether a launch finds a pointer or stride to be a multiple of 16."""
    return name not in UNALIGNED and name not in FLOATS


def compile_for(kernel: Any, dtype: str, sizes: dict[str, Any], **options: int) -> None:
    """Compile one variant for all targets, as it is launched; an error ends the program.

    Alignment counts: only with it are loads of the next tile begun early, which takes memory.
    """
    signature, constants = {}, {}
    aligned = {}
    for place, name in enumerate(kernel.arg_names):
        if name.isupper():
            signature[name], constants[(place,)] = "constexpr", sizes[name]
        else:
            signature[name] = _type(name, dtype)
            if _is_aligned(name):
                parts = [(place, 0), (place, 1)] if name in STRIDES else [(place,)]
                aligned |= {part: [["tt.divisibility", 16]] for part in parts}
    for target in TARGETS:
        source = ASTSource(kernel, signature, constants, aligned)
        compiled = compile_kernel(source, target=target, options=options)
        shared = compiled.metadata.shared
        name = f"{kernel.__name__} {dtype} for {target.arch}"
        print(f"{name}: {shared} bytes of shared memory", flush=True)
        assert shared <= MAX_SHARED_BYTES


def compile_attention(dtype: str, dim: int, group: int) -> None:
    """Compile attention with the tiles that it is launched with."""
    tiles = choose_tiles(LayerSpec(group, 1, dim, dim, None), DTYPES[dtype])
    for is_decode in (True, False):
        rows = tiles.decode_rows if is_decode else tiles.prefill_rows
        tile = {
            "MIN_TOKENS": 2,
            "TILE_ROWS": rows,
            "TILE_TOKENS": 1 if is_decode else rows // group,
            "TILE_KEYS": tiles.keys,
            "IS_DECODE": is_decode,
            "HAS_WHOLE_TILES": not is_decode,
            "IS_SPLIT": is_decode,
            "WINDOW": 0 if is_decode else 1000,
            "NUM_HEADS": group,
            "NUM_KV_HEADS": 1,
        }
        flags = FLAGS if dim == MAX_HEAD_DIM else PLAIN
        sizes = HEADS | flags | _dims(dim) | tile
        stages = STAGES if is_decode else STAGES_OF_WHOLE_TILES
        compile_for(attention_kernels.attend_kernel, dtype, sizes, num_stages=stages)


def main() -> None:
    """Compile each kernel with usual sizes, and attention with its largest tiles."""
    for dtype, dim, group in (
        ("bf16", 128, 2),
        ("bf16", MAX_HEAD_DIM, 2),
        ("fp32", 128, 2),
        ("fp32", MAX_HEAD_DIM, 2),
        ("fp32", MAX_HEAD_DIM, MAX_HEADS_PER_KV_HEAD),
    ):
        compile_attention(dtype, dim, group)
    usual = HEADS | PADDED_HEADS | FLAGS | _dims(128)
    splits = {"TILE_SPLITS": TILE_SPLITS}
    compile_for(split_kernels.combine_kernel, "bf16", usual | splits)
    compile_for(block_kernels.store_kernel, "bf16", usual)
    for head_norm in (0, 1, 2):
        sizes = usual | {"HEAD_NORM": head_norm, "ROTATION": head_norm}
        if head_norm == Rotation.NONE:
            sizes |= {"NUM_ROTATED": 0}
        compile_for(pointwise_kernels.rotate_and_store_kernel, "bf16", sizes)
    norm = {"ADDS": True, "NORMS_ADDED": True, "SCALES_ADDED": True, "NORMS": True}
    norm |= {"SIZE": 1024, "PADDED_SIZE": 1024, "ADDED_ROUNDS_FIRST": True}
    compile_for(pointwise_kernels.norm_kernel, "bf16", usual | norm)
    for dtype in DTYPES:
        sizes = {"NUM_RANKS": 8, "TILE": ACTIVATION_TILE}
        compile_for(pointwise_kernels.add_up_kernel, dtype, sizes)
    for activation in Activation:
        sizes = {"ACTIVATION": int(activation), "MULTIPLIES": not activation}
        sizes |= {"TILE": ACTIVATION_TILE}
        compile_for(pointwise_kernels.activate_kernel, "bf16", sizes)
    tiles = {"TILE_ROWS": TILE_ROWS, "TILE_OUTPUTS": TILE_OUTPUTS, "HAS_BIAS": True}
    for dtype, kind in DTYPES.items():
        sizes = tiles | {"NUM_INPUTS": 1024, "NUM_OUTPUTS": 3000}
        sizes |= {"TILE_INPUTS": TILE_BYTES // kind.itemsize}
        compile_for(product_kernels.product_kernel, dtype, sizes)
    for dtype in DTYPES:
        sizes = {"CAPACITY": MAX_NEAR, "TILE": MAX_TILE_TOKENS}
        compile_for(choice_kernels.choose_kernel, dtype, sizes)
    compile_for(choice_kernels.feed_kernel, "bf16", {"TILE": FEED_TILE})
    for word in (tl.int64, tl.int8):
        sizes = {"WORD": word, "TILE": TILE_WORDS}
        compile_for(swap_kernels.copy_blocks_kernel, "bf16", sizes)


if __name__ == "__main__":
    main()

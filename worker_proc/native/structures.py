"""Structures and numbers of the C++ code, as its callers in Python write them."""

import ctypes
import enum
import struct
from typing import Any

_POINTER, _INT, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float

CHOICE_BYTES = 8
"""The size of `Choice` in products/experts.h."""


class Activation(enum.IntEnum):
    """Activations of pointwise.h, by their numbers there."""

    SILU = 0
    GELU_TANH = 1
    GELU = 2
    RELU_SQUARED = 3


class Kind(enum.IntEnum):
    """Kinds of instructions of program.h."""

    NORMALIZE = 0
    PROJECT = 1
    ROTATE = 2
    ATTEND = 3
    ADD = 4
    CHOOSE = 5
    GATHER = 6
    EXPERTS = 7
    COMBINE = 8
    GATE = 9
    CODE = 10
    EMBED = 11
    KEEP = 12
    PROJECT_HEADS = 13
    PERMUTE = 14
    SHRINK = 15
    EXPAND = 16
    ADD_RANKS = 17


class Rotation(enum.IntEnum):
    """Which dimensions of a query or key are rotated together."""

    HALVES = 0
    PAIRS = 1
    NONE = 2


class Epilogue(enum.IntEnum):
    """What a projection does with its products."""

    STORE = 0
    ADD_TO = 1
    ACTIVATE = 2
    SPLIT = 3
    APPLY = 4


def _fields(names: str, kind: Any) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class LayerArgs(ctypes.Structure):
    """Mirrors `Layer` of step.h."""

    _fields_ = (
        *_fields("keys values", _POINTER),
        *_fields("num_heads num_kv_heads head_dim value_head_dim block_size window", _INT),
        *_fields("is_bf16 has_pairs kv_format is_latent is_chunked is_shared", _INT),
        *_fields("sinks biases", _POINTER),
        *_fields("bias_stride bias_origin", _LONG),
    )


class StepArgs(ctypes.Structure):
    """Mirrors `Step` of step.h."""

    _fields_ = (
        *_fields("num_rows item_size num_pieces num_splits", _INT),
        *_fields("slots first_row num_tokens start table_offset tables", _POINTER),
        *_fields("item_segment item_token group_item group_shared", _POINTER),
        *_fields("piece_group piece_section piece_sums split_piece sums is_read", _POINTER),
    )


class WholeTextsArgs(ctypes.Structure):
    """Mirrors `WholeTexts` of attention/text_attention.h."""

    _fields_ = (("num_texts", _INT), ("first_rows", _POINTER), ("counts", _POINTER))


class RowsArgs(ctypes.Structure):
    """Mirrors `Rows` of step.h."""

    _fields_ = (("data", _POINTER), *_fields("row_stride head_stride", _LONG))


class RowTermsArgs(ctypes.Structure):
    """Mirrors `RowTerms` of step.h."""

    _fields_ = (("biases", RowsArgs), ("num_distances", _INT), ("sinks", _POINTER))


class BufferArgs(ctypes.Structure):
    """Mirrors `Buffer` of program.h."""

    _fields_ = (("data", _POINTER), ("stride", _LONG))


class Instruction(ctypes.Structure):
    """Mirrors `Instruction` of program.h."""

    _fields_ = (
        *_fields("kind source target size column epilogue activation rounds_first", _INT),
        *_fields(
            "num_heads num_kv_heads head_dim num_rotated rotation angles has_wide_angles group"
            " num_experts num_chosen choices normalizes rounds_weights of_kept num_outputs"
            " target_dim joins_next",
            _INT,
        ),
        *_fields("factor epsilon scale softcap limit alpha", _FLOAT),
        *_fields("format scale_type zero group_inputs section_inputs", _INT),
        *_fields("num_units num_pairs", _LONG),
        *_fields("weight scales zeros minimums scale_units minimum_units table", _POINTER),
        *_fields("bias query_norm key_norm layer", _POINTER),
    )


class ProgramArgs(ctypes.Structure):
    """Mirrors `Program` of program.h."""

    _fields_ = (
        ("instructions", _POINTER),
        *_fields("num_instructions is_bf16 num_done num_later", _INT),
    )

    def after(self, num_done: int) -> "ProgramArgs":
        """Return what is left of a program when its first instructions are done."""
        return ProgramArgs(
            self.instructions, self.num_instructions, self.is_bf16, num_done, self.num_later
        )

    def only(self, index: int) -> "ProgramArgs":
        """Return one instruction, which as many threads execute as the whole program."""
        num_later = self.num_instructions - index - 1 + self.num_later
        return ProgramArgs(self.instructions, index + 1, self.is_bf16, index, num_later)


class RunArgs(ctypes.Structure):
    """Mirrors `Run` of program.h."""

    _fields_ = (
        *_fields("buffers steps cosines sines tokens positions kept adaptation exchange", _POINTER),
        *_fields("num_rows num_kept", _INT),
    )


class LowRankArgs(ctypes.Structure):
    """Mirrors `LowRank` of products/low_rank.h."""

    _fields_ = (
        *_fields("down up", _POINTER),
        ("rank", _INT),
        ("scale", _FLOAT),
    )


class AdaptedRowsArgs(ctypes.Structure):
    """Mirrors `AdaptedRows` of products/low_rank.h."""

    _fields_ = (*_fields("rows sites", _POINTER), ("num_rows", _LONG))


class AdaptationArgs(ctypes.Structure):
    """Mirrors `Adaptation` of products/low_rank.h."""

    _fields_ = (
        *_fields("parts inner", _POINTER),
        *_fields("num_parts row_stride site_stride", _LONG),
    )


class AdaptedSiteArgs(ctypes.Structure):
    """Mirrors `AdaptedSite` of products/low_rank.h."""

    _fields_ = (*_fields("site num_outputs column", _INT),)


class StoredType(enum.IntEnum):
    """Types of the matrices in an adapter's file, by their numbers in products/low_rank.cpp."""

    F32 = 0
    F16 = 1
    BF16 = 2


class LogitsArgs(ctypes.Structure):
    """Mirrors `Logits` of sampling/sampling.cpp."""

    _fields_ = (
        ("data", _POINTER),
        ("stride", _LONG),
        *_fields("vocab_size is_bf16", _INT),
    )


class MasksArgs(ctypes.Structure):
    """Mirrors `Masks` of sampling/sampling.cpp."""

    _fields_ = (("words", _POINTER), ("num_words", _INT))


SAMPLING_ROW = struct.Struct("=qqddfiiiii")
"""The layout of `Order` in sampling/choice.h: seed, position, min_p, top_p, temperature, top_k,
row, mask, first edit, number of edits."""
SCORE_EDIT = struct.Struct("=QQQQiiifff")
"""The layout of `Edit` in sampling/edits.h: addresses of ids, biases, counts and the latest
outputs; kind, number of ids, number of the latest outputs; penalties for repetition, frequency and
presence."""


class EditKind(enum.IntEnum):
    """Kinds of edits, by their numbers in sampling/edits.h."""

    BAN = 0
    ADD_BIAS = 1
    PENALIZE = 2
    ALLOW = 3
    FORCE = 4


class ChoiceState(enum.IntEnum):
    """The result of sampling a row, by its number in sampling/sampling.cpp."""

    CHOSEN = 0
    NOT_FINITE = 1


class CompressorArgs(ctypes.Structure):
    """Mirrors `Compressor` of attention/compressed_attention.h."""

    _fields_ = (
        *_fields("biases factors", _POINTER),
        ("epsilon", _FLOAT),
        *_fields("dim values_at gates_at entry_at", _INT),
    )


class CompressedLayerArgs(ctypes.Structure):
    """Mirrors `CompressedLayer` of attention/compressed_attention.h."""

    _fields_ = (
        *_fields("rows entries sinks", _POINTER),
        ("block_stride", _LONG),
        *_fields("num_heads head_dim block_size window is_bf16", _INT),
        *_fields("ratio num_series row_width entry_width rope_dim", _INT),
        *_fields("num_index_heads num_chosen", _INT),
        *_fields("scale index_scale", _FLOAT),
        *_fields("attended indexed", CompressorArgs),
    )


class CompressedRowsArgs(ctypes.Structure):
    """Mirrors `CompressedRows` of attention/compressed_attention.h."""

    _fields_ = (
        ("query", RowsArgs),
        *_fields("entry_table_offset entry_tables stored", _POINTER),
        *_fields("index_queries index_weights end_rows cosines sines", _POINTER),
        *_fields("num_ends num_texts", _INT),
    )


class StreamMixingArgs(ctypes.Structure):
    """Mirrors `StreamMixing` of stream_mixing.h."""

    _fields_ = (
        *_fields("products streams biases scales gates matrix out", _POINTER),
        ("stride", _LONG),
        *_fields("num_rows num_streams size num_iterations is_bf16", _INT),
        ("epsilon", _FLOAT),
    )

"""The compiled kernels as Python functions over tensors.

The kernels use the same OpenMP threads as torch, since both are linked to the libgomp that is
already loaded.
"""

import ctypes
import enum
import logging
import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch.nn.functional import pad

from worker_proc.native.build import library_path, prebuilt_path
from worker_proc.native.exchange import ExchangeArgs, NativeExchange
from worker_proc.native.recurrence import (
    ConvolutionArgs,
    GatedNormArgs,
    GatedRecurrenceArgs,
    HeadRowsArgs,
    RecurrentTexts,
    ScanArgs,
    SelectiveScanArgs,
    WeightedAverageArgs,
)

NATIVE_DTYPES = (torch.float32, torch.bfloat16)

_log = logging.getLogger("troika.worker")
_POINTER, _INT, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float
PANEL_OUTPUTS = 32
"""Of a pair of panels, in which weights are packed."""
_GATES = 16  # of a pair of panels
_UNIT_BYTES, _UNIT_STEP = 4, 16
CHOICE_BYTES = 8
"""Of `Choice` in experts.h."""
_ROW_BYTES = 64
_CODED_ROW_BYTES = 64  # of `CodedRow` in coded_rows.h, before the codes
_ALIAS_BYTES = 2048
"""Rows that are a multiple of it apart share few sets of the first cache."""
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "troika_attend": (*[_POINTER] * 6, _FLOAT, _FLOAT),
    "troika_attend_texts": (*[_POINTER] * 6, _FLOAT, _FLOAT),
    "troika_rms_norm": (_POINTER, _LONG, _POINTER, _POINTER, _INT, _INT, _FLOAT, _INT, _INT),
    "troika_activate": (_POINTER, _LONG, _POINTER, *[_INT] * 4),
    "troika_gated_norm": (_POINTER,),
    "troika_convolve": (_POINTER, _POINTER),
    "troika_prepare_heads": (_POINTER,),
    "troika_scan": (_POINTER, _POINTER),
    "troika_selective_scan": (_POINTER, _POINTER),
    "troika_gated_recurrence": (_POINTER, _POINTER),
    "troika_weighted_average": (_POINTER, _POINTER),
    "troika_pack": (_POINTER, *[_INT] * 4, _POINTER),
    "troika_pack_codes": (_POINTER, *[_INT] * 4, _POINTER, _POINTER),
    "troika_compact_bytes": (_INT, _POINTER, _POINTER),
    "troika_pack_compact": (_POINTER, *[_INT] * 3, *[_POINTER] * 3),
    "troika_round": (_POINTER, *[_INT] * 3),
    "troika_project": (*[_POINTER] * 4, _INT, _INT),
    "troika_look_up": (*[_POINTER] * 3, _INT, _INT),
    "troika_adapt": (_POINTER, _INT, *[_POINTER] * 3, _INT, _INT),
    "troika_copy_low_rank": (_POINTER, _INT, _LONG, _LONG, _INT, _POINTER, _INT, _POINTER),
    "troika_execute": (_POINTER, _POINTER),
    "troika_sample": (_POINTER, _POINTER, _INT, *[_POINTER] * 4),
    "troika_enable_tiles": (),
}


class Format(enum.IntEnum):
    """Formats of packed weights, by their numbers in weights.h."""

    UNITS = 0
    INT8 = 1
    INT4 = 2
    INT8_FOR_CODES = 3
    """The codes of INT8, for rows that are codes, too."""
    COMPACT = 4
    """Values of bfloat16 in 12 bits each, without loss (compact_weights.h)."""
    GROUPED_INT4 = 5
    """Whole numbers of a quantized checkpoint, as grouped_codes.h reads them."""
    GROUPED_INT8 = 6
    GROUPED_E4M3 = 7
    GROUPED_TABLE = 8
    """Places in a table of 16 numbers."""


class _Codes(NamedTuple):
    """How weights.h packs codes."""

    per_byte: int
    per_unit: int
    group_inputs: int | None  # None: an output has one scale
    scale_dtype: torch.dtype


_CODES = {
    Format.INT8: _Codes(1, 2, None, torch.float32),
    Format.INT4: _Codes(2, 2, 128, torch.bfloat16),
    Format.INT8_FOR_CODES: _Codes(1, 4, None, torch.float32),
}
GROUPED = (
    Format.GROUPED_INT4,
    Format.GROUPED_INT8,
    Format.GROUPED_E4M3,
    Format.GROUPED_TABLE,
)
"""Formats of grouped_codes.h, for rows of either type."""
MAX_CODED_INPUTS = (2**31 - 1) // 127**2
"""Of a weight for rows of codes: with more, a sum of products could exceed 32 bits."""


class Activation(enum.IntEnum):
    """Activations of pointwise.h, by their numbers there."""

    SILU = 0
    GELU_TANH = 1
    GELU = 2
    RELU_SQUARED = 3


class Kind(enum.IntEnum):
    """Kinds of instructions of decoder.cpp."""

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
    NORMALIZE_KEPT = 12
    PROJECT_HEADS = 13
    PERMUTE = 14
    SHRINK = 15
    EXPAND = 16


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
    """`Layer` of step.h."""

    _fields_ = (
        *_fields("keys values", _POINTER),
        *_fields("num_heads num_kv_heads head_dim value_head_dim block_size window", _INT),
        *_fields("is_bf16 has_pairs kv_format is_latent is_chunked is_shared", _INT),
        *_fields("sinks biases", _POINTER),
        *_fields("bias_stride bias_origin", _LONG),
    )


class StepArgs(ctypes.Structure):
    """`Step` of step.h."""

    _fields_ = (
        *_fields("num_rows item_size num_pieces num_splits", _INT),
        *_fields("slots first_row num_tokens start table_offset tables", _POINTER),
        *_fields("item_segment item_token group_item group_shared", _POINTER),
        *_fields("piece_group piece_section piece_sums split_piece sums", _POINTER),
    )


class WholeTextsArgs(ctypes.Structure):
    """`WholeTexts` of text_attention.h."""

    _fields_ = (("num_texts", _INT), ("first_rows", _POINTER), ("counts", _POINTER))


class RowsArgs(ctypes.Structure):
    """`Rows` of step.h."""

    _fields_ = (("data", _POINTER), *_fields("row_stride head_stride", _LONG))


class BufferArgs(ctypes.Structure):
    """`Buffer` of decoder.cpp."""

    _fields_ = (("data", _POINTER), ("stride", _LONG))


class Instruction(ctypes.Structure):
    """`Instruction` of decoder.cpp."""

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
    """`Program` of decoder.cpp."""

    _fields_ = (("instructions", _POINTER), *_fields("num_instructions is_bf16", _INT))


class RunArgs(ctypes.Structure):
    """`Run` of decoder.cpp."""

    _fields_ = (
        *_fields("buffers steps cosines sines tokens positions kept adaptation", _POINTER),
        *_fields("num_rows num_kept", _INT),
    )


class LowRankArgs(ctypes.Structure):
    """`LowRank` of low_rank.h."""

    _fields_ = (
        *_fields("down up", _POINTER),
        ("rank", _INT),
        ("scale", _FLOAT),
    )


class AdaptedRowsArgs(ctypes.Structure):
    """`AdaptedRows` of low_rank.h."""

    _fields_ = (*_fields("rows sites", _POINTER), ("num_rows", _LONG))


class AdaptationArgs(ctypes.Structure):
    """`Adaptation` of low_rank.h."""

    _fields_ = (
        *_fields("parts inner", _POINTER),
        *_fields("num_parts row_stride site_stride", _LONG),
    )


class AdaptedSiteArgs(ctypes.Structure):
    """`AdaptedSite` of low_rank.h."""

    _fields_ = (*_fields("site num_outputs column", _INT),)


class StoredType(enum.IntEnum):
    """Types of the matrices in an adapter's file, by their numbers in low_rank.cpp."""

    F32 = 0
    F16 = 1
    BF16 = 2


class LogitsArgs(ctypes.Structure):
    """`Logits` of sampling.cpp."""

    _fields_ = (
        ("data", _POINTER),
        ("stride", _LONG),
        *_fields("vocab_size is_bf16", _INT),
    )


class MasksArgs(ctypes.Structure):
    """`Masks` of sampling.cpp."""

    _fields_ = (("words", _POINTER), ("num_words", _INT))


SAMPLING_ROW = struct.Struct("=qqddfiiiii")
"""`Order` of choice.h: seed, position, min_p, top_p, temperature, top_k, row, line of masks, first
edit, number of edits."""

SCORE_EDIT = struct.Struct("=QQQQiiifff")
"""`Edit` of edits.h: addresses of ids, biases, counts and the latest outputs; kind, number of ids,
number of the latest outputs; penalties for repetition, frequency and presence."""


class EditKind(enum.IntEnum):
    """Kinds of edits, by their numbers in edits.h."""

    BAN = 0
    ADD_BIAS = 1
    PENALIZE = 2
    ALLOW = 3
    FORCE = 4


class ChoiceState(enum.IntEnum):
    """What became of a row, by its number in sampling.cpp."""

    CHOSEN = 0
    NOT_FINITE = 1


class Grouping(NamedTuple):
    """What the groups of inputs of a weight in grouped codes have in common, in their order."""

    zeros: torch.Tensor | None
    """uint8, in the order of the scales; None: all are `zero`."""
    zero: int
    num_inputs: int
    """Of a group: 16, or a multiple of 32."""
    order: torch.Tensor | None = None
    """int32, `[num_inputs]`: the input that stands at each place of the packed weight."""
    minimums: torch.Tensor | None = None
    """What is added to products, instead of zero points; of the type of the scales."""
    scale_units: torch.Tensor | None = None
    """float16, by sections: scales in int8 are multiples of these."""
    minimum_units: torch.Tensor | None = None
    section_inputs: int = 0
    """Of a section, a multiple of those of a group."""
    table: torch.Tensor | None = None
    """float32, `[16]`: what the codes of GROUPED_TABLE stand for."""

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors in the order of the panels, by their names."""
        names = ("zeros", "minimums", "scale_units", "minimum_units")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def with_tensors(self, tensors: Mapping[str, Any]) -> "Grouping":
        """Return the same with other tensors, by their names."""
        return self._replace(**tensors)


SCALE_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}
"""Types of the scales of grouped codes, by their numbers in grouped_codes.h."""


class PackedWeight(NamedTuple):
    """A weight in a layout of weights.h or grouped_codes.h, with its bias."""

    panels: torch.Tensor
    scales: torch.Tensor | None  # of codes; or what COMPACT has beside them
    bias: torch.Tensor | None  # float32, in the order of the panels
    num_inputs: int
    num_units: int
    num_pairs: int
    format: Format
    grouping: Grouping | None = None
    """Of grouped codes."""

    @property
    def num_outputs(self) -> int:
        """The outputs, those that only fill the last panels included."""
        return self.num_pairs * PANEL_OUTPUTS

    @property
    def order(self) -> torch.Tensor | None:
        """The order in which the weight takes its inputs, where it is not their own."""
        return None if self.grouping is None else self.grouping.order

    def outputs(self, first: int, count: int) -> "PackedWeight":
        """Return a part of the outputs, which shares the memory; both are multiples of 32."""
        first_pair, num_pairs = first // PANEL_OUTPUTS, -(-count // PANEL_OUTPUTS)

        def part(whole: torch.Tensor) -> torch.Tensor:
            pairs = whole.view(self.num_pairs, -1)
            return pairs[first_pair : first_pair + num_pairs].view(-1)

        grouping = self.grouping
        if grouping is not None:
            parts = {name: part(whole) for name, whole in grouping.tensors.items()}
            grouping = grouping.with_tensors(parts)
        return self._replace(
            grouping=grouping,
            panels=part(self.panels),
            scales=None if self.scales is None else part(self.scales),
            bias=None if self.bias is None else part(self.bias),
            num_pairs=num_pairs,
        )


class Matrices(Protocol):
    """The weights of several experts; a tensor `[num_experts, num_outputs, num_inputs]` is one."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> torch.Tensor: ...


class NativeLibrary:
    """The compiled kernels. Rows are float32 or bfloat16."""

    def __init__(self, path: Path, *, uses_tiles: bool = True) -> None:
        """Load the library; without `uses_tiles` its kernels use no AMX."""
        self.path = path
        self._library = ctypes.CDLL(str(path))
        for name, types in _ARGUMENTS.items():
            function = getattr(self._library, name)
            function.argtypes, function.restype = types, None
        if uses_tiles:
            self._library.troika_enable_tiles()
        self.has_pairs = bool(self._library.troika_has_pairs())
        """Whether attention in bfloat16 has kernels for pairs of values (attention_pairs.h)."""

    def exchange(self, memory: int, rank: int, num_ranks: int, slot_bytes: int) -> NativeExchange:
        """Return what exchanges rows with other ranks, over shared memory at an address."""
        return NativeExchange(self._library, ExchangeArgs(memory, rank, num_ranks, slot_bytes))

    def attend(
        self,
        layer: LayerArgs,
        step: StepArgs,
        rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        scoring: tuple[float, float],
        out: torch.Tensor,
    ) -> None:
        """Store keys and values, and attend into `out`, `[T, num_heads, value_head_dim]`.

        `rows` are query, key and value, `[T, heads, dim]` each; `scoring` is the factor on scores,
        and their soft cap or 0.
        """
        parts = (layer, step, *map(_rows_args, rows))
        self._library.troika_attend(*map(ctypes.byref, parts), out.data_ptr(), *scoring)

    def attend_texts(
        self,
        layer: LayerArgs,
        texts: tuple[Sequence[int], Sequence[int]],
        rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        scoring: tuple[float, float],
        out: torch.Tensor,
    ) -> None:
        """Attend within whole texts, given their first rows and lengths; else as `attend`."""
        first_rows, counts = texts
        columns = ((_INT * len(first_rows))(*first_rows), (_INT * len(counts))(*counts))
        addresses = (ctypes.addressof(column) for column in columns)
        parts = (layer, WholeTextsArgs(len(first_rows), *addresses), *map(_rows_args, rows))
        self._library.troika_attend_texts(*map(ctypes.byref, parts), out.data_ptr(), *scoring)

    def rms_norm(
        self, hidden: torch.Tensor, weight: torch.Tensor, epsilon: float, round_first: bool
    ) -> torch.Tensor:
        """Normalize the last dimension, and multiply it by `weight`, which is float32.

        With `round_first` the factors are applied to values of the dtype of `hidden`.
        """
        rows = _dense_rows(hidden)
        out = torch.empty(hidden.shape, dtype=hidden.dtype)
        self._library.troika_rms_norm(
            rows.data_ptr(),
            rows.stride(0),
            weight.data_ptr(),
            out.data_ptr(),
            *rows.shape,
            epsilon,
            hidden.dtype == torch.bfloat16,
            round_first,
        )
        return out

    def activate(self, hidden: torch.Tensor, activation: Activation) -> torch.Tensor:
        """Apply an activation to every value."""
        rows = _dense_rows(hidden)
        out = torch.empty(hidden.shape, dtype=hidden.dtype)
        self._library.troika_activate(
            rows.data_ptr(),
            rows.stride(0),
            out.data_ptr(),
            *rows.shape,
            activation,
            hidden.dtype == torch.bfloat16,
        )
        return out

    def gated_norm(self, norm: GatedNormArgs) -> None:
        """Normalize rows, and multiply them by a function of gates."""
        self._library.troika_gated_norm(ctypes.byref(norm))

    def convolve(self, convolution: ConvolutionArgs, texts: RecurrentTexts) -> None:
        """Convolve the rows of each text, and save the last ones at its cuts."""
        self._library.troika_convolve(ctypes.byref(convolution), ctypes.byref(texts))

    def prepare_heads(self, heads: HeadRowsArgs) -> None:
        """Write rows of heads as float32, of unit length if asked, times a factor."""
        self._library.troika_prepare_heads(ctypes.byref(heads))

    def scan(self, scan: ScanArgs, texts: RecurrentTexts) -> None:
        """Scan the tokens of each text, and save the states at its cuts."""
        self._library.troika_scan(ctypes.byref(scan), ctypes.byref(texts))

    def selective_scan(self, scan: SelectiveScanArgs, texts: RecurrentTexts) -> None:
        """Scan the channels of each text, and save the states at its cuts."""
        self._library.troika_selective_scan(ctypes.byref(scan), ctypes.byref(texts))

    def gated_recurrence(self, scan: GatedRecurrenceArgs, texts: RecurrentTexts) -> None:
        """Scan the channels of each text, and save the states at its cuts."""
        self._library.troika_gated_recurrence(ctypes.byref(scan), ctypes.byref(texts))

    def weighted_average(self, scan: WeightedAverageArgs, texts: RecurrentTexts) -> None:
        """Scan the channels of each text, and save the states at its cuts."""
        self._library.troika_weighted_average(ctypes.byref(scan), ctypes.byref(texts))

    def pack(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        format: Format = Format.UNITS,
        *,
        gates: bool = False,
    ) -> PackedWeight:
        """Pack `[num_outputs, num_inputs]`; with `gates` half of the outputs are gates.

        Codes need weights in bfloat16, and stand for what `round` makes of them. What cannot be
        COMPACT becomes UNITS: exponents may differ too much, and some processors gain nothing.
        """
        weight = weight.contiguous()
        num_outputs, num_inputs = weight.shape
        per_unit = _CODES[format].per_unit if format in _CODES else _UNIT_BYTES // weight.itemsize
        num_units = _round_up(num_inputs, per_unit * _UNIT_STEP) // per_unit
        columns, step = (num_outputs // 2, _GATES) if gates else (num_outputs, PANEL_OUTPUTS)
        num_pairs = -(-columns // step)
        if bias is not None:
            bias = packed_bias(bias, gates=gates)
        sizes = num_inputs, num_units, num_pairs
        assert format not in GROUPED  # whose codes are read, and not made of weights
        assert format is Format.UNITS or weight.dtype == torch.bfloat16
        if format is Format.COMPACT:
            parts = self._pack_compact(weight, num_units, num_pairs, gates=gates)
            if parts is not None:
                return PackedWeight(*parts, bias, *sizes, format)
            format = Format.UNITS
        shape = num_outputs, num_inputs, gates
        if format is Format.UNITS:
            panels = torch.empty(num_pairs * PANEL_OUTPUTS * num_units, dtype=torch.int32)
            is_bf16 = weight.dtype == torch.bfloat16
            self._library.troika_pack(weight.data_ptr(), is_bf16, *shape, panels.data_ptr())
            return PackedWeight(panels, None, bias, *sizes, format)
        codes = _CODES[format]
        width = _round_up(num_inputs, self._library.troika_coded_inputs(format))
        num_groups = 1 if codes.group_inputs is None else -(-width // codes.group_inputs)
        num_panel_outputs = num_pairs * PANEL_OUTPUTS
        panels = torch.zeros(num_panel_outputs * width // codes.per_byte, dtype=torch.uint8)
        scales = torch.zeros(num_panel_outputs * num_groups, dtype=codes.scale_dtype)
        pointers = panels.data_ptr(), scales.data_ptr()
        self._library.troika_pack_codes(weight.data_ptr(), format, *shape, *pointers)
        return PackedWeight(panels, scales, bias, *sizes, format)

    def _pack_compact(
        self, weight: torch.Tensor, num_units: int, num_pairs: int, *, gates: bool
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the codes of a weight and what lies beside them; None: it has none."""
        sizes = _LONG(), _LONG()
        self._library.troika_compact_bytes(num_units, *map(ctypes.byref, sizes))
        if not sizes[0].value:
            return None
        codes, others = (torch.empty(num_pairs * size.value, dtype=torch.uint8) for size in sizes)
        is_packed = _INT()
        self._library.troika_pack_compact(
            weight.data_ptr(),
            *weight.shape,
            gates,
            codes.data_ptr(),
            others.data_ptr(),
            ctypes.byref(is_packed),
        )
        return (codes, others) if is_packed.value else None

    def round(self, weight: torch.Tensor, format: Format) -> None:
        """Round a weight in place to what codes can stand for.

        It is `[..., num_outputs, num_inputs]`, and in bfloat16.
        """
        assert weight.dtype == torch.bfloat16
        assert weight.is_contiguous()
        rows = weight.view(-1, weight.shape[-1])
        self._library.troika_round(rows.data_ptr(), format, *rows.shape)

    def pack_experts(
        self,
        weights: Matrices,
        format: Format = Format.UNITS,
        *,
        gates: bool = False,
        biases: torch.Tensor | None = None,
    ) -> PackedWeight:
        """Pack `[num_outputs, num_inputs]` of each expert, one expert after the other.

        Panels, scales and biases are those of all experts, and the sizes those of one. `biases`
        are `[num_experts, num_outputs]`.
        """
        count = len(weights)

        def pack(number: int) -> PackedWeight:
            bias = None if biases is None else biases[number]
            return self.pack(weights[number].detach(), bias, format, gates=gates)

        first = pack(0)
        panels, scales, bias = (
            None if part is None else part.new_empty(count, len(part)) for part in first[:3]
        )
        assert panels is not None
        for number in range(count):
            one = pack(number) if number > 0 else first
            if one.format is not first.format:  # not all can be COMPACT
                del first, one, panels, scales, bias  # there may be no memory for both
                return self.pack_experts(weights, Format.UNITS, gates=gates, biases=biases)
            panels[number] = one.panels
            if scales is not None and one.scales is not None:
                scales[number] = one.scales
            if bias is not None and one.bias is not None:
                bias[number] = one.bias
        return first._replace(
            panels=panels.view(-1),
            scales=None if scales is None else scales.view(-1),
            bias=None if bias is None else bias.view(-1),
        )

    def project(
        self,
        instruction: Instruction,
        hidden: torch.Tensor,
        width: int,
        order: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return `[rows, width]` for `[rows, num_inputs]`, as one instruction computes it.

        `order` is that in which its weight takes the inputs.
        """
        is_bf16 = hidden.dtype == torch.bfloat16
        # Other codes would be read as units.
        assert is_bf16 or instruction.format in (Format.UNITS, *GROUPED)
        if order is not None:
            hidden = hidden[..., order]
        rows, codes = _dense_rows(hidden), torch.empty(0, 0, dtype=torch.uint8)
        if instruction.format == Format.INT8_FOR_CODES:
            codes = torch.empty(len(rows), coded_stride(instruction.size), dtype=torch.uint8)
        else:
            rows = _padded_rows(rows, instruction.num_units, hidden.itemsize)
            if rows.stride(0) * rows.itemsize % _UNIT_BYTES:
                rows = rows.clone(memory_format=torch.contiguous_format)
        out = torch.empty(len(rows), width, dtype=hidden.dtype)
        buffers = (BufferArgs(t.data_ptr(), t.stride(0) * t.itemsize) for t in (rows, out, codes))
        self._library.troika_project(
            ctypes.byref(instruction), *map(ctypes.byref, buffers), len(rows), is_bf16
        )
        return out

    def look_up(
        self, instruction: Instruction, tokens: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return rows of a table, `[len(tokens), size]`, as one instruction makes them."""
        tokens = tokens.contiguous()
        assert tokens.dtype == torch.int64
        out = torch.empty(len(tokens), instruction.size, dtype=dtype)
        buffer = BufferArgs(out.data_ptr(), out.stride(0) * out.itemsize)
        arguments = (tokens.data_ptr(), ctypes.byref(buffer), len(tokens), dtype == torch.bfloat16)
        self._library.troika_look_up(ctypes.byref(instruction), *arguments)
        return out

    def adapt(
        self,
        site: AdaptedSiteArgs,
        rows: torch.Tensor,
        out: torch.Tensor,
        adaptation: AdaptationArgs,
    ) -> None:
        """Add to `out`, `[num_rows, num_outputs]`, the products of rows at a site, in place."""
        assert rows.stride(1) == out.stride(1) == 1
        buffers = (BufferArgs(t.data_ptr(), t.stride(0) * t.itemsize) for t in (rows, out))
        is_bf16 = rows.dtype == torch.bfloat16
        self._library.troika_adapt(
            ctypes.byref(site),
            rows.shape[1],
            *map(ctypes.byref, buffers),
            ctypes.byref(adaptation),
            len(rows),
            is_bf16,
        )

    def copy_low_rank(
        self,
        source: int,
        type_: StoredType,
        shape: tuple[int, int],
        target: torch.Tensor,
        *,
        transposes: bool,
    ) -> bool:
        """Copy a matrix at an address to lines; returns whether all of its values are finite.

        `target` is the memory of `LowRank.down`, or of `LowRank.up` with `transposes`, and has
        zeros. It is written in one thread, without the interpreter's lock.
        """
        is_finite = _INT()
        is_bf16 = target.dtype == torch.bfloat16
        self._library.troika_copy_low_rank(
            source,
            type_,
            *shape,
            transposes,
            target.data_ptr(),
            is_bf16,
            ctypes.byref(is_finite),
        )
        return bool(is_finite.value)

    def execute(self, program: ProgramArgs, run: RunArgs) -> None:
        """Execute a program over one step."""
        self._library.troika_execute(ctypes.byref(program), ctypes.byref(run))

    def sample(
        self, logits: torch.Tensor, orders: bytes, edits: bytes, masks: torch.Tensor | None
    ) -> tuple[list[int], list[int]]:
        """Return a token and a `ChoiceState` for each SAMPLING_ROW in `orders`.

        `logits` are `[rows, vocab]`; `masks` have one bit a token, int32 `[lines, words]`. The
        memory that a SCORE_EDIT in `edits` points to must exist during the call.
        """
        assert logits.stride(1) == 1
        assert masks is None or (masks.dtype == torch.int32 and masks.is_contiguous())
        num_orders = len(orders) // SAMPLING_ROW.size
        tokens, states = (_LONG * num_orders)(), (_INT * num_orders)()
        is_bf16 = logits.dtype == torch.bfloat16
        arguments = LogitsArgs(logits.data_ptr(), logits.stride(0), logits.shape[1], is_bf16)
        lines = MasksArgs(None, 0) if masks is None else MasksArgs(masks.data_ptr(), masks.shape[1])
        self._library.troika_sample(
            ctypes.byref(arguments),
            orders,
            num_orders,
            edits,
            ctypes.byref(lines),
            tokens,
            states,
        )
        return tokens[:], states[:]


def projection(weight: PackedWeight, **fields: Any) -> Instruction:
    """Return the instruction for a product with a packed weight, from buffer 0 to buffer 1.

    Its rows must be in the weight's order of inputs.
    """
    instruction = Instruction(
        weight=weight.panels.data_ptr(),
        scales=None if weight.scales is None else weight.scales.data_ptr(),
        format=weight.format,
        bias=None if weight.bias is None else weight.bias.data_ptr(),
        size=weight.num_inputs,
        num_units=weight.num_units,
        num_pairs=weight.num_pairs,
        **{"kind": Kind.PROJECT, "target": 1, "factor": 1.0, **fields},
    )
    if weight.grouping is not None and weight.scales is not None:
        for name, tensor in weight.grouping.tensors.items():
            setattr(instruction, name, tensor.data_ptr())
        if weight.grouping.table is not None:
            instruction.table = weight.grouping.table.data_ptr()
        instruction.scale_type = SCALE_TYPES[weight.scales.dtype]
        instruction.zero = weight.grouping.zero
        instruction.group_inputs = weight.grouping.num_inputs
        instruction.section_inputs = weight.grouping.section_inputs
    return instruction


def embedding(table: "torch.Tensor | PackedWeight", num_tokens: int, **fields: Any) -> Instruction:
    """Return the instruction that makes the rows of tokens, of a table or of a weight's outputs.

    A weight must be in grouped codes, with its inputs in their own order.
    """
    fields = {"factor": 1.0, "num_outputs": num_tokens, **fields, "kind": Kind.EMBED}
    if isinstance(table, PackedWeight):
        assert table.format in GROUPED
        assert table.order is None
        return projection(table, **{"target": 0, **fields})
    return Instruction(weight=table.data_ptr(), size=table.shape[1], **fields)


def by_panels(values: torch.Tensor, *, gates: bool = False) -> torch.Tensor:
    """Return `[pairs, 2 panels, 16 outputs, ...]` of `[num_outputs, ...]`, filled up with zeros.

    With `gates`, half of the outputs are gates and half factors, and the panels alternate.
    """
    halves = 2 if gates else 1
    step = PANEL_OUTPUTS // halves
    columns = len(values) // halves
    num_pairs = -(-columns // step)
    if num_pairs * step > columns:
        filled = values.new_zeros(halves, num_pairs * step, *values.shape[1:])
        filled[:, :columns] = values.unflatten(0, (halves, columns))
        values = filled.flatten(0, 1)
    if gates:
        return values.view(2, num_pairs, step, *values.shape[1:]).transpose(0, 1)
    return values.view(num_pairs, 2, PANEL_OUTPUTS // 2, *values.shape[1:])


def packed_bias(bias: torch.Tensor, *, gates: bool = False) -> torch.Tensor:
    """Return a bias in float32 and in the order of the panels."""
    return by_panels(bias.detach().float(), gates=gates).reshape(-1)


def row_stride(width: int, itemsize: int) -> int:
    """Return the bytes between rows of a program's buffer, which have room for whole panels."""
    return _without_alias(_round_up(width, PANEL_OUTPUTS) * itemsize)


def coded_stride(num_inputs: int) -> int:
    """Return the bytes between rows of codes."""
    tile_inputs = _CODES[Format.INT8_FOR_CODES].per_unit * _UNIT_STEP
    return _without_alias(_CODED_ROW_BYTES + _round_up(num_inputs, tile_inputs))


def _without_alias(stride: int) -> int:
    return stride + _ROW_BYTES if stride % _ALIAS_BYTES == 0 else stride


def load_library() -> NativeLibrary | None:
    """Return the kernels that came with the package, or that this user has compiled here."""
    prebuilt = prebuilt_path()
    if prebuilt is not None:
        try:
            return NativeLibrary(prebuilt)
        except (OSError, AttributeError) as error:
            _log.warning("%s cannot be loaded: %s", prebuilt, error)
    try:
        path = library_path()
        if path.stat().st_uid != os.getuid():
            return None
        return NativeLibrary(path)
    except (OSError, RuntimeError, AttributeError) as error:
        _log.debug("computing without native kernels: %s", error)
        return None


def _round_up(size: int, part: int) -> int:
    return -(-size // part) * part


def _dense_rows(hidden: torch.Tensor) -> torch.Tensor:
    rows = hidden.reshape(-1, hidden.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _padded_rows(rows: torch.Tensor, num_units: int, itemsize: int) -> torch.Tensor:
    """Return rows with zeros up to the last unit of the weights."""
    missing = num_units * _UNIT_BYTES // itemsize - rows.shape[1]
    return pad(rows, (0, missing)) if missing else rows


def _rows_args(tensor: torch.Tensor) -> RowsArgs:
    assert tensor.stride(2) == 1
    return RowsArgs(tensor.data_ptr(), tensor.stride(0), tensor.stride(1))

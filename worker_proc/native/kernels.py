"""The compiled kernels as Python functions over tensors.

The kernels use the same OpenMP threads as torch, since both are linked to the libgomp that is
already loaded.
"""

import ctypes
import logging
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import pad

from worker_proc.native.build import library_path, prebuilt_path
from worker_proc.native.exchange import ExchangeArgs, NativeExchange
from worker_proc.native.instructions import coded_stride
from worker_proc.native.packed_weights import (
    GROUPED,
    Format,
)
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
from worker_proc.native.structures import (
    SAMPLING_ROW,
    Activation,
    AdaptationArgs,
    AdaptedSiteArgs,
    BufferArgs,
    CompressedLayerArgs,
    CompressedRowsArgs,
    Instruction,
    LayerArgs,
    LogitsArgs,
    MasksArgs,
    ProgramArgs,
    RowsArgs,
    RowTermsArgs,
    RunArgs,
    StepArgs,
    StoredType,
    StreamMixingArgs,
    WholeTextsArgs,
)
from worker_proc.native.weight_packer import WeightPacker

NATIVE_DTYPES = (torch.float32, torch.bfloat16)

_log = logging.getLogger("troika.worker")
_POINTER, _INT, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float
_UNIT_BYTES = 4
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "troika_attend": (*[_POINTER] * 7, _FLOAT, _FLOAT),
    "troika_attend_texts": (*[_POINTER] * 6, _FLOAT, _FLOAT),
    "troika_attend_compressed": (*[_POINTER] * 4,),
    "troika_rms_norm": (_POINTER, _LONG, _POINTER, _POINTER, _INT, _INT, _FLOAT, _INT, _INT),
    "troika_activate": (_POINTER, _LONG, _POINTER, *[_INT] * 4),
    "troika_gated_norm": (_POINTER,),
    "troika_mix_streams": (_POINTER,),
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
    "troika_copy_low_rank": (_POINTER, _INT, _LONG, _LONG, _LONG, _INT, _POINTER, _INT, _POINTER),
    "troika_execute": (_POINTER, _POINTER),
    "troika_sample": (_POINTER, _POINTER, _INT, *[_POINTER] * 4),
    "troika_enable_tiles": (),
    "troika_floats_are_faster": (),
    "troika_use_floats": (_INT,),
}


class NativeLibrary:
    """The compiled kernels. Rows are float32 or bfloat16."""

    def __init__(
        self, path: Path, *, uses_tiles: bool = True, uses_floats: bool | None = None
    ) -> None:
        """Load the library; without `uses_tiles` its kernels use no AMX.

        `uses_floats` chooses how many rows in bfloat16 are multiplied
        (products/float_products.h); by default in the way that is faster here.
        """
        self.path = path
        self._library = ctypes.CDLL(str(path))
        for name, types in _ARGUMENTS.items():
            function = getattr(self._library, name)
            function.argtypes, function.restype = types, None
        self._library.troika_floats_are_faster.restype = _INT
        self._library.troika_execute.restype = _INT
        if uses_tiles:
            self._library.troika_enable_tiles()
        if uses_floats is None:
            uses_floats = bool(self._library.troika_floats_are_faster())
        self._library.troika_use_floats(uses_floats)
        self.packer = WeightPacker(self._library)
        self.has_pairs = bool(self._library.troika_has_pairs())
        """Whether attention in bfloat16 has kernels for pairs (attention/pair_attention.h)."""

    def exchange(self, memory: int, rank: int, num_ranks: int, slot_bytes: int) -> NativeExchange:
        """Return an exchange of rows with other ranks, over shared memory at an address."""
        return NativeExchange(self._library, ExchangeArgs(memory, rank, num_ranks, slot_bytes))

    def attend(
        self,
        layer: LayerArgs,
        step: StepArgs,
        rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        scoring: tuple[float, float],
        out: torch.Tensor,
        *,
        terms: RowTermsArgs,
    ) -> None:
        """Store keys and values, and attend into `out`, `[T, num_heads, value_head_dim]`.

        `rows` are query, key and value, `[T, heads, dim]` each; `scoring` is the factor on scores,
        and their soft cap or 0.
        """
        parts = (layer, step, *map(rows_args, rows), terms)
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
        parts = (layer, WholeTextsArgs(len(first_rows), *addresses), *map(rows_args, rows))
        self._library.troika_attend_texts(*map(ctypes.byref, parts), out.data_ptr(), *scoring)

    def attend_compressed(
        self,
        layer: CompressedLayerArgs,
        step: StepArgs,
        rows: CompressedRowsArgs,
        out: torch.Tensor,
    ) -> None:
        """Store rows, make entries, and attend into `out`, `[T, num_heads, head_dim]`."""
        parts = map(ctypes.byref, (layer, step, rows))
        self._library.troika_attend_compressed(*parts, out.data_ptr())

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
        """Return the activations of `hidden`, of any shape, in its type."""
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

    def mix_streams(self, mixing: StreamMixingArgs) -> None:
        """Make one row of the streams of each row, and the weights of new streams."""
        self._library.troika_mix_streams(ctypes.byref(mixing))

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
        """Scan the channels of each text selectively, and save the states at its cuts."""
        self._library.troika_selective_scan(ctypes.byref(scan), ctypes.byref(texts))

    def gated_recurrence(self, scan: GatedRecurrenceArgs, texts: RecurrentTexts) -> None:
        """Add gated inputs to decayed states in each text, and save the states at its cuts."""
        self._library.troika_gated_recurrence(ctypes.byref(scan), ctypes.byref(texts))

    def weighted_average(self, scan: WeightedAverageArgs, texts: RecurrentTexts) -> None:
        """Average the values of each text by weight, and save the states at its cuts."""
        self._library.troika_weighted_average(ctypes.byref(scan), ctypes.byref(texts))

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
        stride: int,
        transposes: bool,
    ) -> bool:
        """Copy a matrix at an address to lines; returns whether all of its values are finite.

        `stride`: values from row to row. `target` is the memory of `LowRank.down`, or of
        `LowRank.up` with `transposes`, and has zeros. It is written in one thread, without the
        interpreter's lock.
        """
        is_finite = _INT()
        is_bf16 = target.dtype == torch.bfloat16
        self._library.troika_copy_low_rank(
            source,
            type_,
            *shape,
            stride,
            transposes,
            target.data_ptr(),
            is_bf16,
            ctypes.byref(is_finite),
        )
        return bool(is_finite.value)

    def execute(self, program: ProgramArgs, run: RunArgs) -> int:
        """Execute a program over one step, and return how many of its instructions are done.

        It stops early only where another rank is missing.
        """
        num_done: int = self._library.troika_execute(ctypes.byref(program), ctypes.byref(run))
        return num_done

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


def _dense_rows(hidden: torch.Tensor) -> torch.Tensor:
    rows = hidden.reshape(math.prod(hidden.shape[:-1]), hidden.shape[-1])  # the width may be 0
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _padded_rows(rows: torch.Tensor, num_units: int, itemsize: int) -> torch.Tensor:
    """Return rows with zeros up to the last unit of the weights."""
    missing = num_units * _UNIT_BYTES // itemsize - rows.shape[1]
    return pad(rows, (0, missing)) if missing else rows


def rows_args(tensor: torch.Tensor) -> RowsArgs:
    assert tensor.stride(2) == 1
    return RowsArgs(tensor.data_ptr(), tensor.stride(0), tensor.stride(1))

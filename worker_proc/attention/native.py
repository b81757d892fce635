"""The CPU's fast backend, which reads keys and values in the pool without gathering them.

A token's result depends only on its own text, so it has the same bits in every batch, chunk and
step.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from worker_proc.attention.interface import PagedLayer, Rows, Scoring
from worker_proc.attention.shared_prefixes import group_by_prefix
from worker_proc.attention.step_memory import StepMemory
from worker_proc.attention.work import Shares, Team, Texts, share_work
from worker_proc.inputs import StepInputs, slot_mappings
from worker_proc.kv.kv_format import CODE_DTYPE, KVFormat
from worker_proc.kv.kv_groups import LayerSpec
from worker_proc.kv.kv_tensors import Shapes
from worker_proc.kv.window import first_visible
from worker_proc.native.kernels import NATIVE_DTYPES, NativeLibrary, rows_args
from worker_proc.native.structures import LayerArgs, RowTermsArgs, StepArgs
from worker_proc.request import ScheduledRequest

MAX_HEAD_DIM = 512
MAX_HEADS_PER_KV_HEAD = 32
"""Maximum number of query heads for each KV head in one kernel call; a layer with more takes
several calls."""
MAX_LATENT_DIM = 640  # limit in latent_attention.h
# Constants of pair_tile.h, and of float_tile.h (kLanes, kTileRows and kFloatSpan). A shared prefix
# has whole spans, as the softmax of a row is rescaled at most once for each span.
PAIR_SLOTS, PAIR_DIMS, PAIR_ROWS, PAIR_SPAN = 16, 32, 32, 64
VECTOR = 16
MAX_SUMS_BYTES = 32 << 20
"""Bounds the partial sums that are kept when contexts are split among threads."""
MAX_CONTEXT_PER_PREFIX = 8
"""Texts with contexts longer than this multiple of their common prefix are not grouped."""


_CPU = torch.device("cpu")
_SAME_LAYER = -1
"""Marks a part of a layer whose keys and values another part of the same layer stores."""


class _Heads(NamedTuple):
    """A part of a layer: some of its query heads."""

    heads: slice
    """Slice of the query heads of each KV head."""
    layer: PagedLayer


def can_attend(specs: Sequence[LayerSpec], dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether the kernel supports these layers."""
    return device.type == "cpu" and dtype in NATIVE_DTYPES and all(map(_is_covered, specs))


def _is_covered(spec: LayerSpec) -> bool:
    if spec.is_latent:
        fits = spec.head_dim <= MAX_LATENT_DIM and spec.value_head_dim <= MAX_HEAD_DIM
        return fits and not spec.is_chunked and spec.kv_source is None
    # Encoders use a kernel that takes all heads at once.
    fits = spec.is_causal or spec.num_heads // spec.num_kv_heads <= MAX_HEADS_PER_KV_HEAD
    return fits and max(spec.head_dim, spec.value_head_dim) <= MAX_HEAD_DIM


class NativeBackend:
    """Attention by the native kernel, reading the pool in place."""

    name = "native kernel"
    depends_on_batch = False

    def __init__(
        self,
        library: NativeLibrary,
        block_size: int,
        dtype: torch.dtype,
        specs: Sequence[LayerSpec],
        windows: Sequence[int | None] = (None,),
        *,
        format: KVFormat = KVFormat.PLAIN,
    ) -> None:
        """Take all layers, each KV group's window, and the format of the pools."""
        self._library = library
        self._format = format
        per_kv_head = max(spec.num_heads // spec.num_kv_heads for spec in specs)
        self._heads_per_kv_head = min(per_kv_head, MAX_HEADS_PER_KV_HEAD)
        self._num_heads = max(spec.num_heads for spec in specs)
        self._num_kv_heads = min(spec.num_kv_heads for spec in specs)
        widest = max(spec.value_head_dim for spec in specs)
        self._token_sums = self._num_heads * (-(-widest // VECTOR) * VECTOR + VECTOR)
        self._sums = torch.empty(0, dtype=torch.float32)
        """Partial sums of context sections, until a layer has merged them."""
        self._block_size = block_size
        self._is_bf16 = dtype == torch.bfloat16
        self._reads_pairs = library.has_pairs and self._is_bf16 and block_size % PAIR_SLOTS == 0
        self._windows = windows
        self._has_latent_layers = any(spec.is_latent for spec in specs)
        self._layers: dict[PagedLayer, LayerArgs] = {}
        self._parts: dict[PagedLayer, list[_Heads]] = {}
        self.steps: list[StepArgs] = []
        """The current step, for each KV group."""
        self._memory: StepMemory | None = None
        """The memory that the current step's addresses point to."""

    def pool_shapes(self, spec: LayerSpec, num_blocks: int) -> Shapes:
        """Return the key pool's shape and the value pool's shape.

        They are `[block, kv_head, dim, slot]` for keys and `[block, kv_head, slot, dim]` for
        values. Latent rows are `[block, slot, dim]`, without a value pool. The kernels for pairs
        use another order within a head's block. In a format with codes, each head's block is one
        row of bytes: the codes in the same order, then the scales.
        """
        heads, size = (num_blocks, spec.num_kv_heads), self._block_size
        if spec.is_latent:
            assert self._format is KVFormat.PLAIN
            return (num_blocks, size, spec.head_dim), None
        if self._format is not KVFormat.PLAIN:
            dims = (spec.head_dim, spec.value_head_dim)
            keys, values = (size * self._format.row_bytes(dim, CODE_DTYPE) for dim in dims)
            return (*heads, keys), (*heads, values)
        return (*heads, spec.head_dim, size), (*heads, size, spec.value_head_dim)

    def begin_step(self, inputs: StepInputs) -> None:
        begun, before = inputs.begun_blocks, self._memory
        if begun is not None and before is not None and before.move_on(begun):
            return
        parts = inputs.parts
        starts = [part.start for part in parts]
        memory = StepMemory(starts, self._block_size, self._windows)
        rows = memory.pointer(inputs.first_rows)
        counts = memory.pointer([part.num_tokens for part in parts])
        shared = [self._share(parts, group) for group in range(len(self._windows))]
        self._reserve_sums(max(shares.num_sums for shares in shared))
        self.steps = []
        mappings = slot_mappings(parts, len(shared), self._block_size, _CPU)
        for group, (slots, shares) in enumerate(zip(mappings, shared, strict=True)):
            work = shares.work
            slots_at, *tables_at = memory.add_group(slots, *self._tables(parts, group))
            sizes = (len(slots), shares.item_size, len(work.piece_groups), len(work.split_pieces))
            columns = (slots_at, rows, counts, memory.starts_at, *tables_at)
            pieces = map(memory.pointer, work)
            self.steps.append(StepArgs(*sizes, *columns, *pieces, self._sums.data_ptr()))
        self._memory = memory

    def _share(self, parts: Sequence[ScheduledRequest], group: int) -> Shares:
        """Divide the step into pieces of work for the threads."""
        texts = Texts(
            [part.start for part in parts],
            [part.num_tokens for part in parts],
            self._windows[group],
        )
        singles = [segment for segment, count in enumerate(texts.counts) if count == 1]
        prefix_groups, alone = self._group_by_prefix(parts, singles, group)
        team = Team(
            torch.get_num_threads(),
            self._num_kv_heads,
            max(PAIR_ROWS // self._heads_per_kv_head, 1),
            MAX_SUMS_BYTES // (self._token_sums * self._sums.itemsize),
        )
        return share_work(texts, prefix_groups, alone, team)

    def _reserve_sums(self, num_sums: int) -> None:
        """Grow the buffer of partial sums if needed, up to MAX_SUMS_BYTES."""
        if len(self._sums) < num_sums * self._token_sums:
            self._sums = torch.empty(num_sums * self._token_sums, dtype=torch.float32)

    def _group_by_prefix(
        self, parts: Sequence[ScheduledRequest], singles: list[int], group: int
    ) -> tuple[list[tuple[list[int], int]], list[int]]:
        """Return groups with the length of their shared prefix, and the ungrouped segments."""
        size = self._block_size
        is_read_once = size % PAIR_SLOTS == 0 and not self._has_latent_layers
        if not is_read_once or self._windows[group] is not None:
            return [], singles
        tables = {segment: parts[segment].request.block_tables[group] for segment in singles}
        per_thread = len(singles) * self._num_kv_heads // torch.get_num_threads()
        max_members = max(1, min(PAIR_ROWS // self._heads_per_kv_head, per_thread))
        groups, alone = group_by_prefix(tables, max_members, -(-PAIR_SPAN // size))
        shared = []
        for members, num_blocks in groups:
            starts = [parts[segment].start for segment in members]
            length = min(num_blocks * size, *starts) // PAIR_SPAN * PAIR_SPAN
            # Threads share a long context better if its text is not in a group.
            if length * MAX_CONTEXT_PER_PREFIX >= max(starts) and length > 0:
                shared.append((members, length))
            else:
                alone += members
        return shared, alone

    def _tables(
        self, parts: Sequence[ScheduledRequest], group: int
    ) -> tuple[list["array[int]"], list[int]]:
        """Return each part's blocks, from the first block that its first token attends to.

        The second value is the index of that block in its text.
        """
        window, size = self._windows[group], self._block_size
        tables = [part.request.block_tables[group] for part in parts]
        if window is None:
            return tables, [0] * len(parts)
        firsts = [first_visible(window, part.start) // size for part in parts]
        return [table[first:] for table, first in zip(tables, firsts, strict=True)], firsts

    def attend(self, layer: PagedLayer, rows: Rows, scoring: Scoring) -> torch.Tensor:
        per_kv_head = layer.spec.num_heads // layer.spec.num_kv_heads
        if per_kv_head > MAX_HEADS_PER_KV_HEAD and not layer.spec.is_latent:
            return self._attend_in_parts(layer, rows, scoring)
        return self._attend(layer, rows, scoring)

    def _attend_in_parts(self, layer: PagedLayer, rows: Rows, scoring: Scoring) -> torch.Tensor:
        """Attend with a slice of each KV head's query heads at a time."""
        if layer not in self._parts:
            self._parts[layer] = list(_cut_heads(layer))
        num_kv_heads = layer.spec.num_kv_heads

        def of(heads: slice, one: torch.Tensor) -> torch.Tensor:
            own: torch.Tensor = one.unflatten(1, (num_kv_heads, -1))[:, :, heads]
            return own.flatten(1, 2).contiguous()

        def attended(part: _Heads) -> torch.Tensor:
            own = scoring._replace(
                biases=None if scoring.biases is None else of(part.heads, scoring.biases),
                sinks=None if scoring.sinks is None else of(part.heads, scoring.sinks),
            )
            query = of(part.heads, rows.query)
            out = self._attend(part.layer, rows._replace(query=query), own)
            split: torch.Tensor = out.unflatten(1, (num_kv_heads, -1))
            return split

        parts = [attended(part) for part in self._parts[layer]]
        return torch.cat(parts, dim=2).flatten(1, 2)

    def _attend(self, layer: PagedLayer, rows: Rows, scoring: Scoring) -> torch.Tensor:
        spec, step = layer.spec, self.steps[layer.group]
        out = rows.query.new_empty(len(rows.query), spec.num_heads, spec.value_head_dim)
        extras = scoring[1:], layer.sinks, layer.biases
        no_extras = (None, None, None), None, None
        assert not spec.is_latent or extras == no_extras  # the latent kernel supports none of these
        terms, kept = _row_terms(scoring)
        numbers = (scoring.scale, scoring.softcap or 0.0)
        dense = Rows(*map(_dense, rows))
        self._library.attend(self.layer_args(layer), step, dense, numbers, out, terms=terms)
        del kept
        return out

    def _has_pairs(self, spec: LayerSpec) -> bool:
        """Return whether the kernels for pairs support a layer."""
        dims = (spec.head_dim, spec.value_head_dim)
        return (
            self._reads_pairs
            and not spec.is_latent
            and all(dim % PAIR_DIMS == 0 for dim in dims)
            and spec.num_heads // spec.num_kv_heads <= PAIR_ROWS
        )

    def layer_args(self, layer: PagedLayer) -> LayerArgs:
        """Return the kernel's description of a layer, whose address does not change."""
        if layer not in self._layers:
            self._layers[layer] = self._describe(layer)
        return self._layers[layer]

    def _describe(self, layer: PagedLayer) -> LayerArgs:
        spec, kv = layer.spec, layer.kv
        assert kv.keys.is_contiguous()
        assert kv.values.is_contiguous()
        shape = (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.value_head_dim)
        settings = (self._block_size, spec.window or 0, self._is_bf16, self._has_pairs(spec))
        pools = (kv.keys.data_ptr(), kv.values.data_ptr())
        kinds = (spec.is_latent, spec.is_chunked, spec.kv_source is not None)
        sinks = None if layer.sinks is None else layer.sinks.data_ptr()
        biases: tuple[int | None, int, int] = (None, 0, -1)
        if layer.biases is not None:
            assert layer.biases.stride(1) == 1
            assert sinks is None
            origin = -1 if layer.bias_origin is None else layer.bias_origin
            biases = (layer.biases.data_ptr(), layer.biases.stride(0), origin)
        return LayerArgs(*pools, *shape, *settings, self._format, *kinds, sinks, *biases)


def _cut_heads(layer: PagedLayer) -> Iterator[_Heads]:
    """Yield the parts of a layer that has too many query heads for each KV head.

    The first part stores keys and values; the others read them.
    """
    spec = layer.spec
    per_kv_head = spec.num_heads // spec.num_kv_heads
    numbers = torch.arange(spec.num_heads).view(spec.num_kv_heads, per_kv_head)
    for first in range(0, per_kv_head, MAX_HEADS_PER_KV_HEAD):
        heads = slice(first, min(first + MAX_HEADS_PER_KV_HEAD, per_kv_head))
        own = numbers[:, heads].flatten()
        part = replace(
            layer,
            spec=replace(
                spec, num_heads=len(own), kv_source=spec.kv_source if first == 0 else _SAME_LAYER
            ),
            sinks=None if layer.sinks is None else layer.sinks[own].contiguous(),
            biases=None if layer.biases is None else layer.biases[own].contiguous(),
        )
        yield _Heads(heads, part)


def _row_terms(scoring: Scoring) -> tuple[RowTermsArgs, torch.Tensor | None]:
    """Return the row-specific terms of scores, and the tensor that must outlive the kernel call."""
    if scoring.biases is None and scoring.sinks is None:
        return RowTermsArgs(), None
    terms = RowTermsArgs()
    biases = None
    if scoring.biases is not None:
        biases = _dense(scoring.biases)
        terms.biases, terms.num_distances = rows_args(biases), biases.shape[2]
    if scoring.sinks is not None:
        assert scoring.sinks.is_contiguous()
        terms.sinks = scoring.sinks.data_ptr()
    return terms, biases


def _dense(rows: torch.Tensor) -> torch.Tensor:
    return rows if rows.stride(2) == 1 else rows.contiguous()

"""The portable backend: gathers keys and values from the pool and calls torch's attention.

It runs on every device and for every `LayerSpec`, and faster backends are compared with it.
Requests that compute one token are batched, padded to the longest of their group; every other
request is a call of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from worker_proc.attention.interface import PagedLayer, Rows, Scoring
from worker_proc.inputs import StepInputs, to_device
from worker_proc.kv.layer_spec import LayerSpec
from worker_proc.mirror import ScheduledRequest

MAX_GROUP_TOKENS = 2**17
"""Most padded tokens of one group, which bounds its memory."""
MIN_FILL = 0.6
"""Least ratio of a group's shortest context to its longest, in blocks."""


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """B requests that compute one token each, with contexts of similar length."""

    rows: torch.Tensor
    """`[B]`: indices in the packed row."""
    block_ids: torch.Tensor
    """`[B · W]`: W blocks each, padded with the null block."""
    hidden: torch.Tensor
    """`[B, W · block_size, 1, 1]`: whether the token does not attend to a position."""
    bias: torch.Tensor
    """`[B, 1, 1, W · block_size]`: the same as 0 and -inf, which is added to scores."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """One request that computes T > 1 tokens, over a context of L."""

    first_row: int
    end_row: int
    block_ids: torch.Tensor | None
    """Blocks of the context; None: the context is the chunk itself."""
    bias: torch.Tensor | None
    """`[T, L]`; None: causal."""
    context_len: int


class Rule(NamedTuple):
    """Group and window of layers that share their metadata."""

    group: int
    window: int | None
    """Window of the layers; that of the group is at least as large."""


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Indices of one step for the layers of one rule."""

    groups: list[DecodeGroup]
    chunks: list[Chunk]


class SdpaBackend:
    """Attention by torch's `scaled_dot_product_attention` over gathered blocks."""

    def __init__(
        self, rules: set[Rule], block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Take the rules of the model's layers, and the shape of the pool."""
        self._rules = rules
        self._block_size = block_size
        self._dtype = dtype
        self._device = device
        self._metadata: dict[tuple[int, int | None], AttentionMetadata] = {}
        self._slots: list[torch.Tensor] = []

    def pool_shapes(
        self, spec: LayerSpec, num_blocks: int
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return `[block, slot, kv_head, dim]`, for keys and for values."""
        rows = (num_blocks, self._block_size, spec.num_kv_heads)
        return (*rows, spec.head_dim), (*rows, spec.value_head_dim)

    def begin_step(self, inputs: StepInputs) -> None:
        """Build the step's metadata once per rule."""
        self._slots = inputs.slot_mappings
        self._metadata = {rule: self._build_metadata(inputs, rule) for rule in self._rules}

    def attend(self, layer: PagedLayer, rows: Rows, scoring: Scoring) -> torch.Tensor:
        """Store the row's keys and values, and attend; see `AttentionBackend`."""
        query, key, value = rows
        kv, spec, slots = layer.kv, layer.spec, self._slots[layer.group]
        kv.keys.view(-1, spec.num_kv_heads, spec.head_dim).index_copy_(0, slots, key)
        kv.values.view(-1, spec.num_kv_heads, spec.value_head_dim).index_copy_(0, slots, value)
        out = query.new_empty(query.shape[0], spec.num_heads, spec.value_head_dim)
        metadata = self._metadata[layer.group, spec.window]
        for group in metadata.groups:
            out[group.rows] = _attend_group(layer, query, group, scoring)
        for chunk in metadata.chunks:
            part = slice(chunk.first_row, chunk.end_row)
            keys, values = key[part], value[part]
            if chunk.block_ids is not None:
                keys = _gather(kv.keys, chunk.block_ids)[: chunk.context_len]
                values = _gather(kv.values, chunk.block_ids)[: chunk.context_len]
            out[part] = _attend_chunk(query[part], keys, values, chunk.bias, scoring)
        return out

    def _build_metadata(self, inputs: StepInputs, rule: Rule) -> AttentionMetadata:
        decodes: list[tuple[int, ScheduledRequest]] = []
        chunks: list[Chunk] = []
        for first_row, part in zip(inputs.first_rows, inputs.parts, strict=True):
            if part.num_tokens == 1:
                decodes.append((first_row, part))
            else:
                chunks.append(self._chunk(first_row, part, rule))
        decodes.sort(key=lambda entry: entry[1].start)
        groups = [self._group(members, rule) for members in self._grouped(decodes, rule.window)]
        return AttentionMetadata(groups, chunks)

    def _first_block(self, position: int, window: int | None) -> int:
        return 0 if window is None else max(position - window + 1, 0) // self._block_size

    def _num_blocks(self, part: ScheduledRequest, window: int | None) -> int:
        return part.start // self._block_size + 1 - self._first_block(part.start, window)

    def _grouped(
        self, decodes: Sequence[tuple[int, ScheduledRequest]], window: int | None
    ) -> list[list[tuple[int, ScheduledRequest]]]:
        """Divide `decodes`, ordered by length, so that no group pads or gathers too much."""
        groups: list[list[tuple[int, ScheduledRequest]]] = []
        fewest = 0
        for entry in decodes:
            num_blocks = self._num_blocks(entry[1], window)
            fits = groups and num_blocks * MIN_FILL <= fewest + 1
            if fits:
                fits = (len(groups[-1]) + 1) * num_blocks * self._block_size <= MAX_GROUP_TOKENS
            if fits:
                groups[-1].append(entry)
            else:
                groups.append([entry])
                fewest = num_blocks
        return groups

    def _group(self, members: Sequence[tuple[int, ScheduledRequest]], rule: Rule) -> DecodeGroup:
        size, window = self._block_size, rule.window
        width = max(self._num_blocks(part, window) for _, part in members)
        block_ids: list[int] = []
        lasts: list[int] = []
        firsts: list[int] = []
        for _, part in members:
            first_block = self._first_block(part.start, window)
            table = part.request.block_tables[rule.group]
            table = table[first_block : part.start // size + 1]
            block_ids += table + [0] * (width - len(table))
            lasts.append(part.start - first_block * size)
            firsts.append(0 if window is None else lasts[-1] - window + 1)
        offsets = torch.arange(width * size, device=self._device)
        hidden = offsets > to_device(lasts, self._device).unsqueeze(1)
        if window is not None:
            hidden |= offsets < to_device(firsts, self._device).unsqueeze(1)
        return DecodeGroup(
            rows=to_device([row for row, _ in members], self._device),
            block_ids=to_device(block_ids, self._device),
            hidden=hidden[:, :, None, None],
            bias=self._bias(hidden)[:, None, None, :],
        )

    def _chunk(self, first_row: int, part: ScheduledRequest, rule: Rule) -> Chunk:
        size, window, end_row = self._block_size, rule.window, first_row + part.num_tokens
        whole = window is None or part.end <= window
        if part.start == 0 and whole:
            return Chunk(first_row, end_row, None, None, part.num_tokens)
        first_block = self._first_block(part.start, window) if part.start else 0
        block_ids = None
        if part.start:
            table = part.request.block_tables[rule.group]
            block_ids = table[first_block : (part.end - 1) // size + 1]
        first = first_block * size
        queries = torch.arange(part.start, part.end, device=self._device).unsqueeze(1)
        keys = torch.arange(first, part.end, device=self._device)
        hidden = keys > queries
        if window is not None:
            hidden |= keys <= queries - window
        return Chunk(
            first_row,
            end_row,
            None if block_ids is None else to_device(block_ids, self._device),
            self._bias(hidden),
            part.end - first,
        )

    def _bias(self, hidden: torch.Tensor) -> torch.Tensor:
        bias = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device)
        return bias.masked_fill_(hidden, -torch.inf)


def _gather(pool: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
    """Return the tokens of some blocks, `[num_tokens, num_kv_heads, head_dim]`."""
    return pool.index_select(0, block_ids).flatten(0, 1)


def _attend_group(
    layer: PagedLayer, query: torch.Tensor, group: DecodeGroup, scoring: Scoring
) -> torch.Tensor:
    spec, size = layer.spec, len(group.rows)
    # Query heads that share a KV head become its query rows: no key is repeated.
    heads = (size, spec.num_kv_heads, spec.num_heads // spec.num_kv_heads, spec.head_dim)
    queries = query.index_select(0, group.rows).view(heads)
    keys = _gather(layer.kv.keys, group.block_ids)
    values = _gather(layer.kv.values, group.block_ids)
    # A bias of -inf does not mask a NaN or inf that an earlier request left in a block.
    keys = keys.view(size, -1, spec.num_kv_heads, spec.head_dim)
    values = values.view(size, -1, spec.num_kv_heads, spec.value_head_dim)
    keys = keys.masked_fill_(group.hidden, 0).transpose(1, 2)
    values = values.masked_fill_(group.hidden, 0).transpose(1, 2)
    out = _attend(queries, keys, values, group.bias, scoring)
    return out.reshape(size, spec.num_heads, spec.value_head_dim)


def _attend_chunk(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    bias: torch.Tensor | None,
    scoring: Scoring,
) -> torch.Tensor:
    """Attend for one chunk, `[T, heads, dim]` in and out.

    KV heads become the batch, and the query heads of each its heads, so that every one of them
    reads the same keys without a copy.
    """
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = keys.shape[1]
    per_kv = num_heads // num_kv_heads
    queries = query.view(num_tokens, num_kv_heads, per_kv, head_dim).permute(1, 2, 0, 3)
    shared = (num_kv_heads, per_kv, -1, -1)
    keys = keys.transpose(0, 1).unsqueeze(1).expand(shared)
    values = values.transpose(0, 1).unsqueeze(1).expand(shared)
    out = _attend(queries, keys, values, bias, scoring)
    return out.permute(2, 0, 1, 3).reshape(num_tokens, num_heads, -1)


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    bias: torch.Tensor | None,
    scoring: Scoring,
) -> torch.Tensor:
    scale, softcap = scoring
    if softcap is None:
        return F.scaled_dot_product_attention(
            query, keys, values, attn_mask=bias, is_causal=bias is None, scale=scale
        )
    scores = torch.matmul(query, keys.transpose(-1, -2)) * scale
    scores = torch.tanh(scores / softcap) * softcap
    if bias is None:
        length = query.shape[-2]
        future = torch.ones(length, length, dtype=torch.bool, device=query.device).triu_(1)
        scores = scores.masked_fill(future, -torch.inf)
    else:
        scores = scores + bias
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return torch.matmul(weights, values)

"""The portable backend: gathers keys and values from the pool and calls torch's attention.

It supports every device and every `LayerSpec`, and is the reference for faster backends. Requests
that compute one token are batched, padded to the longest of their group; every other request is a
separate call.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from protocol.core_worker import NULL_BLOCK
from worker_proc.attention.interface import PagedLayer, Rows, Scoring
from worker_proc.inputs import StepInputs, slot_mappings, to_device
from worker_proc.kv.kv_groups import LayerSpec
from worker_proc.kv.kv_tensors import Shapes
from worker_proc.kv.window import first_visible
from worker_proc.request import ScheduledRequest
from worker_proc.runner import PORTABLE_ATTENTION

MAX_GROUP_TOKENS = 2**17  # most padded tokens in a group, which bounds its memory
MIN_FILL = 0.6  # least ratio of the shortest context in a group to the longest, in blocks


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """B requests that compute one token each, with contexts of at most W blocks."""

    rows: torch.Tensor  # [B]: indices in the packed row
    block_ids: torch.Tensor  # [B · W]: padded with the null block
    queries: torch.Tensor  # [B, 1]: positions of the tokens
    positions: torch.Tensor  # [B, W · block_size]: positions of the keys
    hidden: torch.Tensor  # [B, W · block_size, 1, 1]: true if the key is not attended to
    mask: torch.Tensor  # [B, 1, 1, W · block_size]: 0, or -inf if hidden; added to scores


@dataclass(frozen=True, slots=True)
class Chunk:
    """A request that computes T > 1 tokens, over a context of L."""

    rows: slice
    block_ids: torch.Tensor | None  # blocks of the context; None: the context is the chunk itself
    mask: torch.Tensor | None  # [T, L]; None: causal
    first: int  # position of the first key
    context_len: int  # L


class Rule(NamedTuple):
    """The group and window of layers that share their metadata."""

    group: int
    window: int | None  # window of the layers; the group's window is at least as large
    is_chunked: bool = False


class ScoreTerms(NamedTuple):
    """Terms that are added to scores, or to their softmax, in broadcastable shapes."""

    mask: torch.Tensor | None  # 0, or -inf for keys that a query does not attend to; None: causal
    sinks: torch.Tensor | None  # [..., heads, T or 1, 1]
    biases: torch.Tensor | None  # [..., heads, T or 1, L]


Decodes = list[tuple[int, ScheduledRequest]]  # one-token parts, each with its row


class SdpaBackend:
    """Attention by torch's `scaled_dot_product_attention` over gathered blocks."""

    name = PORTABLE_ATTENTION
    depends_on_batch = True

    def __init__(
        self, rules: set[Rule], block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._rules = rules
        self._num_groups = 1 + max((rule.group for rule in rules), default=-1)
        self._block_size = block_size
        self._dtype = dtype
        self._device = device
        self._metadata: dict[Rule, tuple[list[DecodeGroup], list[Chunk]]] = {}
        self._slots: list[torch.Tensor] = []

    def pool_shapes(self, spec: LayerSpec, num_blocks: int) -> Shapes:
        """Return `[block, slot, kv_head, dim]` for keys and, unless latent, for values."""
        rows = (num_blocks, self._block_size, spec.num_kv_heads)
        return (*rows, spec.head_dim), None if spec.is_latent else (*rows, spec.value_head_dim)

    def begin_step(self, inputs: StepInputs) -> None:
        self._slots = slot_mappings(inputs.parts, self._num_groups, self._block_size, self._device)
        self._metadata = {rule: self._build_metadata(inputs, rule) for rule in self._rules}

    def attend(self, layer: PagedLayer, rows: Rows, scoring: Scoring) -> torch.Tensor:
        query, key, value = rows
        kv, spec, slots = layer.kv, layer.spec, self._slots[layer.group]
        if spec.kv_source is None:
            kv.keys.view(-1, spec.num_kv_heads, spec.head_dim).index_copy_(0, slots, key)
        if spec.kv_source is None and not spec.is_latent:
            kv.values.view(-1, spec.num_kv_heads, spec.value_head_dim).index_copy_(0, slots, value)
        out = query.new_empty(query.shape[0], spec.num_heads, spec.value_head_dim)
        groups, chunks = self._metadata[Rule(layer.group, spec.window, spec.is_chunked)]
        for group in groups:
            out[group.rows] = _attend_group(layer, query, group, scoring)
        for chunk in chunks:
            keys, values = key[chunk.rows], value[chunk.rows]
            if chunk.block_ids is not None:
                keys = _gather(kv.keys, chunk.block_ids)[: chunk.context_len]
                values = _gather(kv.values, chunk.block_ids)[: chunk.context_len]
                values = values[..., : spec.value_head_dim]
            terms = _terms_of_chunk(layer, chunk, scoring)
            out[chunk.rows] = _attend_chunk(query[chunk.rows], keys, values, scoring, terms)
        return out

    def _build_metadata(
        self, inputs: StepInputs, rule: Rule
    ) -> tuple[list[DecodeGroup], list[Chunk]]:
        decodes: Decodes = []
        chunks: list[Chunk] = []
        for first_row, part in zip(inputs.first_rows, inputs.parts, strict=True):
            if part.num_tokens == 1:
                decodes.append((first_row, part))
            else:
                chunks.append(self._chunk(first_row, part, rule))
        decodes.sort(key=lambda entry: entry[1].start)
        return [self._group(members, rule) for members in self._grouped(decodes, rule)], chunks

    def _span(self, part: ScheduledRequest, rule: Rule) -> range:
        """Return the block table indices that a part's tokens attend to."""
        size = self._block_size
        return range(first_visible(rule.window, part.start) // size, (part.end - 1) // size + 1)

    def _grouped(self, decodes: Decodes, rule: Rule) -> list[Decodes]:
        """Divide `decodes`, sorted by length, so that no group pads or gathers too much."""
        groups: list[Decodes] = []
        fewest = 0
        for entry in decodes:
            num_blocks = len(self._span(entry[1], rule))
            fits = groups and num_blocks * MIN_FILL <= fewest + 1
            if fits:
                fits = (len(groups[-1]) + 1) * num_blocks * self._block_size <= MAX_GROUP_TOKENS
            if fits:
                groups[-1].append(entry)
            else:
                groups.append([entry])
                fewest = num_blocks
        return groups

    def _group(self, members: Decodes, rule: Rule) -> DecodeGroup:
        size, device = self._block_size, self._device
        spans = [self._span(part, rule) for _, part in members]
        width = max(map(len, spans))
        block_ids: list[int] = []
        for (_, part), span in zip(members, spans, strict=True):
            block_ids += part.request.block_tables[rule.group][span.start : span.stop]
            block_ids += [NULL_BLOCK] * (width - len(span))
        queries = to_device([part.start for _, part in members], device).unsqueeze(1)
        firsts = to_device([span.start * size for span in spans], device).unsqueeze(1)
        positions = firsts + torch.arange(width * size, device=device)
        hidden = _hidden(queries, positions, rule)
        return DecodeGroup(
            rows=to_device([row for row, _ in members], device),
            block_ids=to_device(block_ids, device),
            queries=queries,
            positions=positions,
            hidden=hidden[:, :, None, None],
            mask=self._mask(hidden)[:, None, None, :],
        )

    def _chunk(self, first_row: int, part: ScheduledRequest, rule: Rule) -> Chunk:
        window, rows = rule.window, slice(first_row, first_row + part.num_tokens)
        if part.start == 0 and (window is None or part.end <= window):
            return Chunk(rows, None, None, 0, part.num_tokens)
        span = self._span(part, rule)
        block_ids = None
        if part.start:
            table = part.request.block_tables[rule.group]
            block_ids = to_device(table[span.start : span.stop].tolist(), self._device)
        first = span.start * self._block_size
        queries = torch.arange(part.start, part.end, device=self._device).unsqueeze(1)
        keys = torch.arange(first, part.end, device=self._device)
        mask = self._mask(_hidden(queries, keys, rule))
        return Chunk(rows, block_ids, mask, first, part.end - first)

    def _mask(self, hidden: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device)
        return mask.masked_fill_(hidden, -torch.inf)


def _hidden(queries: torch.Tensor, keys: torch.Tensor, rule: Rule) -> torch.Tensor:
    """Return a mask of the keys that queries do not attend to, given their positions."""
    hidden = keys > queries
    if rule.window is not None and rule.is_chunked:
        hidden |= keys < queries // rule.window * rule.window
    elif rule.window is not None:
        hidden |= keys <= queries - rule.window
    return hidden


def _terms_of_group(layer: PagedLayer, group: DecodeGroup, scoring: Scoring) -> ScoreTerms:
    """Return the terms for scores `[B, kv_heads, heads of each, L]`."""
    shape = (layer.spec.num_kv_heads, layer.spec.num_heads // layer.spec.num_kv_heads)
    sinks, biases = layer.sinks, layer.biases
    if sinks is not None:
        sinks = sinks.view(1, *shape, 1)
    if scoring.sinks is not None:
        sinks = scoring.sinks.index_select(0, group.rows).view(-1, *shape, 1)
    if biases is not None:
        columns = _bias_columns(layer, group.queries, group.positions)
        biases = biases[:, columns].transpose(0, 1).unflatten(1, shape)
    if scoring.biases is not None:
        by_distance = scoring.biases.index_select(0, group.rows)
        distances = (group.queries - group.positions).unsqueeze(1)
        biases = _by_position(by_distance, distances).unflatten(1, shape)
    return ScoreTerms(group.mask, sinks, biases)


def _terms_of_chunk(layer: PagedLayer, chunk: Chunk, scoring: Scoring) -> ScoreTerms:
    """Return the terms for scores `[kv_heads, heads of each, T, L]`."""
    shape = (layer.spec.num_kv_heads, layer.spec.num_heads // layer.spec.num_kv_heads)
    sinks, biases = layer.sinks, layer.biases
    if sinks is not None:
        sinks = sinks.view(*shape, 1, 1)
    if scoring.sinks is not None:
        sinks = scoring.sinks[chunk.rows].t().reshape(*shape, -1, 1)
    if biases is None and scoring.biases is None:
        return ScoreTerms(chunk.mask, sinks, None)
    end, num_tokens = chunk.first + chunk.context_len, chunk.rows.stop - chunk.rows.start
    device = (biases if scoring.biases is None else scoring.biases).device  # type: ignore[union-attr]
    keys = torch.arange(chunk.first, end, device=device)
    queries = keys[-num_tokens:, None]
    if biases is not None:
        columns = _bias_columns(layer, queries, keys[None])
        biases = biases[:, columns].unflatten(0, shape)
    if scoring.biases is not None:
        by_distance = scoring.biases[chunk.rows].transpose(0, 1)
        biases = _by_position(by_distance, queries - keys).unflatten(0, shape)
    return ScoreTerms(chunk.mask, sinks, biases)


def _by_position(by_distance: torch.Tensor, distances: torch.Tensor) -> torch.Tensor:
    """Return biases by key, `[..., L]`, from biases `[..., distances]` and the keys' distances."""
    count = by_distance.shape[-1]
    columns = distances.clamp(0, count - 1).expand(*by_distance.shape[:-1], -1)
    is_near = (distances >= 0) & (distances < count)
    return by_distance.float().gather(-1, columns).where(is_near, 0.0)


def _bias_columns(
    layer: PagedLayer, queries: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Return the bias columns of keys, given the positions of queries and keys."""
    assert layer.biases is not None
    if layer.bias_origin is None:
        return positions.clamp(max=layer.biases.shape[1] - 1)  # keys after the row are hidden
    return (positions - queries + layer.bias_origin).clamp(0, layer.bias_origin)


def _gather(pool: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
    """Return the tokens of `block_ids`, `[num_tokens, num_kv_heads, head_dim]`."""
    return pool.index_select(0, block_ids).flatten(0, 1)


def _attend_group(
    layer: PagedLayer, query: torch.Tensor, group: DecodeGroup, scoring: Scoring
) -> torch.Tensor:
    spec, size = layer.spec, len(group.rows)
    # Query heads that share a KV head become its query rows, so that no key is repeated.
    heads = (size, spec.num_kv_heads, spec.num_heads // spec.num_kv_heads, spec.head_dim)
    queries = query.index_select(0, group.rows).view(heads)
    keys = _gather(layer.kv.keys, group.block_ids)
    values = _gather(layer.kv.values, group.block_ids)[..., : spec.value_head_dim]
    # A mask of -inf does not hide a NaN or inf that an earlier request left in a block.
    keys = keys.view(size, -1, spec.num_kv_heads, spec.head_dim)
    values = values.reshape(size, -1, spec.num_kv_heads, spec.value_head_dim)
    keys = keys.masked_fill_(group.hidden, 0).transpose(1, 2)
    values = values.masked_fill_(group.hidden, 0).transpose(1, 2)
    out = _attend(queries, keys, values, scoring, _terms_of_group(layer, group, scoring))
    return out.reshape(size, spec.num_heads, spec.value_head_dim)


def _attend_chunk(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scoring: Scoring,
    terms: ScoreTerms,
) -> torch.Tensor:
    """Attend for one chunk; `[T, heads, dim]` in and out.

    KV heads become the batch, and the query heads of each become its heads, so that all of them
    read the same keys without a copy.
    """
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = keys.shape[1]
    per_kv = num_heads // num_kv_heads
    queries = query.view(num_tokens, num_kv_heads, per_kv, head_dim).permute(1, 2, 0, 3)
    shared = (num_kv_heads, per_kv, -1, -1)
    keys = keys.transpose(0, 1).unsqueeze(1).expand(shared)
    values = values.transpose(0, 1).unsqueeze(1).expand(shared)
    out = _attend(queries, keys, values, scoring, terms)
    return out.permute(2, 0, 1, 3).reshape(num_tokens, num_heads, -1)


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scoring: Scoring,
    terms: ScoreTerms,
) -> torch.Tensor:
    mask, sinks, biases = terms
    scale, softcap, *_ = scoring
    if softcap is None and sinks is None and biases is None:
        return F.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, is_causal=mask is None, scale=scale
        )
    scores = torch.matmul(query, keys.transpose(-1, -2)).float() * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if biases is not None:
        scores += biases
    if mask is None:
        length = query.shape[-2]
        future = torch.ones(length, length, dtype=torch.bool, device=query.device).triu_(1)
        scores = scores.masked_fill(future, -torch.inf)
    else:
        scores = scores + mask
    if sinks is not None:
        scores = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : keys.shape[-2]].to(query.dtype)
    return torch.matmul(weights, values)

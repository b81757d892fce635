"""The tensors of a GGUF file, by the names of the same weights in a checkpoint of transformers."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch

from worker_proc.errors import CheckpointError
from worker_proc.gguf.architecture import Architecture
from worker_proc.gguf.changes import UNCHANGED, Change, as_channels, as_matrix, pairs_to_halves
from worker_proc.gguf.config_tensors import IN_CONFIG
from worker_proc.gguf.header import TensorEntry
from worker_proc.gguf.joins import Join, JoinedRows, JoinedTensor, Rows, join_rows, join_tensors
from worker_proc.gguf.metadata import Metadata
from worker_proc.gguf.model_header import Header

_TOP = {
    "token_embd": "model.embed_tokens",
    "token_embd_norm": "model.embedding_norm",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAME = re.compile(r"(?:blk\.(\d{1,6})\.)?(\w+(?:\.\w+)??)(?:\.(weight|bias|scale))?")
_CHANNELS = frozenset({"shortconv.conv", "ssm_conv1d"})
"""The kernels of depthwise convolutions."""
_GATES, _FACTORS = "ffn_gate_exps", "ffn_up_exps"
_FUSED_EXPERTS = "ffn_gate_up_exps.weight"
_SHARED_GATE = "ffn_gate_inp_shexp"
"""The matrix of one row that gates shared experts; it is a vector in older files."""
_MAX_EXPERTS = 4096
_PERMUTED = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}


class NamedConstant(NamedTuple):
    """A tensor whose elements are all the value of one key."""

    name: str
    value: float
    shape: tuple[int, ...]


class NamedTensor(NamedTuple):
    """A weight of a checkpoint that is a tensor of the file, or one matrix of it."""

    name: str
    entry: TensorEntry
    matrix: int | None = None
    """The number of the matrix in a tensor with those of all experts; None: the whole tensor."""
    change: Change = UNCHANGED

    @property
    def shape(self) -> tuple[int, ...]:
        stored = self.entry.shape if self.matrix is None else self.entry.shape[1:]
        return self.change.shape(stored)


def named_tensors(
    header: Header, architecture: Architecture
) -> Iterator[NamedTensor | NamedConstant | JoinedTensor | JoinedRows]:
    """Yield the weights of a checkpoint; raise CheckpointError for a tensor that is not used."""
    metadata = Metadata(header)
    for name, (value, shape) in architecture.constants(metadata).items():
        yield NamedConstant(name, value, shape)
    names, top = _LAYER | dict(architecture.names), _TOP | dict(architecture.top)
    joins = {part: how for how in architecture.joins for part in (*how.parts, how.whole) if part}
    num_layers = architecture.num_layers(metadata)
    changes, unused = architecture.changes(metadata), architecture.unused(metadata)
    splits = architecture.splits(metadata)
    for entry in header.tensors.values():
        if entry.name in IN_CONFIG or entry.name in unused:
            continue
        found = _NAME.fullmatch(entry.name)
        layer, part, leaf = found.groups("") if found is not None else ("", "", "")
        own = f"{part}.{leaf}" if leaf else part
        if layer and int(layer) >= num_layers and architecture.drops_drafts:
            continue
        before = f"{architecture.prefix}.{architecture.layers}.{layer}" if layer else ""
        how = joins.get(own) if layer else None
        if isinstance(how, Rows) or (how is not None and own != how.whole):
            yield from _joined(header, before, entry, how)
            continue
        if layer and own == _FUSED_EXPERTS and _GATES in names:
            yield from _fused_experts(header, before, entry, names)
            continue
        split = splits.get(f"{layer}.{part}", splits.get(part)) if layer else None
        if split is not None and leaf in ("weight", "bias"):
            _check_split(header, entry, split.values())
            for weight, of_part in split.items():
                yield NamedTensor(f"{before}.{weight}.{leaf}", entry, None, of_part)
            continue
        full = _full_name(names if layer else top, before, part, leaf)
        if full is None:
            raise CheckpointError(
                f"{header.path} has {entry.name[:100]}, which {header.architecture} does not use"
            )
        if "{}" in full:
            (_check_experts if layer else _check_stack)(header, entry)
            for number in range(entry.shape[0]):
                yield NamedTensor(full.format(number), entry, number)
            continue
        change = changes.get(own) if layer else None
        change = change or _change(header, architecture, part, leaf, entry)
        _check_order(header, entry, change)
        yield NamedTensor(full, entry, None, change)


def _joined(
    header: Header, layer: str, entry: TensorEntry, how: Join | Rows
) -> Iterator[JoinedTensor | JoinedRows]:
    """Yield the weight that a tensor is a part of, if it is the first part."""
    if isinstance(how, Rows):
        if len(entry.shape) == 3:
            _check_num_experts(header, entry)
        rows = join_rows(header, layer, how)
        if entry not in rows.entries:
            raise CheckpointError(
                f"{header.path} has {rows.entries[0].name} and, beside it, {entry.name}"
            )
        if entry is rows.entries[0]:
            yield rows
        return
    if how.of_experts:
        _check_num_experts(header, entry)
    if f"blk.{layer.rpartition('.')[2]}.{how.whole}" in header.tensors:
        return
    joined = join_tensors(header, layer, how)
    if entry is joined.entries[0]:
        yield joined


def _fused_experts(
    header: Header, layer: str, entry: TensorEntry, names: Mapping[str, str]
) -> Iterator[NamedTensor]:
    """Yield gates and factors of experts, which some files have one below the other."""
    _check_experts(header, entry)
    num_rows = entry.shape[1]
    if num_rows % 2:
        raise CheckpointError(
            f"{header.path}: {entry.name} has {num_rows} rows for each expert, which are not gates"
            " and as many factors"
        )
    halves = torch.arange(num_rows).view(2, -1)
    for number in range(entry.shape[0]):
        for part, rows in zip((_GATES, _FACTORS), halves, strict=True):
            full = f"{layer}.{names[part].format(number)}.weight"
            yield NamedTensor(full, entry, number, Change(rows=rows))


def _full_name(names: Mapping[str, str], layer: str, part: str, leaf: str) -> str | None:
    """Return the name of a tensor in a checkpoint; None: it has no meaning."""
    before = f"{layer}." if layer else ""
    own = f"{part}.{leaf}" if leaf else part
    if own in names:
        return before + names[own]
    return f"{before}{names[part]}.{leaf}" if part in names else None


def _check_stack(header: Header, entry: TensorEntry) -> None:
    """Raise CheckpointError unless a tensor has some matrices."""
    if len(entry.shape) != 3:
        raise CheckpointError(
            f"{header.path}: {entry.name} has {len(entry.shape)} dimensions instead of 3"
        )
    if entry.shape[0] > _MAX_EXPERTS:
        raise CheckpointError(
            f"{header.path}: {entry.name} has {entry.shape[0]} matrices; at most {_MAX_EXPERTS}"
            " are read"
        )


def _check_experts(header: Header, entry: TensorEntry) -> None:
    """Raise CheckpointError unless a tensor has a matrix for each expert."""
    _check_stack(header, entry)
    _check_num_experts(header, entry)


def _check_num_experts(header: Header, entry: TensorEntry) -> None:
    """Raise CheckpointError unless the first dimension of a tensor has the number of experts."""
    key = "expert_count"
    count = Metadata(header).integer(key)
    if count > _MAX_EXPERTS:
        raise CheckpointError(
            f"{header.path}: {header.architecture}.{key} is {count}; at most {_MAX_EXPERTS} are"
            " read"
        )
    if entry.shape[0] != count:
        raise CheckpointError(
            f"{header.path}: {entry.name} has the matrices of {entry.shape[0]} experts, and"
            f" {header.architecture}.{key} is {count}"
        )


def _change(
    header: Header, architecture: Architecture, part: str, leaf: str, entry: TensorEntry
) -> Change:
    """Return what is done with a tensor of which its architecture states nothing."""
    if part in _CHANNELS and len(entry.shape) == 2:
        return Change(values=as_channels)
    if part == _SHARED_GATE and len(entry.shape) == 1:
        return Change(values=as_matrix)
    if architecture.norm_offset and part.endswith("norm") and leaf == "weight":
        return Change(values=lambda norm: norm - architecture.norm_offset)
    if not architecture.permutes or part not in _PERMUTED:
        return UNCHANGED
    metadata = Metadata(header)
    num_heads = metadata.integer(_PERMUTED[part], metadata.integer("attention.head_count"))
    num_rows = entry.shape[0]
    if num_rows % (2 * num_heads):
        raise CheckpointError(
            f"{header.path}: {entry.name} has {num_rows} rows, which are not pairs of"
            f" {num_heads} heads"
        )
    return Change(rows=pairs_to_halves(num_rows, num_heads))


def _check_split(header: Header, entry: TensorEntry, changes: Iterable[Change]) -> None:
    """Raise CheckpointError unless a tensor has the rows of all weights that it is."""
    count = sum(len(change.rows) for change in changes if change.rows is not None)
    if entry.shape[0] != count:
        raise CheckpointError(
            f"{header.path}: {entry.name} has {entry.shape[0]} rows instead of {count}"
        )


def _check_order(header: Header, entry: TensorEntry, change: Change) -> None:
    """Raise CheckpointError for rows or columns that are not as many as are put in order."""
    for what, order, place in (("rows", change.rows, 0), ("columns", change.inputs, -1)):
        if order is not None and len(order) != entry.shape[place]:
            raise CheckpointError(
                f"{header.path}: {entry.name} has {entry.shape[place]} {what} instead of"
                f" {len(order)}"
            )

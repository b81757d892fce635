"""The tensors of a GGUF file under the names that the same weights have in safetensors."""

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch

from worker_proc.errors import CheckpointError
from worker_proc.gguf.architectures import Architecture
from worker_proc.gguf.config_tensors import IN_CONFIG
from worker_proc.gguf.header import TensorEntry
from worker_proc.gguf.joins import JoinedTensor, join_tensors
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
_NAME = re.compile(r"(?:blk\.(\d{1,6})\.)?(\w+(?:\.\w+)?)\.(weight|bias)")
_CHANNELS = "shortconv.conv"
"""The kernels of a convolution of each channel, which has one input."""
_MAX_EXPERTS = 4096
_PERMUTED = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}


class NamedTensor(NamedTuple):
    """A tensor, or one of its matrices, as a checkpoint of transformers has it."""

    name: str
    entry: TensorEntry
    matrix: int | None = None
    """Of a tensor with those of all experts."""
    order: torch.Tensor | None = None
    """int64: the row of the file that stands at each place."""
    offset: float = 0.0
    """What has been added to the values."""
    has_channels: bool = False
    """Whether each row is the kernel of a channel."""

    @property
    def shape(self) -> tuple[int, ...]:
        if self.has_channels:
            return (self.entry.shape[0], 1, *self.entry.shape[1:])
        return self.entry.shape if self.matrix is None else self.entry.shape[1:]


def named_tensors(
    header: Header, architecture: Architecture
) -> Iterator[NamedTensor | JoinedTensor]:
    """Yield what a checkpoint has; raises CheckpointError for a tensor without a meaning."""
    names = _LAYER | dict(architecture.names)
    joins = {part: how for how in architecture.joins for part in how.parts}
    num_layers = architecture.num_layers(Metadata(header))
    for entry in header.tensors.values():
        if entry.name in IN_CONFIG:
            continue
        found = _NAME.fullmatch(entry.name)
        layer, part, leaf = found.groups() if found is not None else (None, "", "")
        if layer is not None and int(layer) >= num_layers and architecture.drops_drafts:
            continue
        how = joins.get(f"{part}.{leaf}") if layer is not None else None
        if layer is not None and how is not None:
            if how.of_experts:
                _check_num_experts(header, entry)
            if f"blk.{layer}.{how.whole}" in header.tensors:
                continue
            joined = join_tensors(header, layer, how)
            if entry is joined.entries[0]:
                yield joined
            continue
        full = _full_name(names, layer, part, leaf)
        if full is None:
            raise CheckpointError(
                f"{header.path} has {entry.name[:100]}, which {header.architecture} does not use"
            )
        if "{}" in full:
            _check_experts(header, entry)
            for number in range(entry.shape[0]):
                yield NamedTensor(full.format(number), entry, number)
            continue
        order = _row_order(header, entry, part) if architecture.permutes else None
        offset = architecture.norm_offset if part.endswith("norm") else 0.0
        yield NamedTensor(full, entry, None, order, offset, has_channels=part == _CHANNELS)


def _full_name(names: Mapping[str, str], layer: str | None, part: str, leaf: str) -> str | None:
    """Return the name of a tensor in a checkpoint; None: it has no meaning."""
    if layer is None:
        target = _TOP.get(part)
        return None if target is None else f"{target}.{leaf}"
    whole = names.get(f"{part}.{leaf}")
    if whole is not None:
        return f"model.layers.{layer}.{whole}"
    target = names.get(part)
    return None if target is None else f"model.layers.{layer}.{target}.{leaf}"


def _check_experts(header: Header, entry: TensorEntry) -> None:
    """Raise CheckpointError unless a tensor has a matrix for each expert."""
    if len(entry.shape) != 3:
        raise CheckpointError(
            f"{header.path}: {entry.name} has {len(entry.shape)} dimensions instead of 3"
        )
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


def _row_order(header: Header, entry: TensorEntry, part: str) -> torch.Tensor | None:
    """Return the order of rows of queries and keys: halves of heads, of interleaved pairs."""
    if part not in _PERMUTED:
        return None
    metadata = Metadata(header)
    num_heads = metadata.integer(_PERMUTED[part], metadata.integer("attention.head_count"))
    num_rows = entry.shape[0]
    if num_rows % (2 * num_heads):
        raise CheckpointError(
            f"{header.path}: {entry.name} has {num_rows} rows, which are not pairs of"
            f" {num_heads} heads"
        )
    return torch.arange(num_rows).view(num_heads, -1, 2).transpose(1, 2).flatten()

"""Backends for attention that is not causal: each text is computed whole in a step.

A text's keys and values are rows of the step, so there is no cache: the pool has a single number
for each block, which is never read.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from worker_proc.attention.interface import PagedLayer, Rows, Scoring
from worker_proc.inputs import StepInputs
from worker_proc.kv.kv_groups import LayerSpec
from worker_proc.kv.kv_tensors import Shapes
from worker_proc.native.kernels import NativeLibrary
from worker_proc.native.structures import LayerArgs
from worker_proc.runner import PORTABLE_ATTENTION


class TextBackend:
    """Attention by the native kernel: a row's bits do not depend on the other texts."""

    name = "native kernel for whole texts"
    depends_on_batch = False

    def __init__(self, library: NativeLibrary, dtype: torch.dtype) -> None:
        self._library = library
        self._is_bf16 = dtype == torch.bfloat16
        self._first_rows: list[int] = []
        self._counts: list[int] = []

    def pool_shapes(self, spec: LayerSpec, num_blocks: int) -> Shapes:
        return (num_blocks, 1), None

    def begin_step(self, inputs: StepInputs) -> None:
        self._first_rows = inputs.first_rows
        self._counts = [part.num_tokens for part in inputs.parts]

    def attend(self, layer: PagedLayer, rows: Rows, scoring: Scoring) -> torch.Tensor:
        spec = layer.spec
        out = rows.query.new_empty(len(rows.query), spec.num_heads, spec.value_head_dim)
        shape = (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.value_head_dim)
        args = LayerArgs(None, None, *shape, 1, spec.window or 0, self._is_bf16)
        dense = Rows(*(t if t.stride(2) == 1 else t.contiguous() for t in rows))
        texts = (self._first_rows, self._counts)
        self._library.attend_texts(args, texts, dense, (scoring.scale, scoring.softcap or 0.0), out)
        return out


class PortableTextBackend:
    """Attention by torch, with a call for each text."""

    name = PORTABLE_ATTENTION
    depends_on_batch = True

    def __init__(self) -> None:
        self._parts: Sequence[slice] = ()

    def pool_shapes(self, spec: LayerSpec, num_blocks: int) -> Shapes:
        return (num_blocks, 1), None

    def begin_step(self, inputs: StepInputs) -> None:
        self._parts = [
            slice(first, first + part.num_tokens)
            for first, part in zip(inputs.first_rows, inputs.parts, strict=True)
        ]

    def attend(self, layer: PagedLayer, rows: Rows, scoring: Scoring) -> torch.Tensor:
        spec = layer.spec
        out = rows.query.new_empty(len(rows.query), spec.num_heads, spec.value_head_dim)
        for part in self._parts:
            out[part] = _attend(spec, Rows(*(tensor[part] for tensor in rows)), scoring)
        return out


def _attend(spec: LayerSpec, rows: Rows, scoring: Scoring) -> torch.Tensor:
    query, key, value = (tensor.transpose(0, 1) for tensor in rows)
    mask = None
    if spec.window is not None:
        positions = torch.arange(query.shape[1], device=query.device)
        mask = (positions[:, None] - positions).abs() < spec.window
    if scoring.softcap is None:
        out = F.scaled_dot_product_attention(
            query[None],
            key[None],
            value[None],
            mask,
            scale=scoring.scale,
            enable_gqa=spec.num_kv_heads != spec.num_heads,
        )[0]
        return out.transpose(0, 1)
    groups = spec.num_heads // spec.num_kv_heads
    key, value = (tensor.repeat_interleave(groups, 0) for tensor in (key, value))
    scores = query.float() @ key.float().transpose(1, 2) * scoring.scale
    scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return (scores.softmax(-1) @ value.float()).to(value.dtype).transpose(0, 1)

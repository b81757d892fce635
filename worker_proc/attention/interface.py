"""Connects transformers' attention modules to the paged KV cache.

`IMPLEMENTATION` is the name under which the function is registered. No mask is registered under it,
so transformers builds none: the positions that a token attends to follow from the step's inputs.
"""

from typing import NamedTuple, Protocol, cast

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from worker_proc.inputs import StepInputs
from worker_proc.kv.kv_tensors import KVTensors
from worker_proc.kv.layer_spec import LayerSpec

IMPLEMENTATION = "troika_paged"


class Rows(NamedTuple):
    """Queries, keys and values of T packed tokens in one layer."""

    query: torch.Tensor
    """`[T, num_heads, head_dim]`"""
    key: torch.Tensor
    """`[T, num_kv_heads, head_dim]`"""
    value: torch.Tensor
    """`[T, num_kv_heads, value_head_dim]`"""


class Scoring(NamedTuple):
    """Parameters of the score of a query and a key."""

    scale: float
    """Factor on the dot product."""
    softcap: float | None
    """Bound that scores approach by tanh, if any."""


class AttentionBackend(Protocol):
    """One way to compute attention over the pool; holds the metadata of the current step."""

    def pool_shapes(
        self, spec: LayerSpec, num_blocks: int
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of a layer's pools of keys and of values."""

    def begin_step(self, inputs: StepInputs) -> None:
        """Build the indices that the layers share; called once before a step's forward."""

    def attend(self, layer: "PagedLayer", rows: Rows, scoring: Scoring) -> torch.Tensor:
        """Store the packed row's keys and values, and attend.

        Args:
            layer: pool and window.
            rows: of the T packed tokens.
            scoring: scale and soft cap.

        Returns:
            `[T, num_heads, value_head_dim]`, contiguous.
        """


class PagedLayer:
    """One attention module's shape, pool, KV group and backend."""

    def __init__(
        self, spec: LayerSpec, kv: KVTensors, backend: AttentionBackend, group: int = 0
    ) -> None:
        self.spec = spec
        self.kv = kv
        self.backend = backend
        self.group = group
        """Index of the KV group of this layer."""


def register() -> None:
    """Make `IMPLEMENTATION` known to transformers."""
    ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, paged_attention)


def attach(module: nn.Module, layer: PagedLayer) -> None:
    """Attach a paged layer to an attention module."""
    # Not by setattr: the layer is not a submodule and owns no parameter.
    module.__dict__["paged_layer"] = layer


def paged_attention(  # noqa: PLR0917 (the signature is transformers')
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Attend for one module: the function that transformers calls.

    Args:
        module: with a `paged_layer`.
        query: `[1, num_heads, T, head_dim]`.
        key: `[1, num_kv_heads, T, head_dim]`.
        value: `[1, num_kv_heads, T, value_head_dim]`.
        attention_mask: always None.
        scaling: factor on the scores; None: 1 / sqrt(head_dim).
        softcap: bound that scores approach by tanh, if any.
        kwargs: checked by the probe when the model was loaded.

    Returns:
        `[1, T, num_heads, value_head_dim]` and no weights.
    """
    layer = cast(PagedLayer, module.paged_layer)
    scale = layer.spec.head_dim**-0.5 if scaling is None else scaling
    rows = Rows(*(tensor[0].transpose(0, 1) for tensor in (query, key, value)))
    return layer.backend.attend(layer, rows, Scoring(scale, softcap)).unsqueeze(0), None

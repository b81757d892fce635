"""Multi-head latent attention over cached latent rows, which replaces a model's own module.

The model's module expands each latent row into the keys and values of all heads. This one
transforms the queries instead (latent_products.py), so that one row serves as key and value for all
heads. Prompts and decodes are computed alike: a token's bits do not depend on how its text is
chunked.
"""

import sys
from collections.abc import Callable
from inspect import signature
from typing import Any, cast

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from worker_proc.attention.indexers import ALL_TOKENS
from worker_proc.attention.latent_products import Angles, LatentProducts, LatentShape
from worker_proc.recurrent.rowwise import rowwise


class LatentAttention(nn.Module):
    """A layer's attention, with the projections, norms and gates of the module it replaces."""

    q_proj: nn.Module
    q_a_proj: nn.Module
    q_a_layernorm: nn.Module
    q_b_proj: nn.Module
    kv_a_proj_with_mqa: nn.Module
    kv_a_layernorm: nn.Module
    o_proj: nn.Module
    g_proj: nn.Module

    def __init__(self, module: nn.Module, shape: LatentShape, products: LatentProducts) -> None:
        """Take over the children of a module whose sizes `modules.latent.find_shape` has found."""
        super().__init__()
        for name, child in module.named_children():
            if name not in {"kv_b_proj", "indexer"}:
                setattr(self, name, child)
        self.config: Any = module.config
        self.num_key_value_groups = shape.num_heads
        self.scaling = cast(float, module.scaling)
        self._has_query_rank = isinstance(getattr(module, "q_a_proj", None), nn.Module)
        self._has_gates = isinstance(getattr(module, "g_proj", None), nn.Module)
        self._eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        self._shape = shape
        self._products = products
        self._passes_on_choice = "prev_topk_indices" in signature(type(module).forward).parameters

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: Any = None,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        """Return `[1, T, hidden_size]` and no weights, given rows `[1, T, hidden_size]`.

        If the next layer takes this layer's indexer choice, ALL_TOKENS is returned as a third item.
        """
        shape, num_tokens = self._shape, hidden_states.shape[1]
        query = self._queries(hidden_states)[0].view(num_tokens, shape.num_heads, shape.head_dim)
        row = self.kv_a_proj_with_mqa(hidden_states)[0]
        latent = self.kv_a_layernorm(row[None, :, : shape.rank])[0]
        row = torch.cat([latent, row[:, shape.rank :]], dim=-1)
        query = self._products.queries(query, row, angles_of(position_embeddings))
        name = self.config._attn_implementation
        if isinstance(attention_mask, torch.Tensor) and attention_mask.dim() == 2:
            # A mask of padding, from which the module built its own mask; here there is no padding.
            attention_mask = _causal_mask(query) if name == "eager" else None
        attend: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS.get_interface(name, self._eager)
        keys = row.unsqueeze(0).unsqueeze(0)
        attended, _ = attend(
            self,
            query.transpose(0, 1).unsqueeze(0),
            keys,
            keys[..., : shape.rank],
            attention_mask,
            scaling=self.scaling,
            dropout=0.0,
            **kwargs,
        )
        values = self._products.values(attended[0].view(num_tokens, shape.num_heads, shape.rank))
        if self._has_gates:
            values = self._gated(values, hidden_states)
        out: torch.Tensor = self.o_proj(values.unsqueeze(0))
        return (out, None, ALL_TOKENS) if self._passes_on_choice else (out, None)

    def _queries(self, hidden: torch.Tensor) -> torch.Tensor:
        query: torch.Tensor
        if self._has_query_rank:
            query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden)))
        else:
            query = self.q_proj(hidden)
        return query

    def _gated(self, values: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Return the heads' outputs, `[T, num_heads * value_dim]`, times a gate for each head."""
        gates = rowwise(torch.sigmoid, self.g_proj(hidden)[0].float()).to(values.dtype)
        heads = values.view(*gates.shape, self._shape.value_dim) * gates.unsqueeze(2)
        return heads.flatten(1)


def _causal_mask(query: torch.Tensor) -> torch.Tensor:
    """Return a causal mask for `[T, ...]` queries of one text."""
    hidden = query.new_full((len(query), len(query)), torch.finfo(query.dtype).min)
    return hidden.triu(1)[None, None]


def angles_of(position_embeddings: Any) -> Angles | None:
    """Return the angles that a model's rotary module passes to attention; None: no angles.

    They are a pair of cosines and sines, `[1, T, rope_dim]`, or complex numbers of half that size.
    """
    if position_embeddings is None:
        return None
    if isinstance(position_embeddings, torch.Tensor):
        parts = position_embeddings.real, position_embeddings.imag
        return Angles(*(torch.cat([part[0], part[0]], dim=-1) for part in parts))
    cosines, sines = position_embeddings
    return Angles(cosines[0].contiguous(), sines[0].contiguous())

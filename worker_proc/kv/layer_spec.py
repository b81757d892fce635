"""Describes the attention of one layer."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Shape and window of one layer's attention, as the model's own code calls it."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Of queries and keys."""
    value_head_dim: int
    window: int | None
    """Positions that a token attends to, itself included; None: all before it."""

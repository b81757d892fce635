"""What paged attention must know of one layer of a model."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Shape and rule of one layer's attention, as the model's own code asks for it."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Of queries and keys."""
    value_head_dim: int
    window: int | None
    """A token sees so many positions, itself included; None: all before it."""

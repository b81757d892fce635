"""Maps adapter sites to the projections of decoder layers."""

import enum
from collections.abc import Sequence

from worker_proc.adapters.sites import Sites


class Projection(enum.StrEnum):
    """The projections of a layer, named as in transformers."""

    QUERY = "q_proj"
    KEY = "k_proj"
    VALUE = "v_proj"
    OUT = "o_proj"
    GATE = "gate_proj"
    UP = "up_proj"
    DOWN = "down_proj"


_QKV = (Projection.QUERY, Projection.KEY, Projection.VALUE)
_GATES = (Projection.GATE, Projection.UP)
_NAMES_IN_LAYER: dict[tuple[str, ...], tuple[Projection, ...]] = {
    ("self_attn.q_proj",): (Projection.QUERY,),
    ("self_attn.k_proj",): (Projection.KEY,),
    ("self_attn.v_proj",): (Projection.VALUE,),
    ("self_attn.qkv_proj",): _QKV,
    ("self_attn.o_proj",): (Projection.OUT,),
    ("mlp.gate_proj",): (Projection.GATE,),
    ("mlp.up_proj",): (Projection.UP,),
    ("mlp.gate_up_proj",): _GATES,
    ("mlp.down_proj",): (Projection.DOWN,),
}
"""Linear layers of a decoder layer, and the projections whose outputs they compute, in order."""


def sites_of_layers(sites: Sites, layers: Sequence[str]) -> dict[tuple[int, Projection], int]:
    """Return the sites of the projections of decoder layers, given the layers' names."""
    found: dict[tuple[int, Projection], int] = {}
    for index, layer in enumerate(layers):
        for names, projections in _NAMES_IN_LAYER.items():
            numbers = [n for name in names for n in sites.of_module.get(f"{layer}.{name}", [])]
            if len(numbers) == len(projections):
                pairs = zip(projections, numbers, strict=True)
                found |= {(index, projection): number for projection, number in pairs}
    return found

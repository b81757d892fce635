"""Reads off a decoder layer's modules what the layer computes.

Names decide which candidate is tried; `proof.py` decides whether the layer computes the same.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import nn

from worker_proc.attention.interface import PagedLayer, Scoring
from worker_proc.loading.fused import FusedMLP, FusedRMSNorm
from worker_proc.loading.packed_linear import NativeLinear
from worker_proc.native.kernels import PackedWeight

NORM_NAMES: tuple[tuple[str, str, str, str], ...] = (
    ("input_layernorm", "", "post_attention_layernorm", ""),
    (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
    ("", "post_attention_layernorm", "", "post_feedforward_layernorm"),
    (
        "input_layernorm",
        "post_self_attn_layernorm",
        "post_attention_layernorm",
        "post_mlp_layernorm",
    ),
)
"""Norms before and after the attention, before and after the MLP; "": there is none."""


class Norms(NamedTuple):
    """The norms of a layer, where it has them."""

    before_attention: FusedRMSNorm | None
    after_attention: FusedRMSNorm | None
    before_mlp: FusedRMSNorm | None
    after_mlp: FusedRMSNorm | None


class DecoderLayer(NamedTuple):
    """One layer: attention and MLP, each added to the residual times a factor."""

    norms: Norms
    qkv: list[PackedWeight]
    """One weight, or those of queries, keys and values."""
    query_norm: FusedRMSNorm | None  # of each head, or of all together
    key_norm: FusedRMSNorm | None
    attention: nn.Module
    out: NativeLinear
    mlp: FusedMLP
    down: PackedWeight
    residual_factor: float

    @property
    def paged(self) -> PagedLayer:
        """The layer's part of the KV cache, which is attached later."""
        layer: PagedLayer = self.attention.__dict__["paged_layer"]
        return layer

    @property
    def scoring(self) -> Scoring:
        module = self.attention
        head_dim = self.paged.spec.head_dim
        scale = getattr(module, "scaling", None)
        softcap = getattr(module, "attn_logit_softcapping", None)
        return Scoring(head_dim**-0.5 if scale is None else float(scale), softcap)


def read_layer(layer: nn.Module, factor: float) -> DecoderLayer | None:
    """Return what a layer computes if the native decoder has instructions for all its parts."""
    children = {
        name: child
        for name, child in layer.named_children()
        if not isinstance(child, nn.Dropout)  # which does nothing here
    }
    attention, mlp = children.pop("self_attn", None), children.pop("mlp", None)
    matching = (names for names in NORM_NAMES if set(names) - {""} == set(children))
    norms = next((_norms(children, names) for names in matching), None)
    if norms is None or attention is None or not isinstance(mlp, FusedMLP):
        return None
    parts = dict(attention.named_children())
    linears = ["qkv_proj"] if "qkv_proj" in parts else ["q_proj", "k_proj", "v_proj"]
    qkv = _packed([parts.pop(name, None) for name in linears])
    out = parts.pop("o_proj", None)
    query_norm, key_norm = parts.pop("q_norm", None), parts.pop("k_norm", None)
    if (
        qkv is None
        or parts
        or not isinstance(out, NativeLinear)
        or not isinstance(mlp.down_proj, NativeLinear)
        or not isinstance(query_norm, FusedRMSNorm | None)
        or not isinstance(key_norm, FusedRMSNorm | None)
    ):
        return None
    down = mlp.down_proj.packed
    return DecoderLayer(norms, qkv, query_norm, key_norm, attention, out, mlp, down, factor)


def _norms(children: dict[str, nn.Module], names: Sequence[str]) -> Norms | None:
    norms = [children[name] if name else None for name in names]
    found = [norm for norm in norms if norm is None or isinstance(norm, FusedRMSNorm)]
    return Norms(*found) if len(found) == len(norms) else None


def _packed(linears: Sequence[nn.Module | None]) -> list[PackedWeight] | None:
    """Return the weights of these layers: a single one if they lie side by side."""
    packed = [linear.packed for linear in linears if isinstance(linear, NativeLinear)]
    if len(packed) != len(linears):
        return None
    starts = [part.panels.data_ptr() for part in packed]
    ends = [part.panels.data_ptr() + part.panels.nbytes for part in packed]
    if starts[1:] != ends[:-1]:
        return packed
    return [packed[0]._replace(num_pairs=sum(part.num_pairs for part in packed))]

"""Reads a decoder layer's computation off its modules.

Names determine what is tried; proof.py proves that the results agree.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import nn

from worker_proc.attention.interface import PagedLayer
from worker_proc.attention.native import MAX_HEADS_PER_KV_HEAD
from worker_proc.kv.kv_groups import LayerSpec
from worker_proc.modules.experts.mixture import FusedExperts
from worker_proc.modules.mlp import FusedMLP
from worker_proc.modules.packed_linear import NativeLinear
from worker_proc.modules.pointwise import FusedRMSNorm
from worker_proc.native.packed_weights import PackedWeight
from worker_proc.native.structures import Rotation

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
"""Norms before and after attention, and before and after the MLP; "": no norm."""


class LayerSettings(NamedTuple):
    """Settings that a layer's modules do not reveal; they are observed or found by trial."""

    rotation: Rotation
    scale: float
    """Factor that multiplies scores."""
    softcap: float
    """Bound of scores; 0: no bound."""


class Norms(NamedTuple):
    """The norms of a layer; None: no norm at that point."""

    before_attention: FusedRMSNorm | None
    after_attention: FusedRMSNorm | None
    before_mlp: FusedRMSNorm | None
    after_mlp: FusedRMSNorm | None


class DecoderLayer(NamedTuple):
    """A layer: attention and MLP, each multiplied by a factor and added to the residual."""

    norms: Norms
    qkv: list[PackedWeight]
    """One merged weight, or separate weights of queries, keys and values."""
    query_norm: FusedRMSNorm | None  # over each head, or over all heads together
    key_norm: FusedRMSNorm | None
    attention: nn.Module
    out: PackedWeight
    mlp: FusedMLP | FusedExperts
    down: PackedWeight | None
    """The MLP's second weight; None for a mixture of experts, which has its own."""
    hidden_size: int
    residual_factor: float

    @property
    def norms_each_head(self) -> bool:
        """True if queries and keys are normalized, each head separately."""
        norm = self.query_norm
        return norm is not None and len(norm.factors) == self.paged.spec.head_dim

    @property
    def paged(self) -> PagedLayer:
        """The attention module's layer in the KV cache that is attached now."""
        layer: PagedLayer = self.attention.__dict__["paged_layer"]
        return layer


class LayerParts(NamedTuple):
    """The modules of a layer."""

    norms: Norms
    attention: nn.Module
    mlp: nn.Module


def layer_parts(layer: nn.Module) -> LayerParts | None:
    """Return a layer's modules; None: it has others, or norms that are not fused."""
    children = {
        name: child
        for name, child in layer.named_children()
        if not isinstance(child, nn.Dropout)  # it does nothing here
    }
    attention, mlp = children.pop("self_attn", None), children.pop("mlp", None)
    matching = (names for names in NORM_NAMES if set(names) - {""} == set(children))
    norms = next((_norms(children, names) for names in matching), None)
    if norms is None or attention is None or mlp is None:
        return None
    return LayerParts(norms, attention, mlp)


def read_layer(layer: nn.Module, factor: float) -> DecoderLayer | None:
    """Return a layer's description; None: the native decoder cannot compute a part of it.

    Its attention must be attached to a KV cache. `factor` multiplies each contribution to the
    residual.
    """
    found = layer_parts(layer)
    if found is None:
        return None
    norms, attention, mlp = found
    if not isinstance(mlp, FusedMLP | FusedExperts):
        return None
    paged: PagedLayer = attention.__dict__["paged_layer"]
    own = {name for name, _ in attention.named_parameters(recurse=False)}
    if own - ({"sinks"} if paged.sinks is not None else set()):
        return None
    if paged.spec.num_heads // paged.spec.num_kv_heads > MAX_HEADS_PER_KV_HEAD:
        return None  # it takes several calls of the kernel
    parts = dict(attention.named_children())
    names = ["qkv_proj"] if "qkv_proj" in parts else ["q_proj", "k_proj", "v_proj"]
    linears = [parts.pop(name, None) for name in names]
    qkv = [linear for linear in linears if isinstance(linear, NativeLinear)]
    out = parts.pop("o_proj", None)
    query_norm, key_norm = parts.pop("q_norm", None), parts.pop("k_norm", None)
    if len(qkv) < len(linears) or parts or not isinstance(out, NativeLinear):
        return None
    down = mlp.down_proj if isinstance(mlp, FusedMLP) else None
    if not isinstance(down, NativeLinear | None) or (down is None and isinstance(mlp, FusedMLP)):
        return None
    if not isinstance(query_norm, FusedRMSNorm | None):
        return None
    if not isinstance(key_norm, FusedRMSNorm | None):
        return None
    read = DecoderLayer(
        norms,
        _side_by_side([linear.packed for linear in qkv]),
        query_norm,
        key_norm,
        attention,
        out.packed,
        mlp,
        None if down is None else down.packed,
        out.out_features,
        factor,
    )
    spec = read.paged.spec
    widths = [linear.out_features for linear in qkv]
    fits = out.in_features == spec.num_heads * spec.value_head_dim
    width = mlp.hidden_size if down is None else down.out_features
    return read if fits and width == out.out_features and _fit(read, widths, spec) else None


def _norms(children: dict[str, nn.Module], names: Sequence[str]) -> Norms | None:
    norms = [children[name] if name else None for name in names]
    found = [norm for norm in norms if norm is None or isinstance(norm, FusedRMSNorm)]
    return Norms(*found) if len(found) == len(norms) else None


def _fit(layer: DecoderLayer, widths: list[int], spec: LayerSpec) -> bool:
    """Return whether projections and norms have the sizes of the layer and of its attention."""
    expected = [
        spec.num_heads * spec.head_dim,
        spec.num_kv_heads * spec.head_dim,
        spec.num_kv_heads * spec.value_head_dim,
    ]
    if widths not in (expected, [sum(expected)]):
        return False
    if any(norm is not None and len(norm.factors) != layer.hidden_size for norm in layer.norms):
        return False
    query, key = layer.query_norm, layer.key_norm
    if query is None or key is None:
        return query is key
    sizes = len(query.weight), len(key.weight)
    is_alike = (query.epsilon, query.round_first) == (key.epsilon, key.round_first)
    return is_alike and sizes in ((spec.head_dim, spec.head_dim), tuple(expected[:2]))


def _side_by_side(weights: list[PackedWeight]) -> list[PackedWeight]:
    """Merge weights that are adjacent parts of one weight; return others unchanged."""
    first = weights[0]
    if len({weight.panels.untyped_storage().data_ptr() for weight in weights}) > 1:
        return weights
    return [first._replace(num_pairs=sum(weight.num_pairs for weight in weights))]

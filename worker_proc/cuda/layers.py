"""Reads a decoder layer's computation off its modules, and merges its matrices.

Merged matrices share the memory of the modules' own parameters, so the modules still work. Names
determine what is tried; decoder/proof.py proves that the results agree.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from worker_proc.attention.interface import PagedLayer
from worker_proc.decoder.layers import Norms, layer_parts
from worker_proc.modules.pointwise import FusedRMSNorm, activation_of, fused_norm
from worker_proc.modules.pointwise import PointwiseKernels as Kernels
from worker_proc.native.structures import Activation

QKV = ("q_proj", "k_proj", "v_proj")
GATE_UP = ("gate_proj", "up_proj")


class Matrix(NamedTuple):
    """The weight of a projection, `[outputs, inputs]`, and its bias."""

    weight: torch.Tensor
    bias: torch.Tensor | None


class CudaLayer(NamedTuple):
    """A layer: attention and gated MLP, each multiplied by a factor and added to the residual."""

    norms: Norms
    qkv: Matrix
    head_norms: tuple[FusedRMSNorm, FusedRMSNorm] | None
    """Norms of queries and keys, over each head or over all heads together."""
    attention: nn.Module
    out: Matrix
    gate_up: Matrix
    activation: Activation
    down: Matrix
    residual_factor: float

    @property
    def paged(self) -> PagedLayer:
        """The attention module's layer in the KV cache that is attached now."""
        layer: PagedLayer = self.attention.__dict__["paged_layer"]
        return layer


def fuse_norms(model: nn.Module, kernels: Kernels, dtype: torch.dtype) -> int:
    """Replace norms for which the kernel is proven; return their number."""
    num_fused = 0
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            found = fused_norm(child, kernels, dtype)
            if found is not None:
                _, fused = found
                setattr(parent, name, fused)
                num_fused += 1
    return num_fused


def merge_matrices(model: nn.Module) -> None:
    """Make the weights of projections that take the same rows adjacent in memory."""
    for module in model.modules():
        for names in (QKV, GATE_UP):
            linears = [getattr(module, name, None) for name in names]
            if all(_is_plain(linear) for linear in linears):
                _merge([linear for linear in linears if isinstance(linear, nn.Linear)])


def _is_plain(module: object) -> bool:
    return type(module) is nn.Linear and not module.weight.is_meta


def _merge(linears: list[nn.Linear]) -> None:
    if len({linear.in_features for linear in linears}) > 1 or matrix_of(linears) is not None:
        return
    if len({linear.bias is None for linear in linears}) > 1:
        return
    for name in ("weight",) if linears[0].bias is None else ("weight", "bias"):
        whole = torch.cat([getattr(linear, name).detach() for linear in linears])
        parts = whole.split([linear.out_features for linear in linears])
        for linear, part in zip(linears, parts, strict=True):
            setattr(linear, name, nn.Parameter(part, requires_grad=False))


def matrix_of(linears: list[nn.Linear]) -> Matrix | None:
    """Return the matrix of projections that are adjacent in memory, in their order."""
    weight = _whole([linear.weight for linear in linears])
    if weight is None:
        return None
    biases = [linear.bias for linear in linears if linear.bias is not None]
    bias = _whole(biases) if biases else None
    if len(biases) not in (0, len(linears)) or (biases and bias is None):
        return None
    return Matrix(weight, bias)


def _whole(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    first, size = parts[0].detach(), sum(len(part) for part in parts)
    end = first.data_ptr()
    for part in parts:
        if not part.is_contiguous() or part.data_ptr() != end:
            return None
        end += part.numel() * part.itemsize
    if len(parts) == 1:
        return first
    storages = {part.untyped_storage().data_ptr() for part in parts}
    if len(storages) > 1:
        return None
    return first.as_strided((size, *first.shape[1:]), first.stride())


def read_layer(layer: nn.Module, factor: float, kernels: Kernels) -> CudaLayer | None:
    """Return a layer's description; None: there are no kernels for a part of it.

    Its attention must be attached to a KV cache. `factor` multiplies each contribution to the
    residual.
    """
    found = layer_parts(layer)
    if found is None:
        return None
    norms, attention, mlp = found
    inner, projections = _read_mlp(mlp, kernels), _read_attention(attention)
    if inner is None or projections is None:
        return None
    qkv, out, head_norms = projections
    read = CudaLayer(norms, qkv, head_norms, attention, out, *inner, factor)
    return read if _fits(read) else None


def _read_mlp(mlp: nn.Module, kernels: Kernels) -> tuple[Matrix, Activation, Matrix] | None:
    parts = dict(mlp.named_children())
    function = parts.pop("act_fn", None) or parts.pop("activation_fn", None)
    device = next(mlp.parameters()).device
    activation = activation_of(function, kernels, device)
    down = _matrix(parts, ("down_proj",))
    gate_up = _matrix(parts, ("gate_up_proj",)) or _matrix(parts, GATE_UP)
    if activation is None or down is None or gate_up is None or parts:
        return None
    return gate_up, activation, down


def _read_attention(
    attention: nn.Module,
) -> tuple[Matrix, Matrix, tuple[FusedRMSNorm, FusedRMSNorm] | None] | None:
    if next(attention.parameters(recurse=False), None) is not None:
        return None
    parts = {
        name: child
        for name, child in attention.named_children()
        if not isinstance(child, nn.Dropout)
    }
    qkv = _matrix(parts, ("qkv_proj",)) or _matrix(parts, QKV)
    out = _matrix(parts, ("o_proj",))
    query, key = parts.pop("q_norm", None), parts.pop("k_norm", None)
    if qkv is None or out is None or parts:
        return None
    if query is None and key is None:
        return qkv, out, None
    if not isinstance(query, FusedRMSNorm) or not isinstance(key, FusedRMSNorm):
        return None
    if (query.epsilon, query.round_first) != (key.epsilon, key.round_first):
        return None
    return qkv, out, (query, key)


def _matrix(parts: dict[str, nn.Module], names: tuple[str, ...]) -> Matrix | None:
    """Remove the named projections from `parts`, and return them as one matrix, if all exist."""
    linears = [parts.get(name) for name in names]
    plain = [linear for linear in linears if isinstance(linear, nn.Linear) and _is_plain(linear)]
    matrix = matrix_of(plain) if len(plain) == len(names) else None
    if matrix is not None:
        for name in names:
            del parts[name]
    return matrix


def _fits(layer: CudaLayer) -> bool:
    """Return whether matrices and norms have the sizes of the layer and of its attention."""
    spec, hidden_size = layer.paged.spec, len(layer.down.weight)
    query_size = spec.num_heads * spec.head_dim
    key_size, value_size = (spec.num_kv_heads * dim for dim in (spec.head_dim, spec.value_head_dim))
    inner_size = layer.down.weight.shape[1]
    shapes = (
        (layer.qkv, (query_size + key_size + value_size, hidden_size)),
        (layer.out, (hidden_size, spec.num_heads * spec.value_head_dim)),
        (layer.gate_up, (2 * inner_size, hidden_size)),
    )
    if any(matrix.weight.shape != shape for matrix, shape in shapes):
        return False
    if any(norm is not None and len(norm.factors) != hidden_size for norm in layer.norms):
        return False
    if layer.head_norms is None:
        return True
    sizes = tuple(len(norm.factors) for norm in layer.head_norms)
    return sizes in ((spec.head_dim, spec.head_dim), (query_size, key_size))

"""Instructions of a layer other than projections: norms, rotation, attention and gates."""

import ctypes

import torch

from worker_proc.attention.interface import PagedLayer
from worker_proc.attention.native import NativeBackend
from worker_proc.decoder.buffers import ATTENDED, INNER, QKV, SPLIT, first_factor
from worker_proc.decoder.layers import DecoderLayer, LayerSettings
from worker_proc.modules.mlp import FusedMLP
from worker_proc.modules.pointwise import FusedRMSNorm
from worker_proc.native.structures import Instruction, Kind


def rotation(
    layer: DecoderLayer, settings: LayerSettings, angles: int, cosines: torch.Tensor
) -> Instruction:
    """Return the instruction that rotates queries and keys, after the norms of their heads.

    `angles` is the number of the table of angles that the layer uses, and `cosines` are its
    cosines.
    """
    spec = layer.paged.spec
    rotate = Instruction(
        kind=Kind.ROTATE,
        source=QKV,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        num_rotated=cosines.shape[-1],
        angles=angles,
        has_wide_angles=cosines.dtype == torch.float32,
        rotation=settings.rotation,
    )
    if layer.query_norm is not None and layer.key_norm is not None and layer.norms_each_head:
        rotate.query_norm = layer.query_norm.factors.data_ptr()
        rotate.key_norm = layer.key_norm.factors.data_ptr()
        rotate.epsilon = layer.query_norm.epsilon
        rotate.rounds_first = layer.query_norm.round_first
    return rotate


def attention(paged: PagedLayer, settings: LayerSettings) -> Instruction:
    """Return the instruction that stores keys and values, and attends over the paged cache."""
    assert isinstance(paged.backend, NativeBackend)
    return Instruction(
        kind=Kind.ATTEND,
        source=QKV,
        target=ATTENDED,
        group=paged.group,
        scale=settings.scale,
        softcap=settings.softcap,
        layer=ctypes.addressof(paged.backend.layer_args(paged)),
    )


def normalization(norm: FusedRMSNorm, source: int, target: int, column: int = 0) -> Instruction:
    """Return the instruction for a norm between two buffers, of the columns from `column` on."""
    return Instruction(
        kind=Kind.NORMALIZE,
        source=source,
        target=target,
        size=len(norm.factors),
        column=column,
        weight=norm.factors.data_ptr(),
        epsilon=norm.epsilon,
        rounds_first=norm.round_first,
    )


def gating(mlp: FusedMLP) -> Instruction:
    """Return the instruction that multiplies the activated gates in SPLIT by the factors there."""
    return Instruction(
        kind=Kind.GATE,
        source=SPLIT,
        target=INNER,
        size=mlp.size,
        column=first_factor(mlp),
        activation=mlp.activation,
    )

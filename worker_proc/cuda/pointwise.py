"""Launches the pointwise kernels over rows on the device."""

import torch
import triton

from worker_proc.cuda.attention import PagedStep
from worker_proc.cuda.pointwise_kernels import (
    ALL_HEADS,
    EACH_HEAD,
    NO_NORM,
    activate_kernel,
    add_up_kernel,
    norm_kernel,
    rotate_and_store_kernel,
)
from worker_proc.kv.kv_groups import LayerSpec
from worker_proc.modules.pointwise import FusedRMSNorm
from worker_proc.native.structures import Activation, Rotation

ACTIVATION_TILE = 1024


class TritonLibrary:
    """The kernels of single modules, with the interface of the native library."""

    def rms_norm(
        self, hidden: torch.Tensor, weight: torch.Tensor, epsilon: float, round_first: bool
    ) -> torch.Tensor:
        """Normalize the last dimension, and multiply it by `weight`, which is float32."""
        rows = _dense_rows(hidden)
        out = torch.empty_like(rows)
        _launch_norm(rows, None, None, 1.0, (weight, epsilon, round_first), out=out)
        return out.view(hidden.shape)

    def activate(self, hidden: torch.Tensor, activation: Activation) -> torch.Tensor:
        """Apply an activation to every value."""
        rows = _dense_rows(hidden)
        return _launch_activation(rows, None, activation).view(hidden.shape)


def add_and_norm(
    hidden: torch.Tensor,
    added: torch.Tensor | None,
    norm_of_added: FusedRMSNorm | None,
    factor: float,
    norm: FusedRMSNorm | None,
) -> torch.Tensor:
    """Add `factor` times `added`, or its norm, to `hidden` in place, and return its `norm`.

    Without a norm, `hidden` is returned.
    """
    out = hidden if norm is None else torch.empty_like(hidden)
    if added is not None or norm is not None:
        _launch_norm(hidden, added, _parameters(norm_of_added), factor, _parameters(norm), out=out)
    return out


def activate_and_multiply(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Return activation(gates) · factors, given rows of gates followed by factors."""
    gates, factors = gate_up.chunk(2, dim=1)
    return _launch_activation(gates, factors, activation)


def add_up(gathered: torch.Tensor, out: torch.Tensor) -> None:
    """Write the sums over the ranks of `[ranks, T, width]`, in their order and in float32."""
    num_ranks, num_values = len(gathered), out.numel()
    grid = (triton.cdiv(num_values, ACTIVATION_TILE),)
    add_up_kernel[grid](gathered, out, num_values, NUM_RANKS=num_ranks, TILE=ACTIVATION_TILE)


def rotate_and_store(
    paged: PagedStep,
    qkv: torch.Tensor,
    norms: tuple[FusedRMSNorm, FusedRMSNorm] | None,
    angles: tuple[torch.Tensor, torch.Tensor],
    *,
    rotation: Rotation,
    spec: LayerSpec,
) -> torch.Tensor:
    """Store keys and values of `qkv`, `[T, outputs]`, and return its queries `[T, heads, dim]`.

    Queries and keys are normalized by `norms`, if any, and rotated by `angles`, `[T, num_rotated]`.
    """
    step, table, kv = paged
    cosines, sines = angles
    query = qkv.new_empty(len(qkv), spec.num_heads, spec.head_dim)
    query_norm, key_norm = norms or (None, None)
    head_norm = NO_NORM
    if query_norm is not None:
        head_norm = EACH_HEAD if len(query_norm.factors) == spec.head_dim else ALL_HEADS
    rotate_and_store_kernel[(len(qkv),)](
        *(qkv, query, kv.keys, kv.values),
        None if query_norm is None else query_norm.factors,
        None if key_norm is None else key_norm.factors,
        *(cosines, sines, table),
        *(step.first_rows, step.starts, step.table_rows, step.kept_from, step.num_parts),
        *(qkv.stride(0), cosines.stride(0), table.stride(0)),
        0.0 if query_norm is None else query_norm.epsilon,
        NUM_HEADS=spec.num_heads,
        PADDED_HEADS=triton.next_power_of_2(spec.num_heads),
        NUM_KV_HEADS=spec.num_kv_heads,
        PADDED_KV_HEADS=triton.next_power_of_2(spec.num_kv_heads),
        HEAD_DIM=spec.head_dim,
        PADDED_DIM=triton.next_power_of_2(spec.head_dim),
        VALUE_DIM=spec.value_head_dim,
        PADDED_VALUE_DIM=triton.next_power_of_2(spec.value_head_dim),
        BLOCK_SIZE=kv.keys.shape[1],
        NUM_ROTATED=0 if rotation is Rotation.NONE else cosines.shape[1],
        ROTATION=int(rotation),
        HEAD_NORM=head_norm.value,
        ROUNDS_FIRST=query_norm is not None and query_norm.round_first,
    )
    return query


_Norm = tuple[torch.Tensor, float, bool]
"""Weight, epsilon, and whether values are rounded before the weight."""


def _parameters(norm: FusedRMSNorm | None) -> _Norm | None:
    return None if norm is None else (norm.factors, norm.epsilon, norm.round_first)


def _launch_norm(
    hidden: torch.Tensor,
    added: torch.Tensor | None,
    norm_of_added: _Norm | None,
    factor: float,
    norm: _Norm | None,
    *,
    out: torch.Tensor,
) -> None:
    size = hidden.shape[1]
    added_weight, added_epsilon, added_rounds_first = norm_of_added or (None, 0.0, False)
    weight, epsilon, rounds_first = norm or (None, 0.0, False)
    padded = triton.next_power_of_2(size)
    norm_kernel[(len(hidden),)](
        *(hidden, added, added_weight, weight, out),
        hidden.stride(0),
        0 if added is None else added.stride(0),
        out.stride(0),
        *(factor, added_epsilon, epsilon),
        SIZE=size,
        PADDED_SIZE=padded,
        ADDS=added is not None,
        NORMS_ADDED=norm_of_added is not None,
        SCALES_ADDED=factor != 1.0,
        ADDED_ROUNDS_FIRST=added_rounds_first,
        NORMS=norm is not None,
        ROUNDS_FIRST=rounds_first,
        num_warps=min(16, max(4, padded // 512)),
    )


def _launch_activation(
    gates: torch.Tensor, factors: torch.Tensor | None, activation: Activation
) -> torch.Tensor:
    num_rows, size = gates.shape
    out = gates.new_empty(num_rows, size)
    tile = min(ACTIVATION_TILE, triton.next_power_of_2(size))
    activate_kernel[(num_rows, triton.cdiv(size, tile))](
        *(gates, factors, out),
        gates.stride(0),
        0 if factors is None else factors.stride(0),
        out.stride(0),
        size,
        ACTIVATION=int(activation),
        MULTIPLIES=factors is not None,
        TILE=tile,
    )
    return out


def _dense_rows(hidden: torch.Tensor) -> torch.Tensor:
    rows = hidden.reshape(-1, hidden.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()

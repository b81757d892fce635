"""The products that convert between heads and the latent rows of multi-head latent attention.

A head's keys are W_UK times the latent row, so its score is the dot product of the row and W_UK's
transpose times the query. Its output is W_UV times the weighted sum of the rows. Both weights come
from kv_b_proj (DeepSeek-V2, arXiv 2405.04434, section 2.1.2).
"""

import ctypes
from typing import NamedTuple, Protocol

import torch
from torch.nn.functional import pad

from worker_proc.native.instructions import projection
from worker_proc.native.kernels import NativeLibrary
from worker_proc.native.packed_weights import PackedWeight
from worker_proc.native.structures import (
    BufferArgs,
    Instruction,
    Kind,
    ProgramArgs,
    Rotation,
    RunArgs,
)

_ROW_BYTES = 64
"""A head's inputs are read in whole cache lines."""


class LatentShape(NamedTuple):
    """The sizes of a layer; a query has `nope_dim` dimensions, then `rope_dim` rotated ones."""

    num_heads: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    rank: int
    """The size of a latent row, without the rotated part of the key, which follows it."""

    @property
    def head_dim(self) -> int:
        """The dimension of a head's queries."""
        return self.nope_dim + self.rope_dim

    @property
    def row_dim(self) -> int:
        """The size of a token's cached row."""
        return self.rank + self.rope_dim


class Angles(NamedTuple):
    """Contiguous cosines and sines, `[T, rope_dim]`; rotation by pairs reads the first half."""

    cosines: torch.Tensor
    sines: torch.Tensor


class LatentProducts(Protocol):
    """An implementation of the products before and after attention over latent rows."""

    def queries(
        self, query: torch.Tensor, row: torch.Tensor, angles: Angles | None
    ) -> torch.Tensor:
        """Return queries for latent rows, `[T, num_heads, row_dim]`.

        Takes projected queries, `[T, num_heads, head_dim]`, and rotates the end of `row`, `[T,
        row_dim]`, in place.
        """

    def values(self, attended: torch.Tensor) -> torch.Tensor:
        """Return the heads' outputs, `[T, num_heads * value_dim]`.

        `attended` has weighted sums of latent rows, `[T, num_heads, rank]`.
        """


def split_weight(weight: torch.Tensor, shape: LatentShape) -> tuple[torch.Tensor, torch.Tensor]:
    """Return W_UK as `[num_heads, rank, nope_dim]` and W_UV as `[num_heads, value_dim, rank]`."""
    heads = weight.detach().view(shape.num_heads, shape.nope_dim + shape.value_dim, shape.rank)
    keys, values = heads.split([shape.nope_dim, shape.value_dim], dim=1)
    return keys.transpose(1, 2).contiguous(), values.contiguous()


class TorchProducts:
    """Products by torch; their sums may depend on the other rows."""

    def __init__(self, shape: LatentShape, rotation: Rotation, weight: torch.Tensor) -> None:
        """Split the weight of kv_b_proj."""
        self._shape = shape
        self._rotation = rotation
        self._keys, self._values = split_weight(weight, shape)

    def queries(
        self, query: torch.Tensor, row: torch.Tensor, angles: Angles | None
    ) -> torch.Tensor:
        shape = self._shape
        nope, rope = query.split([shape.nope_dim, shape.rope_dim], dim=-1)
        if angles is not None and self._rotation is not Rotation.NONE:
            heads = Angles(*(part.unsqueeze(1) for part in angles))
            rope = _rotated(rope, heads, self._rotation)
            row[:, shape.rank :] = _rotated(row[:, shape.rank :], angles, self._rotation)
        latent = torch.matmul(nope.transpose(0, 1), self._keys.transpose(1, 2)).transpose(0, 1)
        return torch.cat([latent, rope], dim=-1)

    def values(self, attended: torch.Tensor) -> torch.Tensor:
        heads = torch.matmul(attended.transpose(0, 1), self._values.transpose(1, 2))
        return heads.transpose(0, 1).flatten(1)


def _rotated(part: torch.Tensor, angles: Angles, rotation: Rotation) -> torch.Tensor:
    half = part.shape[-1] // 2
    if rotation is Rotation.HALVES:
        low, high = part[..., :half], part[..., half:]
    else:
        low, high = part[..., 0::2], part[..., 1::2]
    (cosine, cosine_high), (sine, sine_high) = (each.split(half, dim=-1) for each in angles)
    if rotation is Rotation.HALVES:
        turned = torch.cat([low * cosine - high * sine, high * cosine_high + low * sine_high], -1)
    else:
        turned = torch.stack([low * cosine - high * sine, high * cosine + low * sine], -1)
    return turned.view(part.shape).to(part.dtype)


class NativeProducts:
    """Products by the native kernels: a row's bits do not depend on the other rows."""

    def __init__(
        self,
        library: NativeLibrary,
        shape: LatentShape,
        rotation: Rotation,
        weight: torch.Tensor,
    ) -> None:
        """Pack the weight of kv_b_proj."""
        self._library = library
        self._shape = shape
        self._rotation = rotation
        keys, values = split_weight(weight, shape)
        self._keys, self._values = (
            library.packer.pack_experts(keys),
            library.packer.pack_experts(values),
        )

    def queries(
        self, query: torch.Tensor, row: torch.Tensor, angles: Angles | None
    ) -> torch.Tensor:
        shape, num_rows = self._shape, len(query)
        assert query.stride(2) == 1
        assert row.stride(1) == 1
        out = query.new_empty(num_rows, shape.num_heads, shape.row_dim)
        if angles is not None and self._rotation is not Rotation.NONE:
            rotated = [
                _buffer(query[:, 0, shape.nope_dim :]),
                _buffer(row[:, shape.rank :]),
            ]
            instructions = [
                self._rotate(0, shape.num_heads, query.stride(1), angles),
                self._rotate(1, 1, shape.row_dim, angles),
            ]
            self._execute(instructions, rotated, num_rows, query.dtype, angles)
        out[:, :, shape.rank :] = query[:, :, shape.nope_dim :]
        self._project(self._keys, _whole_lines(query, shape.nope_dim), out, shape.rank)
        return out

    def values(self, attended: torch.Tensor) -> torch.Tensor:
        shape = self._shape
        out = attended.new_empty(len(attended), shape.num_heads, shape.value_dim)
        self._project(self._values, _whole_lines(attended, shape.rank), out, shape.value_dim)
        return out.flatten(1)

    def _rotate(self, buffer: int, num_heads: int, head_dim: int, angles: Angles) -> Instruction:
        return Instruction(
            kind=Kind.ROTATE,
            source=buffer,
            num_heads=num_heads,
            head_dim=head_dim,
            num_rotated=self._shape.rope_dim,
            rotation=self._rotation,
            has_wide_angles=angles.cosines.dtype == torch.float32,
        )

    def _project(
        self, weight: PackedWeight, rows: torch.Tensor, out: torch.Tensor, num_outputs: int
    ) -> None:
        """Multiply each head's rows by its weight, and write the first outputs of each head."""
        instruction = projection(
            weight,
            num_heads=out.shape[1],
            head_dim=rows.stride(1),
            target_dim=out.shape[2],
            num_outputs=num_outputs,
        )
        instruction.kind = Kind.PROJECT_HEADS
        buffers = [_buffer(rows[:, 0]), _buffer(out[:, 0])]
        self._execute([instruction], buffers, len(rows), out.dtype)

    def _execute(
        self,
        instructions: list[Instruction],
        buffers: list[BufferArgs],
        num_rows: int,
        dtype: torch.dtype,
        angles: Angles | None = None,
    ) -> None:
        code = (Instruction * len(instructions))(*instructions)
        memory = (BufferArgs * len(buffers))(*buffers)
        run = RunArgs(ctypes.addressof(memory), num_rows=num_rows)
        if angles is not None:
            cosines, sines = ((ctypes.c_void_p * 1)(part.data_ptr()) for part in angles)
            run.cosines, run.sines = ctypes.addressof(cosines), ctypes.addressof(sines)
        is_bf16 = dtype == torch.bfloat16
        self._library.execute(ProgramArgs(ctypes.addressof(code), len(code), is_bf16), run)


def _buffer(rows: torch.Tensor) -> BufferArgs:
    return BufferArgs(rows.data_ptr(), rows.stride(0) * rows.itemsize)


def _whole_lines(rows: torch.Tensor, num_inputs: int) -> torch.Tensor:
    """Return heads whose inputs fill whole cache lines, padded with zeros if necessary."""
    missing = -num_inputs % (_ROW_BYTES // rows.itemsize)
    return pad(rows[:, :, :num_inputs], (0, missing)) if missing else rows

"""The products of a mixture of experts, over rows that the native kernels sort by expert.

The caller provides each row's experts. A row's results are added in the order in which its experts
are given, so that its bits do not depend on the other rows (worker_proc/native/products/experts.h).
"""

import ctypes
from typing import NamedTuple

import torch

from worker_proc.native.instructions import coded_stride, projection, row_stride
from worker_proc.native.kernels import NativeLibrary
from worker_proc.native.packed_weights import Format, PackedWeight
from worker_proc.native.structures import (
    CHOICE_BYTES,
    Activation,
    BufferArgs,
    Epilogue,
    Instruction,
    Kind,
    ProgramArgs,
    RunArgs,
)


class Gating(NamedTuple):
    """How an expert activates the outputs of its first product."""

    activation: Activation
    is_gated: bool = True
    """If True, activated gates are multiplied by the factors; if False, all outputs are
    activated."""
    limit: float = 0.0
    """Gates are clamped to at most `limit`, factors to within ±`limit`; 0: no clamp."""
    alpha: float = 0.0
    """If not 0, gates are multiplied by sigmoid(alpha · gate) and by the factors plus 1."""


class ExpertSizes(NamedTuple):
    """The number of experts and the shape of each."""

    num_experts: int
    hidden_size: int
    size: int
    """The width between an expert's two products."""


class ExpertBuffers(NamedTuple):
    """The numbers of the buffers that a mixture of experts uses."""

    source: int
    logits: int
    choices: int
    gathered: int
    inner: int
    codes: int
    expert_codes: int
    target: int


class Chosen(NamedTuple):
    """The number of experts for each row, and whether results are rounded before their sum."""

    num_chosen: int
    rounds_weights: bool


class ExpertProducts:
    """The packed weights of all experts, and the instructions that multiply by them."""

    def __init__(
        self,
        library: NativeLibrary,
        gating: Gating,
        sizes: ExpertSizes,
        weights: tuple[PackedWeight, PackedWeight],
        dtype: torch.dtype,
    ) -> None:
        """`weights` are those before and after the activation; `dtype` is the dtype of rows."""
        self.gating = gating
        self.sizes = sizes
        self.up, self.down = weights
        self.dtype = dtype
        self._library = library

    @property
    def has_codes(self) -> bool:
        """True if the experts take coded rows."""
        return self.down.format is Format.INT8_FOR_CODES

    @property
    def codes_stride(self) -> int:
        """The stride in bytes of coded rows; 0: the experts take plain rows."""
        _, hidden_size, size = self.sizes
        return coded_stride(max(hidden_size, size) if self.has_codes else 0)

    def instructions(self, buffers: ExpertBuffers, chosen: Chosen) -> list[Instruction]:
        """Return the program from the choices on; rows of `source` are padded with zeros."""
        num_experts, hidden_size, size = self.sizes
        shared = {
            "num_experts": num_experts,
            "num_chosen": chosen.num_chosen,
            "choices": buffers.choices,
            "rounds_weights": chosen.rounds_weights,
        }
        rows, gathered, inner = buffers.source, buffers.gathered, buffers.inner
        code: list[Instruction] = []
        code_inner: list[Instruction] = []
        if self.has_codes:
            # Each row is coded once, and its codes are gathered. GATHERED holds the experts'
            # results.
            rows, gathered, inner = buffers.codes, buffers.expert_codes, buffers.expert_codes
            code = [_code(buffers.source, rows, hidden_size)]
            code_inner = [_code(buffers.inner, inner, size, chosen.num_chosen)]
        activation, is_gated, limit, alpha = self.gating
        up = projection(
            self.up,
            source=gathered,
            target=buffers.inner,
            epilogue=Epilogue.ACTIVATE if is_gated else Epilogue.APPLY,
            activation=activation,
            limit=limit,
            alpha=alpha,
            **shared,
        )
        down = projection(self.down, source=inner, target=buffers.gathered, **shared)
        up.kind = down.kind = Kind.EXPERTS
        return [
            *code,
            Instruction(kind=Kind.GATHER, source=rows, target=gathered, **shared),
            up,
            *code_inner,
            down,
            Instruction(
                kind=Kind.COMBINE,
                source=buffers.gathered,
                target=buffers.target,
                size=hidden_size,
                **shared,
            ),
        ]

    def execute(
        self,
        program: "ctypes.Array[Instruction]",
        rows: torch.Tensor,
        num_chosen: int,
        choices: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Execute a program over `[num_rows, hidden_size]`, with the buffers of EXPERT_BUFFERS.

        `choices` are `Choice` structures of experts.h; without them, the program computes the
        choices.
        """
        num_experts, hidden_size, size = self.sizes
        count = len(rows)
        made = [
            self._with_zeros(rows),
            self._rows(count, num_experts),
            self._rows(count, num_chosen * CHOICE_BYTES // self.dtype.itemsize)
            if choices is None
            else choices,
            self._rows(count * num_chosen, hidden_size),
            self._rows(count * num_chosen, size, fill=True),
            self._codes(count, hidden_size),
            self._codes(count * num_chosen, max(hidden_size, size)),
            self._rows(count, hidden_size),
        ]
        buffers = (BufferArgs * len(made))(
            *(BufferArgs(t.data_ptr(), t.stride(0) * t.itemsize) for t in made)
        )
        is_bf16 = self.dtype == torch.bfloat16
        args = ProgramArgs(ctypes.addressof(program), len(program), is_bf16)
        self._library.execute(args, RunArgs(ctypes.addressof(buffers), num_rows=count))
        return made[-1][:, :hidden_size]

    def _with_zeros(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows that are padded with zeros."""
        made = self._rows(len(rows), rows.shape[1], fill=True)
        made[:, : rows.shape[1]] = rows
        return made

    def _rows(self, num_rows: int, width: int, *, fill: bool = False) -> torch.Tensor:
        """Allocate rows; with `fill`, they are zero, including the padding."""
        stride = row_stride(width, self.dtype.itemsize) // self.dtype.itemsize
        make = torch.zeros if fill else torch.empty
        return make(num_rows, stride, dtype=self.dtype)

    def _codes(self, num_rows: int, width: int) -> torch.Tensor:
        """Allocate coded rows; empty if the experts take plain rows."""
        return torch.empty(num_rows * self.has_codes, coded_stride(width), dtype=torch.uint8)


EXPERT_BUFFERS = ExpertBuffers(*range(len(ExpertBuffers._fields)))
"""The buffers of a program that computes only a mixture of experts."""


def as_program(instructions: list[Instruction]) -> "ctypes.Array[Instruction]":
    """Return instructions as the array that the kernels take."""
    return (Instruction * len(instructions))(*instructions)


def _code(source: int, target: int, size: int, num_chosen: int = 0) -> Instruction:
    return Instruction(
        kind=Kind.CODE, source=source, target=target, size=size, num_chosen=num_chosen
    )

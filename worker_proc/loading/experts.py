"""A mixture of experts in place of an MLP, computed by the native kernels.

The router chooses a few experts for each row; the rows are sorted by expert, so that an expert's
weights are read once, and what the experts of a row compute is added in the order in which they
were chosen (worker_proc/native/experts.h).
"""

import ctypes
from typing import NamedTuple

import torch
from torch import nn

from worker_proc.native.kernels import (
    CHOICE_BYTES,
    Activation,
    BufferArgs,
    Epilogue,
    Instruction,
    Kind,
    NativeLibrary,
    ProgramArgs,
    RunArgs,
    projection,
    row_stride,
)


class Routing(NamedTuple):
    """How a router turns the probabilities of all experts into the weights of the chosen ones."""

    num_chosen: int
    normalizes: bool
    """They add up to 1."""
    rounds_weights: bool
    """They have the model's dtype; else float32."""


class ExpertWeights(NamedTuple):
    """The weights of a mixture of experts, as transformers stores them."""

    router: torch.Tensor
    """`[num_experts, hidden_size]`"""
    gate_up: torch.Tensor
    """`[num_experts, 2 * size, hidden_size]`: first the gates, then the factors."""
    down: torch.Tensor
    """`[num_experts, hidden_size, size]`"""


class ExpertBuffers(NamedTuple):
    """The buffers that a mixture of experts works on, by their numbers."""

    source: int
    logits: int
    choices: int
    gathered: int
    inner: int
    target: int


_NUM_BUFFERS = len(ExpertBuffers._fields)


class FusedExperts(nn.Module):
    """The sum of down(f(gate(x)) · up(x)) over the experts of each row, times their weights."""

    def __init__(
        self,
        library: NativeLibrary,
        activation: Activation,
        routing: Routing,
        weights: ExpertWeights,
    ) -> None:
        super().__init__()
        router, gate_up, down = weights
        self.num_experts, self.hidden_size, self.size = down.shape
        self.routing = routing
        self.activation = activation
        self.dtype = down.dtype
        self._router = library.pack(router.detach(), None)
        self._gate_up = library.pack_experts(gate_up.detach(), gates=True)
        self._down = library.pack_experts(down.detach())
        self._library = library
        instructions = self.instructions(ExpertBuffers(*range(_NUM_BUFFERS)))
        self._instructions = (Instruction * len(instructions))(*instructions)

    @property
    def choice_width(self) -> int:
        """The values of a row's choices, if they were of the model's dtype."""
        return self.routing.num_chosen * CHOICE_BYTES // self.dtype.itemsize

    def instructions(self, buffers: ExpertBuffers) -> list[Instruction]:
        """Return the program over one step; rows of `source` end in zeros."""
        num_chosen, normalizes, rounds_weights = self.routing
        shared = {
            "num_experts": self.num_experts,
            "num_chosen": num_chosen,
            "choices": buffers.choices,
            "normalizes": normalizes,
            "rounds_weights": rounds_weights,
        }
        up = projection(
            self._gate_up,
            source=buffers.gathered,
            target=buffers.inner,
            epilogue=Epilogue.ACTIVATE,
            activation=self.activation,
            **shared,
        )
        down = projection(self._down, source=buffers.inner, target=buffers.gathered, **shared)
        up.kind = down.kind = Kind.EXPERTS
        return [
            projection(self._router, source=buffers.source, target=buffers.logits),
            Instruction(kind=Kind.CHOOSE, source=buffers.logits, **shared),
            Instruction(kind=Kind.GATHER, source=buffers.source, target=buffers.gathered, **shared),
            up,
            down,
            Instruction(
                kind=Kind.COMBINE,
                source=buffers.gathered,
                target=buffers.target,
                size=self.hidden_size,
                **shared,
            ),
        ]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        rows = hidden.reshape(-1, self.hidden_size)
        num_sorted = len(rows) * self.routing.num_chosen
        made = [
            self._zeros(len(rows), self.hidden_size),
            self._zeros(len(rows), self.num_experts),
            self._zeros(len(rows), self.choice_width),
            self._zeros(num_sorted, self.hidden_size),
            self._zeros(num_sorted, self.size),
            self._zeros(len(rows), self.hidden_size),
        ]
        made[0][:, : self.hidden_size] = rows
        buffers = (BufferArgs * len(made))(
            *(BufferArgs(t.data_ptr(), t.stride(0) * t.itemsize) for t in made)
        )
        array = self._instructions
        program = ProgramArgs(ctypes.addressof(array), len(array), self.dtype == torch.bfloat16)
        run = RunArgs(ctypes.addressof(buffers), num_rows=len(rows))
        self._library.execute(program, run)
        return made[-1][:, : self.hidden_size].reshape(hidden.shape)

    def _zeros(self, num_rows: int, width: int) -> torch.Tensor:
        stride = row_stride(width, self.dtype.itemsize) // self.dtype.itemsize
        return torch.zeros(num_rows, stride, dtype=self.dtype)

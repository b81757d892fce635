"""A mixture of experts in place of an MLP, computed by the native kernels.

The router chooses a few experts for each row; the rows are sorted by expert, so that an expert's
weights are read once, and what the experts of a row compute is added in the order in which they
were chosen (worker_proc/native/experts.h). The weights of experts may be codes; the router's stay
as they are.
"""

import ctypes
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from worker_proc.loading.coded_weights import pack_expert_weights
from worker_proc.loading.packed_linear import coded_rows, coded_weight, rounded_copy
from worker_proc.native.kernels import (
    CHOICE_BYTES,
    Activation,
    BufferArgs,
    Epilogue,
    Format,
    Instruction,
    Kind,
    NativeLibrary,
    ProgramArgs,
    RunArgs,
    coded_stride,
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


def expert_weights(module: nn.Module) -> ExpertWeights | None:
    """Return the weights of a module with the parts and shapes of a mixture of experts.

    None: it is something else, or text does not reach it.
    """
    parts = dict(module.named_children())
    if set(parts) != {"gate", "experts"}:
        return None
    # A buffer may move the choice of a few rows, which the trials would not show.
    if next(module.buffers(), None) is not None:
        return None
    router = dict(parts["gate"].named_parameters())
    experts = dict(parts["experts"].named_parameters())
    if set(router) != {"weight"} or set(experts) != {"gate_up_proj", "down_proj"}:
        return None
    found = ExpertWeights(router["weight"], experts["gate_up_proj"], experts["down_proj"])
    down = found.down
    num_experts, hidden_size, size = down.shape if down.dim() == 3 else (0, 0, 0)
    if found.gate_up.shape != (num_experts, 2 * size, hidden_size):
        return None
    if found.router.shape != (num_experts, hidden_size):
        return None
    if len({tensor.dtype for tensor in found}) > 1 or any(tensor.is_meta for tensor in found):
        return None
    return found


class ExpertBuffers(NamedTuple):
    """The buffers that a mixture of experts works on, by their numbers."""

    source: int
    logits: int
    choices: int
    gathered: int
    inner: int
    codes: int
    expert_codes: int
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
        format: Format = Format.UNITS,
    ) -> None:
        """Pack the weights, those of the experts in a format."""
        super().__init__()
        router, gate_up, down = weights
        self.num_experts, self.hidden_size, self.size = down.shape
        self.routing = routing
        self.activation = activation
        self.dtype = down.dtype
        self._router = library.pack(router.detach(), None)
        self.gate_up = pack_expert_weights(library, gate_up, format, gates=True)
        self._down = pack_expert_weights(library, down, format)
        self._library = library
        instructions = self.instructions(ExpertBuffers(*range(_NUM_BUFFERS)))
        self._instructions = (Instruction * len(instructions))(*instructions)

    @property
    def choice_width(self) -> int:
        """The values of a row's choices, if they were of the model's dtype."""
        return self.routing.num_chosen * CHOICE_BYTES // self.dtype.itemsize

    @property
    def has_codes(self) -> bool:
        """Whether the experts take rows of codes."""
        return self._down.format is Format.INT8_FOR_CODES

    @property
    def codes_stride(self) -> int:
        """The bytes between rows of codes that the experts take."""
        return coded_stride(max(self.hidden_size, self.size) if self.has_codes else 0)

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
        rows, gathered, inner = buffers.source, buffers.gathered, buffers.inner
        code: list[Instruction] = []
        code_inner: list[Instruction] = []
        if self.has_codes:
            # A row is coded once, and its codes are gathered. GATHERED has what the experts return.
            rows, gathered, inner = buffers.codes, buffers.expert_codes, buffers.expert_codes
            code = [_code(buffers.source, rows, self.hidden_size)]
            code_inner = [_code(buffers.inner, inner, self.size, num_chosen=num_chosen)]
        up = projection(
            self.gate_up,
            source=gathered,
            target=buffers.inner,
            epilogue=Epilogue.ACTIVATE,
            activation=self.activation,
            **shared,
        )
        down = projection(self._down, source=inner, target=buffers.gathered, **shared)
        up.kind = down.kind = Kind.EXPERTS
        return [
            projection(self._router, source=buffers.source, target=buffers.logits),
            Instruction(kind=Kind.CHOOSE, source=buffers.logits, **shared),
            *code,
            Instruction(kind=Kind.GATHER, source=rows, target=gathered, **shared),
            up,
            *code_inner,
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
            self._codes(len(rows), self.hidden_size),
            self._codes(num_sorted, max(self.hidden_size, self.size)),
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

    def _codes(self, num_rows: int, width: int) -> torch.Tensor:
        """Return memory for rows of codes, if there are any."""
        return torch.empty(num_rows * self.has_codes, coded_stride(width), dtype=torch.uint8)


def _code(source: int, target: int, size: int, num_chosen: int = 0) -> Instruction:
    return Instruction(
        kind=Kind.CODE, source=source, target=target, size=size, num_chosen=num_chosen
    )


def round_experts(experts: nn.Module, library: NativeLibrary, format: Format) -> None:
    """Round all weights of experts to what codes can stand for, freeing each before the next."""
    for name in [name for name, _ in experts.named_parameters()]:
        setattr(experts, name, rounded_copy(getattr(experts, name), library, format))


@contextmanager
def computing_expert_codes(experts: nn.Module) -> Iterator[None]:
    """Let experts compute with codes of rows and weights, in float32, for a while."""
    # Transformers' own definition multiplies by `linear`; what it chooses for speed does not.
    forward = inspect.unwrap(type(experts).forward)

    def coded_forward(*args: Any, **kwargs: Any) -> Any:
        with _CodedProducts():
            return forward(experts, *args, **kwargs)

    experts.__dict__["forward"] = coded_forward
    try:
        yield
    finally:
        del experts.__dict__["forward"]


class _CodedProducts(TorchFunctionMode):
    """Lets `linear` compute with codes of rows and weights, in float32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not functional.linear or len(args) != 2:
            return func(*args, **(kwargs or {}))
        rows, weight = args
        return functional.linear(coded_rows(rows), coded_weight(weight)).to(rows.dtype)

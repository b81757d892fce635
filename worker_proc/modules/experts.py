"""A mixture of experts in place of an MLP, computed by the native kernels.

The router chooses a few experts for each row. The rows are sorted by expert, so that an expert's
weights are read once, and the results of a row's experts are added in the order in which they were
chosen (worker_proc/native/products/experts.h). The experts' weights may be codes; the router's
weights are kept as they are.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from worker_proc.modules.coded_weights import pack_expert_weights
from worker_proc.modules.expert_products import (
    EXPERT_BUFFERS,
    Chosen,
    ExpertBuffers,
    ExpertProducts,
    ExpertSizes,
    Gating,
    as_program,
)
from worker_proc.modules.packed_linear import coded_rows, coded_weight, rounded_copy
from worker_proc.native.instructions import projection
from worker_proc.native.kernels import NativeLibrary
from worker_proc.native.packed_weights import Format, PackedWeight
from worker_proc.native.structures import CHOICE_BYTES, Activation, Instruction, Kind


class Routing(NamedTuple):
    """How a router converts probabilities of all experts to weights of the chosen experts."""

    num_chosen: int
    normalizes: bool
    """True if the weights add up to 1."""
    rounds_weights: bool
    """True if the weights have the model's dtype; False: float32."""


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

    Returns None if the module is something else, or if text does not reach it.
    """
    parts = dict(module.named_children())
    if set(parts) != {"gate", "experts"}:
        return None
    # A buffer may change the choice of a few rows, which the trials would not detect.
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


class FusedExperts(nn.Module):
    """The sum of down(f(gate(x)) · up(x)) over each row's experts, multiplied by their weights."""

    def __init__(
        self,
        library: NativeLibrary,
        activation: Activation,
        routing: Routing,
        weights: ExpertWeights,
        format: Format = Format.UNITS,
    ) -> None:
        """Pack the router's weights, and the experts' weights in `format`."""
        super().__init__()
        router, gate_up, down = weights
        self.num_experts, self.hidden_size, self.size = down.shape
        self.routing = routing
        self.activation = activation
        self._router = library.pack(router.detach(), None)
        packed = (
            pack_expert_weights(library, gate_up, format, gates=True),
            pack_expert_weights(library, down, format),
        )
        sizes = ExpertSizes(self.num_experts, self.hidden_size, self.size)
        self.products = ExpertProducts(library, Gating(activation), sizes, packed, down.dtype)
        self._program = as_program(self.instructions(EXPERT_BUFFERS))

    @property
    def gate_up(self) -> PackedWeight:
        """All experts' weights before the activation."""
        return self.products.up

    @property
    def choice_width(self) -> int:
        """The size of a row's choices, in values of the model's dtype."""
        return self.routing.num_chosen * CHOICE_BYTES // self.products.dtype.itemsize

    def instructions(self, buffers: ExpertBuffers) -> list[Instruction]:
        """Return the program over one step; rows of `source` are padded with zeros."""
        num_chosen, normalizes, rounds_weights = self.routing
        choose = Instruction(
            kind=Kind.CHOOSE,
            source=buffers.logits,
            num_experts=self.num_experts,
            num_chosen=num_chosen,
            choices=buffers.choices,
            normalizes=normalizes,
            rounds_weights=rounds_weights,
        )
        return [
            projection(self._router, source=buffers.source, target=buffers.logits),
            choose,
            *self.products.instructions(buffers, Chosen(num_chosen, rounds_weights)),
        ]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        rows = hidden.reshape(-1, self.hidden_size)
        out = self.products.execute(self._program, rows, self.routing.num_chosen)
        return out.reshape(hidden.shape)


def is_transposed(experts: nn.Module) -> bool:
    """Return whether weights are `[num_experts, num_inputs, num_outputs]`.

    transformers' interface has an attribute for that. Modules without it are recognized by the
    first product's outputs, gates and factors, which are twice as many as the inputs of the second
    product.
    """
    if hasattr(experts, "is_transposed"):
        return bool(experts.is_transposed)
    parameters = dict(experts.named_parameters())
    up, down = parameters.get("gate_up_proj"), parameters.get("down_proj")
    if up is None or down is None or up.dim() != 3 or down.dim() != 3:
        return False
    return up.shape[1] == down.shape[2] and up.shape[2] == 2 * down.shape[1]


def round_experts(experts: nn.Module, library: NativeLibrary, format: Format) -> None:
    """Round all weights of experts to values that codes represent, freeing each before the next."""
    has_transposed = is_transposed(experts)
    for name in [name for name, weight in experts.named_parameters() if weight.dim() == 3]:
        weight = getattr(experts, name)
        rounded = rounded_copy(weight.mT if has_transposed else weight, library, format)
        rounded = nn.Parameter(rounded.mT, requires_grad=False) if has_transposed else rounded
        setattr(experts, name, rounded)


@contextmanager
def computing_expert_codes(experts: nn.Module, *, of_rows: bool = True) -> Iterator[None]:
    """Make experts compute with codes of weights, and `of_rows`, in float32, within the context."""
    # transformers' own definition multiplies by `linear`; its faster replacements do not.
    forward = inspect.unwrap(type(experts).forward)

    def coded_forward(*args: Any, **kwargs: Any) -> Any:
        with _CodedProducts(of_rows=of_rows):
            return forward(experts, *args, **kwargs)

    experts.__dict__["forward"] = coded_forward
    try:
        yield
    finally:
        del experts.__dict__["forward"]


_MATRIX_PRODUCTS = (torch.Tensor.matmul, torch.Tensor.__matmul__, torch.matmul)


class _CodedProducts(TorchFunctionMode):
    """Multiplies rows, or their codes, by codes of weights, in float32, within the context."""

    def __init__(self, *, of_rows: bool) -> None:
        super().__init__()
        self._take = coded_rows if of_rows else torch.Tensor.float

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_transposed = func in _MATRIX_PRODUCTS
        if not (func is functional.linear or is_transposed) or len(args) != 2:
            return func(*args, **(kwargs or {}))
        rows, weight = args
        weight = weight.mT if is_transposed else weight
        return functional.linear(self._take(rows), coded_weight(weight)).to(rows.dtype)

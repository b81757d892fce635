"""A mixture of experts in place of an MLP, computed by the native kernels.

The router chooses a few experts for each row. The rows are sorted by expert, so that an expert's
weights are read once, and the results of a row's experts are added in the order in which they were
chosen (worker_proc/native/products/experts.h). The experts' weights may be codes; the router's
weights are kept as they are.
"""

from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from worker_proc.loading.deferred_module import make_generator
from worker_proc.modules.coded_weights import dequantized, pack_expert_weights, takes_row_codes
from worker_proc.modules.experts.coded import computing_expert_codes, round_experts
from worker_proc.modules.experts.products import (
    EXPERT_BUFFERS,
    Chosen,
    ExpertBuffers,
    ExpertProducts,
    ExpertSizes,
    Gating,
    as_program,
)
from worker_proc.modules.pointwise import activation_of
from worker_proc.modules.trial_candidates import MAX_ERROR, NUM_TRIAL_ROWS, closest_candidate
from worker_proc.native.instructions import projection
from worker_proc.native.kernels import NativeLibrary
from worker_proc.native.packed_weights import Format, PackedWeight
from worker_proc.native.structures import CHOICE_BYTES, Activation, Instruction, Kind

NUM_MIXTURE_ROWS = 64
MIXTURE_QUANTILE = {torch.float32: 0.98, torch.bfloat16: 0.9}
"""Share of a mixture's rows that must agree: in float32, all but one of 64.

If the logits of two experts are equal within their rounding, a row may choose the other expert, or
weight them differently.
"""


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
        self._router = library.packer.pack(router.detach(), None)
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


def fused_experts(
    module: nn.Module, library: NativeLibrary, number: int | None, format: Format
) -> tuple[int, FusedExperts] | None:
    """Return a mixture of experts; its number encodes the activation and the router's weighting.

    With codes, the experts' weights are also rounded in the module.
    """
    weights = expert_weights(module)
    if weights is None:
        return None
    router, experts = module.get_submodule("gate"), module.get_submodule("experts")
    num_experts, hidden_size = weights.router.shape
    known = None if number is None else number // 4
    function = getattr(experts, "act_fn", None)
    activation = activation_of(function, library, number=known)
    num_chosen = getattr(router, "top_k", None)
    if activation is None or not isinstance(num_chosen, int) or num_chosen > num_experts:
        return None
    if number is None:
        weighting = _weighting(router, hidden_size, weights.router.dtype)
        if weighting is None:
            return None
        number = 4 * activation + weighting
    routing = Routing(num_chosen, bool(number & 2), bool(number & 1))
    if format is not Format.UNITS and known is None:
        del weights  # rounded copies replace them one by one
        round_experts(experts, library, format)
        weights = expert_weights(module)
        assert weights is not None
    make = partial(FusedExperts, library, activation, routing, weights, format)
    both = (weights.gate_up, weights.down)
    codes_rows = format is Format.INT8_FOR_CODES or all(map(takes_row_codes, both))
    with ExitStack() as stack:
        if known is None:
            if codes_rows or format is Format.INT8:
                stack.enter_context(computing_expert_codes(experts, of_rows=codes_rows))
            stack.enter_context(dequantized(experts))
        return closest_candidate(
            module,
            hidden_size,
            {number: make},
            None if known is None else number,
            num_rows=NUM_MIXTURE_ROWS,
            quantile=MIXTURE_QUANTILE[weights.router.dtype],
        )


class _Products(TorchFunctionMode):
    """Records the dtypes of linear products within the context."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is functional.linear:
            self.dtypes.add(result.dtype)
        return result


def _weighting(router: nn.Module, size: int, dtype: torch.dtype) -> int | None:
    """Return 2 if the weights of the chosen experts add up to 1, plus 1 if they are rounded.

    Returns None for a router with another interface, one that multiplies in another dtype, and one
    that does not call `functional.linear`: the kernel rounds logits to the dtype, which changes the
    choices of some rows if the router does not.
    """
    generator = make_generator(2)
    rows = torch.randn(NUM_TRIAL_ROWS, size, generator=generator).to(dtype)
    try:
        with _Products() as products:
            _, weights, _ = router(rows)
    except (TypeError, ValueError, AttributeError, RuntimeError):
        return None
    if products.dtypes != {dtype} or not isinstance(weights, torch.Tensor):
        return None
    normalizes = bool(((weights.float().sum(dim=-1) - 1.0).abs() < MAX_ERROR[dtype]).all())
    return 2 * normalizes + (weights.dtype == dtype)

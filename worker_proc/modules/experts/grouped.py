"""Experts computed by the native kernels, given each row's experts and their weights.

All of transformers' experts have one interface: `experts(rows, top_k_index, top_k_weights)`. A
module qualifies by its parameters and its results: its own forward is run on rows of several
scales, and all of its experts must agree with the kernels.
"""

import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from worker_proc.loading.deferred_module import make_generator
from worker_proc.modules.coded_weights import dequantized, pack_expert_weights, takes_row_codes
from worker_proc.modules.experts.coded import computing_expert_codes, is_transposed, round_experts
from worker_proc.modules.experts.products import (
    EXPERT_BUFFERS,
    Chosen,
    ExpertProducts,
    ExpertSizes,
    Gating,
    as_program,
)
from worker_proc.modules.trial_errors import greatest, greatest_error
from worker_proc.native.kernels import NativeLibrary
from worker_proc.native.packed_weights import Format
from worker_proc.native.structures import Activation
from worker_proc.native.weight_packer import Matrices
from worker_proc.quantization.coded_tensor import CodedTensor

TRIAL_SCALES = (0.01, 1.0, 30.0, 1e4)
TRIAL_CHOSEN = 4
MIN_TRIAL_ROWS = 16
"""The least number of rows of each scale."""
MAX_ERROR = {torch.float32: 2e-5, torch.bfloat16: 0.02}
"""The greatest error of a value, relative to the greatest value of the rows of one scale. It allows
for other orders of sums, and for rounding."""
_UP = ("gate_up_proj", "up_proj")


class ExpertMatrices:
    """A module's expert matrices, `[num_outputs, num_inputs]` each, gates first."""

    def __init__(
        self,
        weights: torch.Tensor,
        biases: torch.Tensor | None,
        *,
        is_transposed: bool = False,
        is_interleaved: bool = False,
    ) -> None:
        """`weights` are `[num_experts, ...]`; interleaved gates and factors alternate."""
        self.weights = weights.transpose(1, 2) if is_transposed else weights
        self._biases = biases
        self._is_interleaved = is_interleaved
        self.is_transposed = is_transposed

    def __len__(self) -> int:
        return len(self.weights)

    def __getitem__(self, expert: int) -> torch.Tensor:
        return self._in_order(self.weights[expert])

    @property
    def matrices(self) -> Matrices:
        """The matrices in the order in which they are packed."""
        return self if self._is_interleaved else self.weights

    @property
    def biases(self) -> torch.Tensor | None:
        """Each expert's output bias, `[num_experts, num_outputs]`, in packing order."""
        if self._biases is None:
            return None
        return torch.stack([self._in_order(bias) for bias in self._biases])

    def _in_order(self, outputs: torch.Tensor) -> torch.Tensor:
        return torch.cat([outputs[::2], outputs[1::2]]) if self._is_interleaved else outputs


class ExpertModule(NamedTuple):
    """The matrices of a module whose parameters are those of experts."""

    up: ExpertMatrices
    down: ExpertMatrices
    is_gated: bool

    @property
    def takes_row_codes(self) -> bool:
        """True if the checkpoint requires coded rows and the kernels support them."""
        return all(takes_row_codes(part.weights) for part in (self.up, self.down))

    @property
    def sizes(self) -> ExpertSizes:
        num_experts, hidden_size, size = self.down.weights.shape
        return ExpertSizes(num_experts, hidden_size, size)


def read_experts(module: nn.Module, *, has_values: bool = True) -> ExpertModule | None:
    """Return the matrices of a module whose parameters are those of experts, or None.

    With `has_values`, experts on the meta device do not count. `is_transposed` and
    `is_concatenated` are attributes of transformers' interface.
    """
    parameters = dict(module.named_parameters())
    name = next((name for name in _UP if name in parameters), "")
    weights = {name, "down_proj"}
    biases = {f"{weight}_bias" for weight in weights}
    if set(parameters) not in (weights, weights | biases) or "down_proj" not in parameters:
        return None
    up, down = parameters[name], parameters["down_proj"]
    if next(module.buffers(), None) is not None:
        return None
    if has_values and (up.is_meta or down.is_meta):
        return None
    if up.dim() != 3 or down.dim() != 3 or len({p.dtype for p in parameters.values()}) > 1:
        return None
    is_coded = isinstance(up, CodedTensor) or isinstance(down, CodedTensor)
    is_gated = name == "gate_up_proj"
    has_transposed = is_transposed(module)
    is_interleaved = is_gated and not getattr(module, "is_concatenated", True)
    if is_coded and (has_transposed or is_interleaved):
        return None  # codes are packed as they are stored
    found = ExpertModule(
        ExpertMatrices(
            up,
            parameters.get(f"{name}_bias"),
            is_transposed=has_transposed,
            is_interleaved=is_interleaved,
        ),
        ExpertMatrices(down, parameters.get("down_proj_bias"), is_transposed=has_transposed),
        is_gated,
    )
    num_experts, hidden_size, size = found.sizes
    fits = found.up.weights.shape == (num_experts, (1 + is_gated) * size, hidden_size)
    return found if fits else None


class Trials(NamedTuple):
    """Trial rows, `[num_rows, hidden_size]`, with each row's experts and their weights."""

    rows: torch.Tensor
    chosen: torch.Tensor
    weights: torch.Tensor


class GroupedExperts(nn.Module):
    """The sum of down(f(up(x))) over each row's experts, multiplied by the given weights."""

    def __init__(
        self,
        library: NativeLibrary,
        gating: Gating,
        experts: ExpertModule,
        format: Format = Format.UNITS,
    ) -> None:
        """Pack the weights of all experts in `format`, one expert after the other."""
        super().__init__()
        up, down, is_gated = experts
        packed = (
            pack_expert_weights(library, up.matrices, format, gates=is_gated, biases=up.biases),
            pack_expert_weights(library, down.matrices, format, biases=down.biases),
        )
        dtype = down.weights.dtype
        self.num_experts = len(down)
        self.products = ExpertProducts(library, gating, experts.sizes, packed, dtype)

    def forward(
        self, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return `[..., hidden_size]`, given `[num_rows, top_k]` experts and weights.

        A row's experts are added in ascending order. An expert number out of range contributes 0.
        """
        rows = hidden.flatten(0, -2)
        index, order = top_k_index.sort(dim=-1, stable=True)
        weights = top_k_weights.gather(-1, order)
        exists = (index >= 0) & (index < self.num_experts)
        choices = torch.empty(*index.shape, 2, dtype=torch.int32)
        choices[..., 0] = index.where(exists, 0)
        choices[..., 1] = weights.where(exists, 0.0).float().view(torch.int32)
        num_chosen = index.shape[-1]
        chosen = Chosen(num_chosen, weights.dtype == hidden.dtype)
        program = as_program(self.products.instructions(EXPERT_BUFFERS, chosen))
        out = self.products.execute(program, rows, num_chosen, choices.flatten(1))
        return out.contiguous().view(hidden.shape)


def gating_of(module: nn.Module, activation: Activation | None) -> Gating | None:
    """Return how a module's experts gate, from its attributes and `activation`; None: unknown."""
    limit, alpha = (
        next(
            (float(v) for n in names if isinstance(v := getattr(module, n, None), float | int)), 0.0
        )
        for names in (("limit", "swiglu_limit"), ("alpha", "swiglu_alpha"))
    )
    if activation is None and not limit:
        return None
    is_gated = hasattr(module, "gate_up_proj")
    return Gating(activation or Activation.SILU, is_gated, limit, alpha)


@torch.inference_mode()
def fused_grouped_experts(
    module: nn.Module,
    library: NativeLibrary,
    activation: Activation | None,
    format: Format,
    *,
    is_proven: bool,
) -> GroupedExperts | None:
    """Return a module's replacement, if its experts are proven equivalent.

    With codes, the experts' weights are also rounded in the module.
    """
    experts, gating = read_experts(module), gating_of(module, activation)
    if experts is None or gating is None:
        return None
    if is_proven:
        return GroupedExperts(library, gating, experts, format)
    if format is not Format.UNITS:
        del experts  # rounded copies replace them one by one
        round_experts(module, library, format)
        experts = read_experts(module)
        assert experts is not None
    tried = trials(experts.sizes, experts.down.weights.dtype)
    codes_rows = format is Format.INT8_FOR_CODES or experts.takes_row_codes
    computing = None
    if codes_rows or format is Format.INT8:
        computing = computing_expert_codes(module, of_rows=codes_rows)
    expected = own_results(module, tried, computing)
    if expected is None:
        return None
    candidate = GroupedExperts(library, gating, experts, format)
    return candidate if agrees(candidate(*tried), expected, tried) else None


def agrees(found: torch.Tensor, expected: torch.Tensor, tried: Trials) -> bool:
    """Return whether trial results are close enough to the module's own, at each scale."""
    count = len(found) // len(TRIAL_SCALES)
    pairs = zip(found.float().split(count), expected.split(count), strict=True)
    return greatest(greatest_error(*pair) for pair in pairs) <= MAX_ERROR[tried.rows.dtype]


def own_results(
    module: nn.Module, tried: Trials, computing: AbstractContextManager[None] | None = None
) -> torch.Tensor | None:
    """Return a module's output for trial rows, in float32; None: it has another interface.

    It is computed by the class's own forward, or within `computing`.
    """
    try:
        with computing or _own_definition(module), dequantized(module):
            found: torch.Tensor = module(*tried).float()
    except (TypeError, ValueError, AttributeError, RuntimeError):
        return None
    return found


@contextmanager
def _own_definition(module: nn.Module) -> Iterator[None]:
    """Make experts use their class's own forward within the context.

    The faster implementations of transformers reject some sizes.
    """
    module.__dict__["forward"] = partial(inspect.unwrap(type(module).forward), module)
    try:
        yield
    finally:
        del module.__dict__["forward"]


def trials(sizes: ExpertSizes, dtype: torch.dtype) -> Trials:
    """Return rows of every scale; together they reach all experts."""
    num_experts, hidden_size, _ = sizes
    generator = make_generator(1)
    num_chosen = min(TRIAL_CHOSEN, num_experts)
    num_rows = max(-(-num_experts // num_chosen), MIN_TRIAL_ROWS)
    index = torch.arange(num_rows * num_chosen).view(num_rows, num_chosen) % num_experts
    rows, weights = [], []
    for scale in TRIAL_SCALES:
        rows.append(torch.randn(num_rows, hidden_size, generator=generator) * scale)
        weights.append(torch.rand(num_rows, num_chosen, generator=generator) + 0.1)
    index = index.repeat(len(TRIAL_SCALES), 1)
    return Trials(torch.cat(rows).to(dtype), index, torch.cat(weights))
